// Compares decoding from the cache with the training forward over the whole text: logits at every position.
#include "generate/decoder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "tensor/philox.h"
#include "tests/compare.h"
#include "tests/forward.h"
#include "tests/threads_scope.h"

namespace tessera {
namespace {

struct Case {
  const char* name;
  ModelConfig config;
  std::int64_t seq_len;  // sequence length of training
};

ModelConfig small() {
  ModelConfig c;
  c.vocab_size = 101;
  c.dim = 48;
  c.inter_dim = 80;
  c.moe_inter_dim = 24;
  c.n_layers = 3;
  c.n_heads = 3;
  c.kv_lora_rank = 40;
  c.qk_nope_head_dim = 12;
  c.qk_rope_head_dim = 10;
  c.v_head_dim = 20;
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> result = {
      {"plain", small(), 40}, {"dense", small(), 40}, {"groups", small(), 40}, {"yarn", small(), 40}};
  result[1].config.n_dense_layers = 3;
  ModelConfig& groups = result[2].config;
  groups.q_lora_rank = 28;
  groups.score_func = ScoreFunction::kSigmoid;
  groups.route_norm = true;
  groups.route_scale = 2.5f;
  groups.n_expert_groups = 4;
  groups.n_limited_groups = 2;
  groups.num_mtp_modules = 1;
  groups.seq_balance_loss_coeff = 0.01f;
  result[3].config.original_seq_len = 16;
  result[3].config.rope_factor = 4.0f;
  result[3].config.num_shared_experts = 0;
  result[3].config.attn_mask_type = AttentionMask::kBlockCausal;
  return result;
}

/// Returns the tokens of text `text`. None is an EOS, at which block_causal would mask.
std::vector<std::int32_t> text_of(std::int64_t length, std::uint32_t text, std::int64_t vocab) {
  const Philox random(3, text);
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < length; ++i) {
    tokens.push_back(static_cast<std::int32_t>(random.words(static_cast<std::uint64_t>(i))[0] % vocab));
  }
  return tokens;
}

class DecoderTest : public ::testing::TestWithParam<std::tuple<std::size_t, DType>> {};

TEST_P(DecoderTest, LogitsAreTheForwards) {
  const auto [name, config, seq_len] = cases()[std::get<0>(GetParam())];
  const DType compute = std::get<1>(GetParam());
  const double bound = compute == DType::kFloat32 ? 1e-5 : 3e-2;
  const std::int64_t length = 36;
  Model model(config, {.compute = compute, .seq_len = seq_len, .max_tokens = length});
  model.parameters().allocate(compute);
  model.parameters().initialise(5);
  // These biases change the choice of experts.
  for (ParamId id = 0; id < model.parameters().num_buffers(); ++id) {
    const Tensor bias = model.parameters().buffer(id);
    for (std::int64_t e = 0; e < bias.num_elements(); ++e) bias.data<float>()[e] = 0.02f * static_cast<float>(e % 3);
  }

  const std::vector<std::int64_t> prompts = {1, 17, 30};
  Decoder decoder(model, {.seq_len = seq_len, .num_slots = 3, .num_positions = length});
  std::vector<std::vector<std::int32_t>> texts;
  std::vector<std::vector<float>> expected;
  const auto vocab = static_cast<std::size_t>(config.vocab_size);
  const auto row = [&](std::size_t text, std::int64_t position) {
    return std::span(expected[text]).subspan(static_cast<std::size_t>(position) * vocab, vocab);
  };
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    texts.push_back(text_of(length, static_cast<std::uint32_t>(i), config.vocab_size));
    expected.push_back(forward_logits(model, texts[i]));
    const auto prompt = static_cast<std::size_t>(prompts[i]);
    decoder.prefill(static_cast<std::int64_t>(i), texts[i]);  // the former content of a slot does not matter
    const auto logits = decoder.prefill(static_cast<std::int64_t>(i), std::span(texts[i]).first(prompt));
    EXPECT_LE(relative_difference(logits, row(i, prompts[i] - 1)), bound) << name << " prompt " << i;
  }
  while (decoder.length(2) < length) {
    std::vector<std::int32_t> next;
    for (std::size_t i = 0; i < 3; ++i) {
      next.push_back(texts[i][static_cast<std::size_t>(decoder.length(static_cast<std::int64_t>(i)))]);
    }
    const auto logits = decoder.decode(next);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_LE(relative_difference(logits.subspan(i * vocab, vocab),
                                    row(i, decoder.length(static_cast<std::int64_t>(i)) - 1)),
                bound)
          << name << " text " << i << " position " << decoder.length(static_cast<std::int64_t>(i)) - 1;
    }
  }
  EXPECT_THROW(decoder.decode({{0, 0, 0}}), InternalError);  // slot 2 is full
}

INSTANTIATE_TEST_SUITE_P(Cases, DecoderTest,
                         ::testing::Combine(::testing::Range<std::size_t>(0, 4),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16)),
                         [](const auto& test) {
                           return std::string(cases()[std::get<0>(test.param)].name) + "_" +
                                  name_of(std::get<1>(test.param));
                         });

/// In training, block_causal masks at an EOS. A prompt is one document, whatever tokens it has.
TEST(Decoder, APromptIsOneDocument) {
  ModelConfig config = small();
  const std::vector<std::int32_t> text = text_of(20, 0, config.vocab_size);
  config.eos_id = text[7];
  std::vector<float> logits[2];
  for (const auto mask : {AttentionMask::kCausal, AttentionMask::kBlockCausal}) {
    config.attn_mask_type = mask;
    Model model(config, {.compute = DType::kFloat32, .seq_len = 20, .max_tokens = 20});
    model.parameters().allocate(DType::kFloat32);
    model.parameters().initialise(5);
    Decoder decoder(model, {.seq_len = 20, .num_slots = 1, .num_positions = 20});
    const auto last = decoder.prefill(0, text);
    logits[mask == AttentionMask::kCausal ? 0 : 1].assign(last.begin(), last.end());
    if (mask == AttentionMask::kCausal) continue;
    // The mask does change the training forward.
    const std::vector<float> masked = forward_logits(model, text);
    EXPECT_GT(relative_difference(std::span(masked).last(logits[0].size()), logits[0]), 1e-3);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST(Decoder, CachesTheLatentOnly) {
  Model model(ModelConfig{}, {.compute = DType::kBFloat16, .seq_len = 64});
  const Decoder decoder(model, {.seq_len = 64, .num_slots = 2, .num_positions = 100});
  EXPECT_EQ(decoder.cache_bytes(), 6u * 2u * 100u * 576u * 2u);
}

/// Runs on one thread. Threads that wait for each other on a busy machine would measure the machine.
TEST(Decoder, IsFiveTimesFasterThanRecomputingAPrefixOf512) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer slows the two sides differently";
#endif
  using Clock = std::chrono::steady_clock;
  const ThreadsScope one_thread(1);
  const std::int64_t context = 512;
  Model model(ModelConfig{}, {.compute = DType::kFloat32, .seq_len = context, .max_tokens = context});
  model.parameters().allocate_weights(DType::kFloat32);
  const std::vector<std::int32_t> text = text_of(context, 0, model.config().vocab_size);
  for (ParamId id = 0; id < model.parameters().size(); ++id) {
    const Tensor weight = model.parameters().weight(id);
    for (std::int64_t i = 0; i < weight.num_elements(); ++i)
      weight.data<float>()[i] = 0.001f * static_cast<float>(i % 29);
  }
  Decoder decoder(model, {.seq_len = context, .num_slots = 1, .num_positions = context + 8});
  const auto seconds = [](auto&& work) {
    double best = HUGE_VAL;
    for (int i = 0; i < 3; ++i) {
      const auto begin = Clock::now();
      work();
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return best;
  };
  const double recomputed = seconds([&] { decoder.prefill(0, text); });
  const std::vector<std::int32_t> token = {5};
  decoder.decode(token);
  const double cached = seconds([&] { decoder.decode(token); });
  RecordProperty("recomputed_ms", std::to_string(1e3 * recomputed));
  RecordProperty("cached_ms", std::to_string(1e3 * cached));
  EXPECT_GE(recomputed / cached, 5.0) << recomputed << " s against " << cached << " s";
}

}  // namespace
}  // namespace tessera
