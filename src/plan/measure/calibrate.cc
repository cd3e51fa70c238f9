#include "plan/measure/calibrate.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <span>

#include "base/median.h"
#include "base/version.h"
#include "config/job_config.h"
#include "ops/runtime/inventory.h"
#include "plan/measure/random_steps.h"
#include "run/record/run_info.h"
#include "step/training_step.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

// On a GPU the first steps load kernels, and record a graph each.
constexpr int kWarmUpSteps = 1, kWarmUpStepsOnGpu = 4;

constexpr const char* kModel = R"(
[model.args]
n_dense_layers = 1
num_shared_experts = 1
load_balance_coeff = 0.001
[training]
steps = 1000
)";

/// The sizes of a model and of its step. Together the models cover small and large operands of every operator.
struct Probe {
  std::int64_t dim, inter_dim, moe_inter_dim, layers, heads, head_dim, rope_dim, q_lora_rank, kv_lora_rank;
  std::int64_t experts, top_k, vocab_size, batch, seq_len;
  bool balances;      // has the balance loss
  bool has_variants;  // is trained in the variants too
};
constexpr Probe kProbes[] = {
    {96, 160, 64, 2, 3, 32, 32, 0, 32, 4, 2, 512, 4, 64, true, false},
    {128, 352, 96, 3, 4, 32, 32, 64, 64, 8, 2, 1024, 2, 256, false, true},
    {192, 512, 128, 2, 5, 48, 32, 0, 96, 4, 1, 2048, 4, 128, false, false},
    {256, 704, 192, 3, 4, 64, 32, 128, 128, 8, 3, 2048, 4, 256, true, true},
    {256, 640, 160, 2, 8, 32, 32, 0, 128, 16, 4, 4096, 1, 2048, true, false},
    {352, 992, 256, 2, 7, 64, 32, 192, 192, 8, 2, 4096, 2, 512, false, false},
    {512, 1376, 352, 2, 8, 64, 32, 256, 256, 8, 3, 8192, 2, 256, true, false},
    {480, 1120, 192, 3, 6, 64, 32, 0, 224, 16, 2, 2048, 4, 448, false, false},
};
/// For a GPU of 80 GB: layers of the 16B and the 671B model among smaller ones.
constexpr Probe kGpuProbes[] = {
    {1024, 2816, 704, 3, 8, 128, 64, 0, 512, 32, 4, 32768, 8, 1024, false, false},
    {2048, 4096, 1408, 2, 16, 128, 64, 0, 512, 16, 6, 32768, 1, 4096, false, false},
    {2048, 10944, 1408, 3, 16, 128, 64, 0, 512, 64, 6, 102400, 2, 8192, false, true},
    {4096, 8192, 1024, 2, 32, 128, 64, 768, 512, 32, 4, 32768, 2, 4096, true, false},
    {7168, 18432, 2048, 2, 128, 128, 64, 1536, 512, 16, 4, 16384, 2, 4096, true, false},
};

using Overrides = std::vector<std::string>;

Overrides joined(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The precisions that every probe is trained in.
std::vector<Overrides> precisions(Device device) {
  const std::string linear = "quantize.linear.mx", grouped = "quantize.grouped_mm.mx", both = linear + "," + grouped;
  const auto quantized = [](const std::string& converters) { return Overrides{"--model.converters=" + converters}; };
  const auto with = [&](const std::string& key, const std::string& value) {
    return Overrides{"--" + linear + "." + key + "=" + value, "--" + grouped + "." + key + "=" + value};
  };
  const Overrides fp8_blockwise = joined(quantized(both), with("recipe_name", "fp8_blockwise"));
  if (device == Device::kCpu) {
    return {{"--training.mixed_precision_param=float32"},
            {},
            quantized(linear),
            quantized(grouped),
            quantized(both),
            fp8_blockwise};
  }
  const Overrides forced = {"--debug.moe_force_load_balance=true"};
  const Overrides output = {"--" + linear + ".convert_output=true"}, blocks = with("block_shape", "128x128");
  return {forced, joined(forced, quantized(both)), joined(joined(forced, quantized(both)), joined(blocks, output)),
          joined(joined(forced, fp8_blockwise), output)};
}

/// Ways to train that have a few operators of their own. Some probes are trained in them too, in every precision.
std::vector<Overrides> variants(Device device) {
  const Overrides full = {"--activation_checkpoint.mode=full"}, selective = {"--activation_checkpoint.mode=selective"};
  const Overrides other_heads = {"--model.args.num_shared_experts=0", "--model.args.num_mtp_modules=1"};
  if (device == Device::kCuda) return {full, other_heads};
  // Blocks of 32 do not divide the output of wkv_a.
  const Overrides unaligned = {"--model.args.qk_rope_head_dim=16"};
  return {full, selective, unaligned, joined(unaligned, full), joined(unaligned, selective), other_heads};
}

JobConfig config_of(const Probe& probe, const Overrides& way) {
  std::vector<std::string> overrides = {
      fmt::format("--model.args.dim={}", probe.dim),
      fmt::format("--model.args.inter_dim={}", probe.inter_dim),
      fmt::format("--model.args.moe_inter_dim={}", probe.moe_inter_dim),
      fmt::format("--model.args.n_layers={}", probe.layers),
      fmt::format("--model.args.n_heads={}", probe.heads),
      fmt::format("--model.args.q_lora_rank={}", probe.q_lora_rank),
      fmt::format("--model.args.kv_lora_rank={}", probe.kv_lora_rank),
      fmt::format("--model.args.qk_nope_head_dim={}", probe.head_dim),
      fmt::format("--model.args.qk_rope_head_dim={}", probe.rope_dim),
      fmt::format("--model.args.v_head_dim={}", probe.head_dim),
      fmt::format("--model.args.num_experts={}", probe.experts),
      fmt::format("--model.args.top_k={}", probe.top_k),
      fmt::format("--model.args.vocab_size={}", probe.vocab_size),
      fmt::format("--model.args.seq_balance_loss_coeff={}", probe.balances ? 0.001 : 0.0),
      fmt::format("--training.local_batch_size={}", probe.batch),
      fmt::format("--training.global_batch_size={}", 2 * probe.batch),
      fmt::format("--training.seq_len={}", probe.seq_len),
      "--quantize.linear.mx.unaligned=bf16",
      "--quantize.grouped_mm.mx.unaligned=bf16",
  };
  return parse_job_config(kModel, joined(overrides, way));
}

/// The times of one model's steps and of their operators.
struct TimedModel {
  JobConfig config;
  std::shared_ptr<Mesh> mesh;
  std::vector<RecordedOperator> operators;  // of a step
  std::vector<std::vector<double>> times;   // by operator, of every round
  std::vector<double> step_seconds;         // without what a GPU ran besides operators
};

/// Trains a model anew for a few steps, and adds their times.
void time_steps(TimedModel& model, Device device, int num_steps) {
  TrainingStep step(model.config, model.mesh, device);
  step.allocate();
  RandomSteps steps(step, model.config, *model.mesh);
  for (int i = 0; i < (device == Device::kCpu ? kWarmUpSteps : kWarmUpStepsOnGpu); ++i) steps.run();
  const RandomSteps::Timed timed = steps.time_operators(num_steps);
  model.step_seconds.push_back(timed.step_seconds - timed.other_seconds);
  if (model.operators.empty()) {
    model.operators = timed.operators;
    model.times.resize(timed.operators.size());
  }
  TESSERA_CHECK(timed.operators.size() == model.operators.size(), "{} {}", timed.operators.size(),
                model.operators.size());
  for (std::size_t k = 0; k < model.operators.size(); ++k) model.times[k].push_back(timed.operators[k].seconds);
}

/// Says how a step's time follows from its operators' medians. A slow moment of the machine meets some operators of
/// every step, and the median of none. So a step takes longer than its operators' medians together.
struct StepFit {
  double seconds_per_operator;  // in addition to the operator itself
  double factor;                // of the medians
};

StepFit fit_steps(std::span<const TimedModel> models) {
  std::vector<MeasuredCall> steps;
  for (const TimedModel& model : models) {
    if (model.mesh->degrees.num_ranks() > 1) continue;  // its steps also wait for messages
    OperatorWork amounts;  // fit_rate fits a sum of any amounts: here a count, and seconds in the place of flop
    amounts.amounts[OperatorWork::kCalls] = static_cast<double>(model.operators.size());
    for (const std::vector<double>& times : model.times) amounts.amounts[OperatorWork::kFlop] += median(times);
    steps.push_back({amounts, median(model.step_seconds)});
  }
  const OperatorRate rate = fit_rate(steps);
  return {.seconds_per_operator = rate.seconds_per[OperatorWork::kCalls],
          .factor = rate.seconds_per[OperatorWork::kFlop]};
}

}  // namespace

std::string today() {
  return fmt::format("{:%Y-%m-%d}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

std::vector<JobConfig> calibration_models(Device device) {
  std::vector<JobConfig> models;
  for (const Probe& probe : device == Device::kCpu ? std::span<const Probe>(kProbes) : kGpuProbes) {
    for (const Overrides& precision : precisions(device)) {
      models.push_back(config_of(probe, precision));
      if (!probe.has_variants) continue;
      for (const Overrides& variant : variants(device)) models.push_back(config_of(probe, joined(precision, variant)));
    }
  }
  return models;
}

std::vector<JobConfig> calibration_models_of_ranks(std::int64_t num_ranks) {
  std::vector<JobConfig> models;
  for (const Probe& probe : kProbes) {
    if (probe.experts % num_ranks == 0) {
      const Overrides over_ranks = {fmt::format("--parallelism.expert_parallel_degree={}", num_ranks),
                                    "--parallelism.expert_parallel_comm_backend=standard",
                                    "--debug.moe_force_load_balance=true",  // else steps have different rows
                                    fmt::format("--training.global_batch_size={}", probe.batch * num_ranks)};
      for (const Overrides& precision : precisions(Device::kCpu)) {
        models.push_back(config_of(probe, joined(precision, over_ranks)));
      }
    }
    if (!probe.has_variants) continue;
    // At the turn of its V a rank hands activations to itself.
    const std::int64_t sequences = 2 * num_ranks;
    const Overrides zero_bubble = {fmt::format("--model.args.n_layers={}", 2 * num_ranks),
                                   fmt::format("--parallelism.pipeline_parallel_degree={}", num_ranks),
                                   "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
                                   "--parallelism.pipeline_parallel_microbatch_size=1",
                                   fmt::format("--training.local_batch_size={}", sequences),
                                   fmt::format("--training.global_batch_size={}", sequences)};
    for (const Overrides& precision : precisions(Device::kCpu)) {
      models.push_back(config_of(probe, joined(precision, zero_bubble)));
    }
  }
  return models;
}

Calibration calibrate(const CalibrateOptions& options) {
  std::vector<TimedModel> models;
  const auto one_rank = std::make_shared<Mesh>();
  for (const JobConfig& config : calibration_models(options.device)) models.push_back({config, one_rank, {}, {}, {}});
  if (options.world != nullptr && options.world->size() > 1) {
    const std::int64_t num_ranks = options.world->size();
    for (const JobConfig& config : calibration_models_of_ranks(num_ranks)) {
      const MeshDegrees degrees = resolve(config.mesh_degrees(), num_ranks);
      const bool has_mesh = models.back().mesh->degrees == degrees;  // groups take messages of all ranks
      const auto mesh = has_mesh ? models.back().mesh : std::make_shared<Mesh>(*options.world, degrees);
      models.push_back({config, mesh, {}, {}, {}});
    }
  }
  std::size_t done = 0;
  for (int round = 0; round < options.rounds; ++round) {
    for (TimedModel& model : models) {
      if (options.progress) options.progress(done++, models.size() * static_cast<std::size_t>(options.rounds));
      time_steps(model, options.device, options.steps);
    }
  }
  std::map<std::string, std::vector<MeasuredCall>> calls;  // by class
  for (const TimedModel& model : models) {
    for (std::size_t k = 0; k < model.operators.size(); ++k) {
      calls[class_of(model.operators[k])].push_back({work_of(model.operators[k]), median(model.times[k])});
    }
  }
  const StepFit step = fit_steps(models);
  Calibration calibration;
  const bool is_gpu = options.device == Device::kCuda;
  calibration.machine = is_gpu ? cuda::gpu_name() : processor_name();
  calibration.program = version();
  calibration.date = today();
  calibration.threads = is_gpu ? 0 : num_threads();
  for (const auto& [name, of_class] : calls) {
    OperatorRate rate = fit_rate(of_class);
    for (double& seconds : rate.seconds_per) seconds *= step.factor;
    calibration.operators.emplace(name, rate);
  }
  calibration.seconds_per_operator = step.seconds_per_operator;
  return calibration;
}

}  // namespace tessera
