// Compares decoding on a GPU with decoding on the CPU: logits after every token.
#include <gtest/gtest.h>

#include "config/job_config.h"
#include "generate/decoder.h"
#include "ops/runtime/runtime.h"
#include "tensor/philox.h"
#include "tests/compare.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

/// Sets all weights of both models to the same numbers. The routers' bias grows by `bias_step` from one expert to the
/// next.
void fill(Parameters& cpu, Parameters& gpu, float bias_step) {
  std::vector<float> numbers;
  for (ParamId id = 0; id < cpu.size(); ++id) {
    const Philox random(1, static_cast<std::uint32_t>(id));
    numbers.resize(static_cast<std::size_t>(cpu.spec(id).shape.num_elements()));
    const bool is_norm = cpu.spec(id).shape.num_dims() == 1;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>(is_norm ? 1.0 + 0.1 * random.normal(i) : 0.1 * random.normal(i));
    }
    for (Parameters* parameters : {&cpu, &gpu}) parameters->set(id, 0, numbers);
  }
  for (ParamId id = 0; id < cpu.num_buffers(); ++id) {
    for (Parameters* parameters : {&cpu, &gpu}) {
      parameters->fill(parameters->buffer(id), [&](float* bias) {
        for (std::int64_t e = 0; e < cpu.buffer(id).num_elements(); ++e) bias[e] = bias_step * static_cast<float>(e);
      });
    }
  }
}

class DecoderCuda : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  }
};

TEST_P(DecoderCuda, LogitsAreThoseOfTheCpu) {
  const DType compute = GetParam();
  const bool is_exact = compute == DType::kFloat32;
  const double bound = is_exact ? 1e-5 : 3e-2;
  // In bfloat16 the two may round scores that are nearly equal to either side, and would then choose other experts.
  // A large bias leaves no doubt.
  const float bias_step = is_exact ? 0.02f : 2.0f;
  for (const std::int64_t q_lora_rank : {0, 48}) {
    ModelConfig config = parse_job_config(kSmallModel).model.args;
    config.q_lora_rank = q_lora_rank;
    config.original_seq_len = 16;
    config.rope_factor = 4.0f;
    cuda::Runtime runtime;
    Model cpu(config, {.compute = compute, .seq_len = 1});
    Model gpu(config, {.device = Device::kCuda, .compute = compute, .seq_len = 1});
    cpu.parameters().allocate_weights(compute);
    gpu.parameters().allocate_weights(compute, &runtime);
    fill(cpu.parameters(), gpu.parameters(), bias_step);

    const DecoderOptions options{.seq_len = 160, .num_slots = 2, .num_positions = 150};
    Decoder on_cpu(cpu, options), on_gpu(gpu, options, &runtime);
    std::int32_t next = 0;
    const auto prompt = [&](std::size_t length) {
      std::vector<std::int32_t> tokens(length);
      for (std::int32_t& token : tokens) token = next++ * 37 % static_cast<std::int32_t>(config.vocab_size);
      return tokens;
    };
    const auto fill_slot = [&](std::int64_t slot, std::size_t length) {
      const std::vector<std::int32_t> tokens = prompt(length);
      const auto expected = on_cpu.prefill(slot, tokens), logits = on_gpu.prefill(slot, tokens);
      ASSERT_EQ(logits.size(), expected.size());
      EXPECT_LE(relative_difference(logits, expected), bound) << "prompt of " << length;
    };
    fill_slot(0, 1);
    fill_slot(1, 7);
    for (int i = 0; i < 20; ++i) {
      // The GPU pads prompts to 64, 128 and 192 tokens. Each larger length needs a larger arena, and the graph is then
      // recorded anew.
      if (i == 5) fill_slot(0, 64);
      if (i == 10) fill_slot(0, 65);
      if (i == 15) fill_slot(1, 140);
      const std::vector<std::int32_t> tokens = prompt(2);
      const auto expected = on_cpu.decode(tokens), logits = on_gpu.decode(tokens);
      ASSERT_EQ(logits.size(), expected.size());
      EXPECT_LE(relative_difference(logits, expected), bound) << "token " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, DecoderCuda, ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

}  // namespace
}  // namespace tessera
