#include "run/memory_advice.h"

#include <algorithm>

#include "run/record/metrics.h"

namespace tessera {
namespace {

/// A capacity factor that a router with balanced load seldom exceeds.
constexpr double kCloseCapacity = 1.5;

struct Largest {
  MemoryPlan plan;
  std::size_t rank = 0;  // its rank in the pipeline
};

Largest largest(const PlannedRun& run, Recompute mode, std::int64_t micro_batch_size) {
  const std::vector<MemoryPlan> plans = memory_plans(run, mode, micro_batch_size);
  const auto found = std::max_element(plans.begin(), plans.end(),
                                      [](const MemoryPlan& a, const MemoryPlan& b) { return a.total() < b.total(); });
  return {*found, static_cast<std::size_t>(found - plans.begin())};
}

std::int64_t num_data_ranks(const PlannedRun& run) { return run.degrees.dp_replicate * run.degrees.dp_shard; }

}  // namespace

MemoryPlan memory_plan(const PlannedRun& run, std::int64_t rank, Recompute mode, std::int64_t micro_batch_size) {
  JobConfig config = run.config;
  config.training.global_batch_size = run.config.sequences_per_step(num_data_ranks(run));
  config.activation_checkpoint.mode = mode;
  (config.cuts_local_batch() ? config.parallelism.pipeline_parallel_microbatch_size
                             : config.training.local_batch_size) = micro_batch_size;
  return TrainingStep(config, std::make_shared<Mesh>(Mesh::planned(run.degrees, rank)), run.device).memory_plan();
}

std::vector<MemoryPlan> memory_plans(const PlannedRun& run, Recompute mode, std::int64_t micro_batch_size) {
  const std::int64_t ranks_of_stage = run.degrees.num_ranks() / run.degrees.pp;
  std::vector<MemoryPlan> plans;
  for (std::int64_t pp = 0; pp < run.degrees.pp; ++pp) {
    plans.push_back(memory_plan(run, pp * ranks_of_stage, mode, micro_batch_size));
  }
  return plans;
}

std::string memory_advice(const PlannedRun& run, std::size_t others, std::size_t available) {
  const JobConfig& config = run.config;
  const std::int64_t batch = config.micro_batch_size();
  const std::int64_t num_sequences = config.sequences_per_step(num_data_ranks(run));
  const auto fits = [&](const MemoryPlan& plan) { return plan.total() + others <= available; };
  const Largest asked = largest(run, config.activation_checkpoint.mode, batch);
  const MemoryPlan& plan = asked.plan;
  std::string table = fmt::format("  weights {}, gradients {}, moments {}", format_gib(plan.weights),
                                  format_gib(plan.gradients), format_gib(plan.optimizer_state));
  if (plan.windows > 0) table += fmt::format(", windows {}", format_gib(plan.windows));
  if (plan.batches > plan.total() / 200) {
    table += fmt::format(", batches {} (of training.global_batch_size)", format_gib(plan.batches));
  }
  if (others > 0) table += fmt::format(", besides the step {}", format_gib(others));
  if (run.degrees.num_ranks() > 1) table += " per rank";
  if (run.degrees.pp > 1) table += fmt::format(", of rank {} of the pipeline, which takes most", asked.rank);
  table += "\n  activations and scratch, by activation_checkpoint.mode:";
  std::string advice;
  const auto advise = [&](const std::string& settings, const MemoryPlan& candidate) {
    advice += fmt::format("\n  that fits: {}: {}", settings, format_gib(candidate.total() + others));
  };
  for (const auto& [name, mode] : recompute_modes()) {
    const MemoryPlan same_batch = largest(run, mode, batch).plan;
    table += fmt::format(" {} {}", name, format_gib(same_batch.activations));
    const std::string as_toml = fmt::format("activation_checkpoint.mode = \"{}\"", name);
    if (fits(same_batch)) {
      advise(as_toml, same_batch);
      continue;
    }
    // Finds the largest micro-batch with which a step can have the same number of sequences.
    for (std::int64_t smaller = batch / 2; smaller >= 1; smaller /= 2) {
      if (num_sequences % (smaller * num_data_ranks(run)) != 0) continue;
      const MemoryPlan candidate = largest(run, mode, smaller).plan;
      if (!fits(candidate)) continue;
      advise(fmt::format("{}, {} = {}, training.global_batch_size = {}", as_toml, config.micro_batch_key(), smaller,
                         num_sequences),
             candidate);
      break;
    }
  }
  if (advice.empty()) {
    advice =
        "\n  no mode fits with one sequence either: make training.seq_len or the model smaller, or take more ranks";
  }
  const auto advise_other = [&](const std::string& change, const JobConfig& other) {
    advice += fmt::format("\n  {}, by mode:", change);
    for (const auto& [name, mode] : recompute_modes()) {
      const MemoryPlan candidate = largest({other, run.device, run.degrees}, mode, batch).plan;
      advice += fmt::format(" {} {}{}", name, format_gib(candidate.total() + others), fits(candidate) ? " (fits)" : "");
    }
  };
  if (run.degrees.ep > 1 && config.parallelism.expert_parallel_capacity_factor == 0.0) {
    JobConfig closer = config;
    closer.parallelism.expert_parallel_capacity_factor = kCloseCapacity;
    advise_other(
        fmt::format("experts have room for any load; with parallelism.expert_parallel_capacity_factor = {} (more "
                    "than that takes rounds)",
                    kCloseCapacity),
        closer);
  }
  if (config.optimizer.state_dtype == DType::kFloat32 &&
      std::max(config.optimizer.beta1, config.optimizer.beta2) <= kLargestBetaInBfloat16) {
    JobConfig smaller = config;
    smaller.optimizer.state_dtype = DType::kBFloat16;
    advise_other("with optimizer.state_dtype = \"bfloat16\"", smaller);
  }
  return table + advice;
}

}  // namespace tessera
