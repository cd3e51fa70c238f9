// Trains on a mesh of ranks, and compares the results with those of one rank.
#pragma once

#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "ops/loss/cross_entropy.h"
#include "run/rank_setup.h"
#include "step/training_step.h"
#include "tensor/philox.h"
#include "tests/comm/gpus.h"
#include "tests/step/small_model.h"
#include "tests/threads_scope.h"

namespace tessera::mesh_test {

using comm_test::RankOptions;
using comm_test::with_ranks;

inline const std::string kMeshModel = std::string(kSmallModel) + R"(
[training]
mixed_precision_param = "float32"
seq_len = 16
global_batch_size = 8
steps = 10
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 2
)";

inline constexpr double kLoadOfOneToken =
    8.0 / (8 * 16 * 3) * (1.0 + 1e-6);  // num_experts / (tokens of a step · top_k)

using Overrides = std::vector<std::string>;

struct MeshCase {
  const char* name;
  int num_ranks;
  MeshDegrees degrees;
  std::int64_t micro_batches = 1;
  Overrides overrides = {};
  Device device = Device::kCpu;
  bool favours_first_expert = false;  // by a bias that makes it every token's first choice

  friend void PrintTo(const MeshCase& mesh_case, std::ostream* out) { *out << mesh_case.name; }
};

/// Returns the tokens of one sequence of a step's batch. They do not depend on the rank.
inline std::vector<std::int32_t> sequence(std::int64_t step, std::int64_t idx, std::int64_t length,
                                          std::int64_t vocab) {
  const Philox random(static_cast<std::uint64_t>(step * 1000 + idx), stream_of("test.mesh"));
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < length; ++i) {
    // Half of the tokens follow from the token before, so that there is something to learn.
    const auto words = random.words(static_cast<std::uint64_t>(i));
    const auto drawn = static_cast<std::int64_t>(words[0] % static_cast<std::uint32_t>(vocab));
    tokens.push_back(static_cast<std::int32_t>(i > 0 && words[1] % 2 == 0 ? (tokens.back() * 5 + 7) % vocab : drawn));
  }
  return tokens;
}

/// Returns how many labels at the sequence's beginning do not count. So ranks and micro-batches have different numbers
/// of labels that count.
inline std::int64_t num_ignored(std::int64_t idx) { return idx * 5 % 7; }

using Gradients = std::map<std::string, std::vector<float>>;  // by the parameters' names

/// Holds the results of a run. They are the same on all ranks, except for the gradients, of which each rank has a part.
struct Trained {
  std::vector<double> losses, balance_losses, grad_norms, validation_losses, later_rounds;
  std::vector<std::int64_t> num_tokens;
  std::vector<std::vector<double>> expert_loads;
  Gradients gradients;         // of the first step
  std::vector<SiteSqnr> sqnr;  // of the first step, if something is quantized
};

/// Works with a rank's step, which has its memory, and with the batches of its micro-batches. `world` is null if there
/// is one rank.
using RankBody = std::function<void(ProcessGroup* world, TrainingStep& step, std::vector<Batch>& batches)>;

/// Runs `body` on all ranks of a mesh. `model` is their configuration, without the overrides. Each of several ranks has
/// one thread.
inline void on_mesh(const MeshCase& mesh_case, const std::string& model, const RankBody& body,
                    const RankOptions& options = {}) {
  const auto rank = [&](ProcessGroup* world) {
    const ThreadsScope threads(world == nullptr ? num_threads() : 1);
    const bool on_gpus = mesh_case.device == Device::kCuda && world != nullptr;
    const std::shared_ptr<cuda::Runtime> runtime =
        on_gpus ? join_gpus(*world, comm_test::gpu_of(world->rank())) : nullptr;
    const std::shared_ptr<Mesh> mesh = world == nullptr
                                           ? std::make_shared<Mesh>()
                                           : std::make_shared<Mesh>(*world, resolve(mesh_case.degrees, world->size()));
    Overrides overrides = mesh_case.overrides;
    const std::int64_t num_sequences = parse_job_config(model, overrides).training.global_batch_size;
    overrides.push_back(fmt::format("--training.local_batch_size={}",
                                    num_sequences / mesh->num_data_ranks() / mesh_case.micro_batches));
    const JobConfig config = parse_job_config(model, overrides);
    TrainingStep step(config, mesh, mesh_case.device, runtime);
    step.allocate();
    std::vector<Batch> batches;
    for (std::int64_t m = 0; m < mesh_case.micro_batches; ++m) batches.push_back(step.make_batch());
    body(world, step, batches);
  };
  if (mesh_case.num_ranks == 1) return rank(nullptr);
  RankOptions used = options;
  if (mesh_case.device == Device::kCuda && !used.failure_handler) {
    used.timeout = Progress::Seconds(20.0);
    // A graph that hangs cannot be aborted, so the end of the groups would hang, too.
    used.failure_handler = [](const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
      std::this_thread::sleep_for(std::chrono::seconds(2));  // so that the other ranks tell where they are, too
      std::_Exit(EXIT_FAILURE);
    };
  }
  with_ranks(
      mesh_case.num_ranks, [&](ProcessGroup& world) { rank(&world); }, used);
}

/// Copies a rank's part of the gradients to its place in the whole ones. Numbers that no rank has stay NaN.
inline void copy_gradients(const Parameters& parameters, Gradients& whole_gradients) {
  for (ParamId id = 0; id < parameters.size(); ++id) {
    std::vector<float>& whole = whole_gradients[parameters.spec(id).name];
    whole.resize(static_cast<std::size_t>(parameters.spec(id).shape.num_elements()), NAN);
    const Parameters::Range range = parameters.shard_range(id);
    std::vector<float> shard(static_cast<std::size_t>(range.end - range.begin));
    parameters.read(parameters.gradient_shard(id),
                    Tensor(shard.data(), {range.end - range.begin}, DType::kFloat32, Device::kCpu));
    parameters.slice(id).for_each_run(
        range.begin, range.end, [&](std::int64_t local_begin, std::int64_t global, std::int64_t count) {
          std::copy_n(shard.begin() + (local_begin - range.begin), count, whole.begin() + global);
        });
  }
}

inline Trained train(const MeshCase& mesh_case, const RankOptions& options = {}) {
  const ThreadsScope one_thread(1);
  Trained trained;
  std::mutex mutex;
  const auto rank = [&](ProcessGroup* world, TrainingStep& step, std::vector<Batch>& batches) {
    const Mesh& mesh = step.model().parameters().mesh();
    const JobConfig config = parse_job_config(kMeshModel, mesh_case.overrides);
    const std::int64_t local = batches.front().num_seqs();
    for (std::size_t i = 0; mesh_case.favours_first_expert && i < step.model().num_moe_layers(); ++i) {
      step.model().parameters().buffer(step.model().moe_layer(i).expert_bias()).data<float>()[0] = 10.0f;
    }
    // Which seeds suit quantized runs was found with all labels (mesh_test.cc).
    const bool quantizes = !config.model.converters.empty(), ignores = !quantizes;
    for (std::int64_t s = 1; s <= config.training.steps; ++s) {
      std::int64_t next = 0;
      std::vector<std::int64_t> num_valid;  // of each micro-batch, on all ranks
      for (Batch& batch : batches) {
        std::vector<std::int32_t> tokens, labels;
        for (std::int64_t b = 0; b < local; ++b) {
          const std::int64_t idx = next + mesh.data_rank() * local + b;
          const auto one = sequence(s, idx, config.training.seq_len + 1, config.model.args.vocab_size);
          tokens.insert(tokens.end(), one.begin(), one.end());
          labels.insert(labels.end(), one.begin() + 1, one.end());
          if (ignores) std::fill_n(labels.end() - config.training.seq_len, num_ignored(idx), kIgnoredLabel);
        }
        const std::int64_t end = next + local * mesh.num_data_ranks();
        num_valid.push_back((end - next) * config.training.seq_len);
        for (; next < end; ++next) num_valid.back() -= ignores ? num_ignored(next) : 0;
        batch.fill(tokens, labels);
      }
      const StepResult result = step.run(s, batches, quantizes && s == 1);
      // The evaluation runs between steps that run operator by operator, are recorded, or are replayed. It must change
      // none of them.
      double validation_loss = 0.0;
      for (std::size_t m = 0; m < batches.size(); ++m) {
        validation_loss += step.evaluate(batches[m]) * static_cast<double>(num_valid[m]);
      }
      validation_loss /= static_cast<double>(std::accumulate(num_valid.begin(), num_valid.end(), std::int64_t{0}));
      const std::lock_guard lock(mutex);
      if (s == 1) copy_gradients(step.model().parameters(), trained.gradients);
      if (world != nullptr && world->rank() != 0) continue;
      if (s == 1) trained.sqnr = result.sqnr;
      trained.losses.push_back(result.loss);
      trained.later_rounds.push_back(result.later_rounds);
      trained.num_tokens.push_back(result.num_tokens);
      trained.balance_losses.push_back(result.balance_loss);
      trained.grad_norms.push_back(result.grad_norm);
      trained.validation_losses.push_back(validation_loss);
      trained.expert_loads.push_back(result.expert_load);
    }
  };
  on_mesh(mesh_case, kMeshModel, rank, options);
  return trained;
}

/// Returns one rank's run of the same model, which is made once for all meshes.
inline const Trained& on_one_rank(const Overrides& overrides) {
  static std::map<Overrides, Trained> runs;
  const auto found = runs.find(overrides);
  if (found != runs.end()) return found->second;
  return runs[overrides] = train({.name = "one", .num_ranks = 1, .degrees = {}, .overrides = overrides});
}

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance,
                        const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], tolerance * std::abs(expected[i])) << what << " of step " << i + 1;
  }
}

/// Returns the norm of the difference, divided by that of the expected numbers.
inline double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(actual[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / norm);
}

/// Compares the norm of the difference with the norm of the expected numbers.
inline void expect_near_in_norm(const std::vector<float>& actual, const std::vector<float>& expected, double tolerance,
                                const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  if (actual != expected) {
    EXPECT_LE(relative_error(actual, expected), tolerance) << name;
  }
}

/// Compares losses, gradients and loads with those of one rank on a CPU.
inline void expect_as_on_one_rank(const MeshCase& mesh_case) {
  const Trained &one = on_one_rank(mesh_case.overrides), many = train(mesh_case);
  ASSERT_EQ(one.losses.size(), 10u);
  EXPECT_LT(one.losses.back(), 0.98 * one.losses.front());
  expect_near(many.losses, one.losses, 1e-5, "loss");
  EXPECT_EQ(many.num_tokens, one.num_tokens);
  expect_near(many.balance_losses, one.balance_losses, 1e-5, "balance loss");
  expect_near(many.grad_norms, one.grad_norms, 1e-4, "gradient norm");
  expect_near(many.validation_losses, one.validation_losses, 1e-5, "validation loss");
  ASSERT_EQ(many.expert_loads.size(), one.expert_loads.size());
  // The last bit of a float32 sum depends on the mesh. It can become a step between 8-bit numbers, and then change a
  // token's choice of an expert.
  const JobConfig config = parse_job_config(kMeshModel, mesh_case.overrides);
  const bool quantizes = !config.model.converters.empty();
  const bool has_rounds = config.parallelism.expert_parallel_capacity_factor > 0.0;
  EXPECT_EQ(std::accumulate(many.later_rounds.begin(), many.later_rounds.end(), 0.0) > 0.0, has_rounds);
  for (std::size_t s = 0; s < one.expert_loads.size(); ++s) {
    for (std::size_t i = 0; i < one.expert_loads[s].size(); ++i) {
      EXPECT_NEAR(many.expert_loads[s][i], one.expert_loads[s][i], quantizes ? kLoadOfOneToken : 0.0) << s << " " << i;
    }
  }
  // A GPU's sums also differ from a CPU's in their last bits, and a step of e4m3 is a sixteenth of the number.
  const double gradient_bound = quantizes && mesh_case.device == Device::kCuda ? 1e-3 : 1e-4;
  ASSERT_EQ(many.gradients.size(), one.gradients.size());
  for (const auto& [name, expected] : one.gradients) {
    expect_near_in_norm(many.gradients.at(name), expected, gradient_bound, name);
  }
}

/// Returns the keys of a, followed by those of b.
inline Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline const Overrides kEightLayers = {"--model.args.n_layers=8"};
inline const Overrides kDefers = {"--parallelism.pipeline_parallel_max_deferred=0"};
inline Overrides schedule(const std::string& name) { return {"--parallelism.pipeline_parallel_schedule=" + name}; }
inline const Overrides kMtp = {"--model.args.num_mtp_modules=1"};
/// The embedding and the head are larger than any layer.
inline const Overrides kLargeVocabulary = {"--model.args.vocab_size=640", "--model.args.num_experts=4",
                                           "--model.args.top_k=2", "--model.args.moe_inter_dim=8",
                                           "--optimizer.lr=4e-3"};
inline const Overrides kBalance = {"--model.args.seq_balance_loss_coeff=0.01", "--model.args.score_func=sigmoid",
                                   "--model.args.route_norm=true"};
inline const Overrides kNever = {"--parallelism.fsdp_reshard_after_forward=never"};
inline const Overrides kReduceBfloat16 = {"--training.mixed_precision_reduce=bfloat16"};
inline const Overrides kPerMicroBatch = {"--parallelism.pipeline_parallel_reduce_gradients=micro_batch"};
inline const Overrides kFull = {"--activation_checkpoint.mode=full"};
inline const Overrides kSelective = {"--activation_checkpoint.mode=selective"};
inline const Overrides kQueries = {"--model.args.q_lora_rank=48", "--activation_checkpoint.mode=selective"};
inline const Overrides kDocuments = {"--model.args.attn_mask_type=block_causal"};
inline const Overrides kDirect = {"--parallelism.expert_parallel_comm_backend=direct"};
/// There is room for a balanced load, which no step has.
inline const Overrides kRounds = {"--parallelism.expert_parallel_capacity_factor=1"};
/// Some dispatches take a later round, and some do not.
inline const Overrides kSomeRounds = {"--parallelism.expert_parallel_capacity_factor=1.1"};
/// Passes run in turns: without a pipeline, and with one.
inline const Overrides kOverlap = {"--parallelism.expert_parallel_overlap=true"};
inline const Overrides kDualPipeV = schedule("DualPipeV");
inline const Overrides kSixteen = {"--training.global_batch_size=16"};
inline const Overrides kGroups = {"--model.args.n_expert_groups=4", "--model.args.n_limited_groups=2"};
inline const Overrides kNotKept = {"--quantize.keep_weights=false"};
inline const Overrides kForced = {"--debug.moe_force_load_balance=true"};
// A rank's tokens are whole blocks of 32. An expert's rows, which are in the order of ranks, are those of one rank. So
// quantization blocks are the same on every mesh whose data ranks are all expert ranks.
inline const Overrides kMxfp8 = {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx",
                                 "--quantize.linear.mx.unaligned=bf16"};
// These overrides are for other meshes, where no block may lie along tokens.
inline const Overrides kWgradHigh = kMxfp8 + Overrides{"--quantize.linear.mx.recipe_name=mxfp8_wgrad_with_hp",
                                                       "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp"};

}  // namespace tessera::mesh_test
