#include "train/memory_advice.h"

#include "train/metrics.h"

namespace tessera {

MemoryPlan memory_plan(const JobConfig& given, Device device, Recompute mode, std::int64_t local_batch_size) {
  JobConfig config = given;
  config.training.global_batch_size = given.sequences_per_step();
  config.activation_checkpoint.mode = mode;
  config.training.local_batch_size = local_batch_size;
  return TrainingStep(config, nullptr, device).memory_plan();
}

std::string memory_advice(const JobConfig& config, Device device, const MemoryPlan& plan, std::size_t others,
                          std::size_t available) {
  const std::int64_t batch = config.training.local_batch_size;
  const auto fits = [&](const MemoryPlan& candidate) { return candidate.total() + others <= available; };
  std::string table = fmt::format("  weights {}, gradients {}, moments {}", format_gib(plan.weights),
                                  format_gib(plan.gradients), format_gib(plan.moments));
  if (others > 0) table += fmt::format(", besides the step {}", format_gib(others));
  table += "\n  activations and scratch, by activation_checkpoint.mode:";
  std::string advice;
  const auto advise = [&](const std::string& settings, const MemoryPlan& candidate) {
    advice += fmt::format("\n  that fits: {}: {}", settings, format_gib(candidate.total() + others));
  };
  for (const auto& [name, mode] : recompute_modes()) {
    const MemoryPlan same_batch = memory_plan(config, device, mode, batch);
    table += fmt::format(" {} {}", name, format_gib(same_batch.activations));
    const std::string as_toml = fmt::format("activation_checkpoint.mode = \"{}\"", name);
    if (fits(same_batch)) {
      advise(as_toml, same_batch);
      continue;
    }
    // The largest batch that a step can be made of in the same number of sequences.
    for (std::int64_t smaller = batch / 2; smaller >= 1; smaller /= 2) {
      if (config.sequences_per_step() % smaller != 0) continue;
      const MemoryPlan candidate = memory_plan(config, device, mode, smaller);
      if (!fits(candidate)) continue;
      advise(fmt::format("{}, training.local_batch_size = {}, training.global_batch_size = {}", as_toml, smaller,
                         config.sequences_per_step()),
             candidate);
      break;
    }
  }
  if (advice.empty()) {
    advice =
        "\n  no mode fits with one sequence either: make training.seq_len or the model smaller, or take more ranks";
  }
  return table + advice;
}

}  // namespace tessera
