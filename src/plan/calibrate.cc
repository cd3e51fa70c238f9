#include "plan/calibrate.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "base/median.h"
#include "base/version.h"
#include "config/job_config.h"
#include "plan/random_tokens.h"
#include "run/record/run_info.h"
#include "step/training_step.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

constexpr int kWarmUpSteps = 1;

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
  std::int64_t dim, inter_dim, moe_inter_dim, layers, heads, q_lora_rank, experts, top_k, vocab_size, batch, seq_len;
  bool balances;      // has the balance loss
  bool has_variants;  // is trained in the variants too
};
constexpr Probe kProbes[] = {
    {64, 160, 64, 2, 2, 0, 4, 2, 512, 4, 64, true, false},
    {128, 352, 96, 3, 4, 64, 8, 2, 1024, 2, 256, false, true},
    {192, 512, 128, 2, 4, 0, 4, 1, 2048, 4, 128, false, false},
    {256, 704, 192, 3, 4, 128, 8, 3, 2048, 4, 256, true, true},
    {256, 640, 160, 2, 8, 0, 16, 4, 4096, 1, 2048, true, false},
    {384, 1024, 256, 2, 6, 192, 8, 2, 4096, 2, 512, false, false},
    {512, 1376, 352, 2, 8, 256, 8, 3, 8192, 2, 256, true, false},
    {512, 1024, 192, 3, 8, 0, 16, 2, 2048, 4, 512, false, false},
};

using Overrides = std::vector<std::string>;

Overrides joined(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The precisions that every probe is trained in.
std::vector<Overrides> precisions() {
  const std::string linear = "quantize.linear.mx", grouped = "quantize.grouped_mm.mx";
  const auto quantized = [](const std::string& converters) { return Overrides{"--model.converters=" + converters}; };
  return {{"--training.mixed_precision_param=float32"},
          {},
          quantized(linear),
          quantized(grouped),
          quantized(linear + "," + grouped),
          joined(quantized(linear + "," + grouped),
                 {"--" + linear + ".recipe_name=fp8_blockwise", "--" + grouped + ".recipe_name=fp8_blockwise"})};
}

/// Ways to train that have a few operators of their own. Some probes are trained in them too, in every precision.
std::vector<Overrides> variants() {
  const Overrides full = {"--activation_checkpoint.mode=full"}, selective = {"--activation_checkpoint.mode=selective"};
  // Blocks of 32 do not divide the output of wkv_a.
  const Overrides unaligned = {"--model.args.qk_rope_head_dim=16"};
  return {full,
          selective,
          unaligned,
          joined(unaligned, full),
          joined(unaligned, selective),
          {"--model.args.num_shared_experts=0", "--model.args.num_mtp_modules=1"}};
}

JobConfig config_of(const Probe& probe, const Overrides& way, int num_micro_batches) {
  const std::int64_t head = probe.dim / probe.heads;
  std::vector<std::string> overrides = {
      fmt::format("--model.args.dim={}", probe.dim),
      fmt::format("--model.args.inter_dim={}", probe.inter_dim),
      fmt::format("--model.args.moe_inter_dim={}", probe.moe_inter_dim),
      fmt::format("--model.args.n_layers={}", probe.layers),
      fmt::format("--model.args.n_heads={}", probe.heads),
      fmt::format("--model.args.q_lora_rank={}", probe.q_lora_rank),
      fmt::format("--model.args.kv_lora_rank={}", probe.dim / 2),
      fmt::format("--model.args.qk_nope_head_dim={}", head),
      "--model.args.qk_rope_head_dim=32",
      fmt::format("--model.args.v_head_dim={}", head),
      fmt::format("--model.args.num_experts={}", probe.experts),
      fmt::format("--model.args.top_k={}", probe.top_k),
      fmt::format("--model.args.vocab_size={}", probe.vocab_size),
      fmt::format("--model.args.seq_balance_loss_coeff={}", probe.balances ? 0.001 : 0.0),
      fmt::format("--training.local_batch_size={}", probe.batch),
      fmt::format("--training.global_batch_size={}", probe.batch * num_micro_batches),
      fmt::format("--training.seq_len={}", probe.seq_len),
      "--quantize.linear.mx.unaligned=bf16",
      "--quantize.grouped_mm.mx.unaligned=bf16",
  };
  return parse_job_config(kModel, joined(overrides, way));
}

/// The times of one model's steps and of their operators.
struct TimedModel {
  JobConfig config;
  std::vector<RecordedOperator> operators;  // of a step
  std::vector<std::vector<double>> times;   // by operator, of every step
  std::vector<double> step_seconds;
};

/// Trains a model anew for a few steps, and adds their times.
void time_steps(TimedModel& model, int num_steps) {
  TrainingStep step(model.config);
  step.allocate();
  std::vector<Batch> batches;
  for (std::int64_t i = 0; i < model.config.micro_batches_per_step(); ++i) batches.push_back(step.make_batch());
  RandomTokens tokens(model.config, 0);
  StepRecord record;
  step.set_record(&record);
  for (int i = 0; i < kWarmUpSteps + num_steps; ++i) {
    for (Batch& batch : batches) batch.fill(tokens.next());
    record.clear();
    const auto begin = std::chrono::steady_clock::now();
    step.run(i + 1, batches);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (i < kWarmUpSteps) continue;
    model.step_seconds.push_back(seconds);
    const std::vector<RecordedOperator>& operators = record.operators();
    if (model.operators.empty()) {
      model.operators = operators;
      model.times.resize(operators.size());
    }
    TESSERA_CHECK(operators.size() == model.operators.size(), "{} {}", operators.size(), model.operators.size());
    for (std::size_t k = 0; k < operators.size(); ++k) {
      TESSERA_CHECK(operators[k].is_same_call(model.operators[k]), "{}", operators[k].name);
      model.times[k].push_back(operators[k].seconds);
    }
  }
}

std::string today() {
  return fmt::format("{:%Y-%m-%d}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

}  // namespace

std::vector<JobConfig> calibration_models() {
  std::vector<JobConfig> models;
  for (const Probe& probe : kProbes) {
    for (const Overrides& precision : precisions()) {
      models.push_back(config_of(probe, precision, 2));
      if (!probe.has_variants) continue;
      for (const Overrides& variant : variants()) models.push_back(config_of(probe, joined(precision, variant), 2));
    }
  }
  return models;
}

Calibration calibrate(const CalibrateOptions& options) {
  std::vector<TimedModel> models;
  for (const JobConfig& config : calibration_models()) models.push_back({config, {}, {}, {}});
  std::size_t done = 0;
  for (int round = 0; round < options.rounds; ++round) {
    for (TimedModel& model : models) {
      if (options.progress) options.progress(done++, models.size() * static_cast<std::size_t>(options.rounds));
      time_steps(model, options.steps);
    }
  }
  std::map<std::string, std::vector<MeasuredCall>> calls;  // by class
  std::vector<double> host;                                // seconds per operator besides the operators, by model
  for (const TimedModel& model : models) {
    double in_operators = 0.0;
    for (std::size_t k = 0; k < model.operators.size(); ++k) {
      const double seconds = median(model.times[k]);
      calls[class_of(model.operators[k])].push_back({work_of(model.operators[k]), seconds});
      in_operators += seconds;
    }
    host.push_back((median(model.step_seconds) - in_operators) / static_cast<double>(model.operators.size()));
  }
  Calibration calibration;
  calibration.machine = processor_name();
  calibration.program = version();
  calibration.date = today();
  calibration.threads = num_threads();
  for (const auto& [name, of_class] : calls) calibration.operators.emplace(name, fit_rate(of_class));
  calibration.seconds_per_operator = median(host);
  return calibration;
}

}  // namespace tessera
