// Compares whole steps on a GPU with those of the CPU. Skipped if there is no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "device/cuda.h"
#include "run/state/snapshot.h"
#include "run/state/training_state.h"
#include "step/training_step.h"
#include "tensor/philox.h"
#include "tests/gpu_delay.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

using Overrides = std::vector<std::string>;

constexpr std::int64_t kSteps = 20;

struct StepCase {
  const char* name;
  Overrides overrides;

  friend void PrintTo(const StepCase& one, std::ostream* out) { *out << one.name; }
};

class CudaStep : public ::testing::TestWithParam<StepCase> {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  }

  static JobConfig config(const char* dtype, const Overrides& more = {}) {
    Overrides overrides = {fmt::format("--training.mixed_precision_param={}", dtype),
                           "--training.local_batch_size=2",
                           "--training.global_batch_size=4",
                           "--training.seq_len=96",
                           "--lr_scheduler.warmup_steps=5",
                           fmt::format("--training.steps={}", kSteps)};
    overrides.insert(overrides.end(), GetParam().overrides.begin(), GetParam().overrides.end());
    overrides.insert(overrides.end(), more.begin(), more.end());
    JobConfig result = parse_job_config(kSmallModel, overrides);
    result.validate();
    return result;
  }

  /// Fills the batches with fresh random tokens below `num_tokens` for every step. Some tokens end documents.
  static void fill(const JobConfig& config, std::int64_t step, std::vector<Batch>& batches, std::int64_t num_tokens) {
    const Philox random(5, stream_of("cuda_step"));
    auto drawn = static_cast<std::uint64_t>(step) << 32;
    for (Batch& batch : batches) {
      std::vector<std::int32_t> tokens(
          static_cast<std::size_t>(config.training.local_batch_size * (config.training.seq_len + 1)));
      for (std::int32_t& token : tokens) {
        token = static_cast<std::int32_t>(random.words(drawn++)[0] % static_cast<std::uint32_t>(num_tokens));
      }
      tokens.front() = static_cast<std::int32_t>(num_tokens - 1);
      batch.fill(tokens);
    }
  }

  static std::vector<Batch> make_batches(const JobConfig& config, const TrainingStep& step) {
    std::vector<Batch> batches;
    for (std::int64_t i = 0; i < config.micro_batches_per_step(); ++i) batches.push_back(step.make_batch());
    return batches;
  }

  /// Returns loss and gradient norm of every step. `num_ahead` is the number of steps that are started before one is
  /// waited for.
  static std::vector<double> run(const JobConfig& config, Device device, std::size_t num_ahead = 0) {
    TrainingStep step(config, nullptr, device);
    step.allocate();
    std::vector<std::vector<Batch>> batches;
    for (std::size_t i = 0; i <= num_ahead; ++i) batches.push_back(make_batches(config, step));
    std::vector<double> numbers;
    const auto finish = [&] {
      const StepResult result = step.finish();
      numbers.push_back(result.total_loss);
      numbers.push_back(result.grad_norm);
      if (device == Device::kCuda) {
        EXPECT_GT(result.seconds.forward, 0.0);
        EXPECT_GT(result.seconds.backward, 0.0);
        EXPECT_GT(result.seconds.optimizer, 0.0);
      }
    };
    for (std::int64_t i = 1; i <= kSteps; ++i) {
      std::vector<Batch>& of_step = batches[static_cast<std::size_t>(i) % batches.size()];
      fill(config, i, of_step, config.model.args.vocab_size);
      step.start(i, of_step);
      if (step.num_started() > num_ahead) finish();
    }
    while (step.num_started() > 0) finish();
    numbers.push_back(step.evaluate(batches.front().front()));
    return numbers;
  }

  static void expect_near(const std::vector<double>& gpu, const std::vector<double>& cpu, double bound,
                          double norm_bound) {
    ASSERT_EQ(gpu.size(), cpu.size());
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      const bool is_norm = i % 2 == 1;
      EXPECT_NEAR(gpu[i], cpu[i], (is_norm ? norm_bound : bound) * std::abs(cpu[i])) << "step " << i / 2 + 1;
    }
  }
};

TEST_P(CudaStep, Float32LossesAreTheCpus) {
  const JobConfig job = config("float32");
  expect_near(run(job, Device::kCuda), run(job, Device::kCpu), 1e-5, 1e-4);
}

TEST_P(CudaStep, Bfloat16LossesAreTheCpus) {
  const JobConfig job = config("bfloat16");
  expect_near(run(job, Device::kCuda), run(job, Device::kCpu), 1e-3, 3e-2);
}

TEST_P(CudaStep, DeterministicRunsAreTheSameBits) {
  const JobConfig job = config("bfloat16", {"--debug.deterministic"});
  const std::vector<double> numbers = run(job, Device::kCuda);
  EXPECT_EQ(run(job, Device::kCuda), numbers);
  EXPECT_EQ(run(job, Device::kCuda, 1), numbers) << "a step that was started before the one before was read";
}

/// A host that comes late to a step does not make the step seem long, nor the one after it short.
TEST_P(CudaStep, AStepEndsWhenTheGpuHasMadeIt) {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  const JobConfig job = config("bfloat16");
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step), others = make_batches(job, step);
  for (std::vector<Batch>* of_step : {&batches, &others}) fill(job, 1, *of_step, job.model.args.vocab_size);
  const Clock::time_point begin = Clock::now();
  step.start(1, batches);
  step.start(2, others);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const StepResult first = step.finish(), second = step.finish();
  const auto busy = [](const PhaseSeconds& of) { return of.forward + of.backward + of.optimizer; };
  EXPECT_GE(Seconds(first.ended - begin).count(), busy(first.seconds));
  EXPECT_GE(Seconds(second.ended - first.ended).count(), busy(second.seconds));
  EXPECT_GT(Seconds(Clock::now() - second.ended).count(), 0.5);
}

/// A step whose numbers are not finite throws an error with its number. Weights, moments and biases stay unchanged,
/// even if the step is the replay of a graph and another step has been started after it.
TEST_P(CudaStep, ANonFiniteStepIsNotMade) {
  const JobConfig job = config("bfloat16");
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step), others = make_batches(job, step);
  const std::int64_t vocab = job.model.args.vocab_size;
  for (std::int64_t i = 1; i <= 5; ++i) {
    std::vector<Batch>& of_step = i % 2 == 0 ? batches : others;
    fill(job, i, of_step, vocab);
    step.run(i, of_step);
  }
  Parameters& parameters = step.model().parameters();
  const float bad = INFINITY;
  // This is the embedding of a token that step 6 has and step 7 does not have.
  ASSERT_EQ(parameters.spec(0).name, "tok_embeddings.weight");
  parameters.set(0, (vocab - 1) * job.model.args.dim, {&bad, 1});
  const auto state = [&] {
    std::vector<std::byte> all;
    std::vector<Tensor> tensors = {parameters.all_masters(), parameters.optimizer_tensor(0),
                                   parameters.optimizer_tensor(1)};
    EXPECT_GT(parameters.num_buffers(), 0u);  // the experts' biases
    for (ParamId id = 0; id < parameters.num_buffers(); ++id) tensors.push_back(parameters.buffer(id));
    for (const Tensor& tensor : tensors) {
      const std::size_t begin = all.size();
      all.resize(begin + tensor.num_bytes());
      parameters.read(tensor, Tensor(all.data() + begin, tensor.shape(), tensor.dtype(), Device::kCpu));
    }
    return all;
  };
  const std::vector<std::byte> before = state();
  try {
    fill(job, 6, batches, vocab);
    fill(job, 7, others, vocab - 1);
    step.start(6, batches);
    step.start(7, others);
    step.finish();
    FAIL() << "the step was made";
  } catch (const NonFiniteStep& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("step 6"));
  }
  EXPECT_EQ(state(), before);
  step.run(7, others);
  EXPECT_NE(state(), before);
}

/// A fault that does not recur changes no bit, even if the next step has already been started.
TEST_P(CudaStep, AStepThatFailsOnceIsMadeAgain) {
  const auto train = [&](std::int64_t nan_at_step) {
    JobConfig job = config("bfloat16");
    job.debug.deterministic = true;
    job.debug.nan_at_step = nan_at_step;
    TrainingStep step(job, nullptr, Device::kCuda);
    step.allocate();
    std::vector<Batch> even = make_batches(job, step), odd = make_batches(job, step);
    std::vector<std::pair<double, double>> results;
    const auto finish = [&] {
      const StepResult result = step.finish();
      EXPECT_EQ(result.repeated_for.empty(), result.step != nan_at_step) << result.step;
      results.emplace_back(result.loss, result.grad_norm);
    };
    for (std::int64_t i = 1; i <= 8; ++i) {
      std::vector<Batch>& batches = i % 2 == 0 ? even : odd;
      fill(job, i, batches, job.model.args.vocab_size);
      step.start(i, batches);
      if (step.num_started() == step.max_started()) finish();
    }
    while (step.num_started() > 0) finish();
    return results;
  };
  EXPECT_EQ(train(6), train(0));
}

TEST_P(CudaStep, TheStateIsReadAndWritten) {
  const JobConfig job = config("bfloat16");
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step);
  const auto make_step = [&](std::int64_t i) {
    fill(job, i, batches, job.model.args.vocab_size);
    step.run(i, batches);
  };
  make_step(1);
  TrainingState state(step.model().parameters());
  std::vector<std::byte> bytes(state.num_bytes());
  const TrainingState::Checksums before = state.read(bytes.data());
  EXPECT_EQ(checksum_of_pieces(bytes), before.all);
  std::vector<float> masters(static_cast<std::size_t>(step.model().parameters().all_masters().num_elements()));
  const Tensor all = step.model().parameters().all_masters();
  step.model().parameters().read(all, Tensor(masters.data(), all.shape(), all.dtype(), Device::kCpu));
  EXPECT_EQ(std::memcmp(masters.data(), bytes.data(), all.num_bytes()), 0);
  make_step(2);
  EXPECT_NE(state.read().all, before.all);
  state.write(bytes);
  const TrainingState::Checksums after = state.read();
  EXPECT_EQ(after.all, before.all);
  EXPECT_EQ(after.buffers, before.buffers);
}

/// The state is copied so late that a step which did not wait for the copy would have changed it.
TEST_P(CudaStep, AStepWaitsForWhoReadsTheState) {
  JobConfig job = config("bfloat16");
  job.debug.deterministic = true;
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step);
  const Tensor masters = step.model().parameters().all_masters();
  Buffer copy = Buffer::pinned(masters.num_bytes());
  const cuda::Stream stream;
  TrainingState state(step.model().parameters());
  for (std::int64_t i = 1; i <= 6; ++i) {  // the first steps are not graphs yet
    std::vector<std::byte> before(state.num_bytes());
    state.read(before.data());
    put_delay(stream, 50000);
    cuda::copy_bytes(stream, masters.raw(), masters.num_bytes(), copy.data());
    step.state_read_done(i % 2 == 0 ? StateReader::kMemoryCopy : StateReader::kCheckpoint).record(stream);
    fill(job, i, batches, job.model.args.vocab_size);
    step.run(i, batches);
    EXPECT_EQ(std::memcmp(copy.data(), before.data(), masters.num_bytes()), 0) << i;
  }
}

TEST_P(CudaStep, ACopyBesideAStepIsOfTheStateBefore) {
  const JobConfig job = config("bfloat16");
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step);
  TrainingState state(step.model().parameters());
  Buffer copy = Buffer::pinned(state.num_bytes());
  for (std::int64_t i = 1; i <= 4; ++i) {
    const TrainingState::Checksums before = state.read();
    state.start_copy(copy.data(), step.state_read_done(StateReader::kMemoryCopy));
    fill(job, i, batches, job.model.args.vocab_size);
    step.run(i, batches);
    const TrainingState::Checksums copied = state.checksums_of_copy({copy.data(), copy.size()});
    EXPECT_EQ(copied.all, before.all);
    EXPECT_EQ(copied.buffers, before.buffers);
    EXPECT_NE(state.read().all, before.all);
  }
}

/// A save's copy and a copy in memory, both beside a step. The save's goes through pinned memory piece by piece.
TEST_P(CudaStep, ASnapshotBesideAStepIsOfTheStateBefore) {
  const JobConfig job = config("bfloat16");
  TrainingStep step(job, nullptr, Device::kCuda);
  step.allocate();
  std::vector<Batch> batches = make_batches(job, step);
  const Parameters& parameters = step.model().parameters();
  TrainingState state(parameters);
  Buffer copy = Buffer::pinned(state.num_bytes());
  std::vector<Tensor> tensors;  // in the order of the state
  tensors.push_back(parameters.all_masters());
  for (std::size_t i = 0; i < parameters.optimizer_tensors().size(); ++i) {
    tensors.push_back(parameters.optimizer_tensor(i));
  }
  tensors.push_back(parameters.all_buffers());
  Snapshot snapshot(&step.state_read_done(StateReader::kCheckpoint), std::size_t{20} << 10);
  for (std::int64_t i = 1; i <= 6; ++i) {  // the first steps are not graphs yet
    const TrainingState::Checksums before = state.read();
    snapshot.start(tensors);
    state.start_copy(copy.data(), step.state_read_done(StateReader::kMemoryCopy));
    if (i == 4) snapshot.drop();  // as a save that fails while its copy is under way
    fill(job, i, batches, job.model.args.vocab_size);
    step.run(i, batches);
    EXPECT_EQ(state.checksums_of_copy({copy.data(), copy.size()}).all, before.all);
    if (i == 4) {
      EXPECT_EQ(snapshot.num_held_bytes(), 0u);
      continue;
    }
    std::vector<std::byte> read;
    snapshot.read(state.num_bytes(),
                  [&](std::span<const std::byte> bytes) { read.insert(read.end(), bytes.begin(), bytes.end()); });
    EXPECT_EQ(state.checksums_of_copy(read).all, before.all);
    EXPECT_EQ(snapshot.num_held_bytes(), 0u);
    EXPECT_NE(state.read().all, before.all);
  }
  snapshot.start(tensors);  // and it is destroyed while the copy is under way
}

const Overrides kConverters = {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx"};
Overrides recipe(const std::string& name, const std::string& blocks = "default") {
  Overrides overrides = kConverters;
  for (const char* kind : {"linear", "grouped_mm"}) {
    overrides.push_back(fmt::format("--quantize.{}.mx.recipe_name={}", kind, name));
    overrides.push_back(fmt::format("--quantize.{}.mx.block_shape={}", kind, blocks));
    overrides.push_back(fmt::format("--quantize.{}.mx.unaligned=bf16", kind));
  }
  return overrides;
}

INSTANTIATE_TEST_SUITE_P(
    Models, CudaStep,
    ::testing::Values(
        StepCase{"small", {}},
        StepCase{"heads_of_cudnn",
                 {"--model.args.n_heads=2", "--model.args.qk_nope_head_dim=128", "--model.args.qk_rope_head_dim=64",
                  "--model.args.v_head_dim=128", "--model.args.attn_mask_type=causal"}},
        StepCase{"documents_of_cudnn",
                 {"--model.args.n_heads=2", "--model.args.qk_nope_head_dim=128", "--model.args.qk_rope_head_dim=64",
                  "--model.args.v_head_dim=128", "--model.args.attn_mask_type=block_causal"}},
        StepCase{"groups_and_mtp",
                 {"--model.args.score_func=sigmoid", "--model.args.route_norm", "--model.args.n_expert_groups=4",
                  "--model.args.n_limited_groups=2", "--model.args.seq_balance_loss_coeff=0.001",
                  "--model.args.q_lora_rank=32", "--model.args.num_mtp_modules=1"}},
        StepCase{"two_chunks_of_the_head", {"--training.seq_len=1056"}},
        StepCase{"moments_in_bfloat16", {"--optimizer.state_dtype=bfloat16"}},
        StepCase{"selective", {"--activation_checkpoint.mode=selective"}},
        StepCase{"full", {"--activation_checkpoint.mode=full"}}, StepCase{"mxfp8", recipe("mxfp8", "128x128")},
        StepCase{"mxfp8_256", recipe("mxfp8", "256x256")}, StepCase{"mxfp8_exact", recipe("mxfp8", "1x32")},
        StepCase{"fp8_blockwise", recipe("fp8_blockwise")}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tessera
