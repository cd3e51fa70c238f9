// Makes runs with planted losses, as objects and as folders.
#pragma once

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "compare/verdict.h"
#include "tensor/philox.h"
#include "tests/data/support.h"

namespace tessera::compare_test {

/// Draws independent random numbers with mean 0 and deviation 1, one for each run and step.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : random_(seed, stream_of("test.compare")) {}
  double operator()(std::int64_t run, std::int64_t step) const {
    const auto words = random_.words(static_cast<std::uint64_t>(run) * 1'000'003 + static_cast<std::uint64_t>(step));
    const double u = (words[0] + 0.5) * 0x1p-32, v = (words[1] + 0.5) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * M_PI * v);  // the method of Box and Muller
  }

 private:
  Philox random_;
};

/// Returns the loss at a step of a run that learns. It falls from 8 to about 4, with the noise of a batch.
inline double learning_loss(std::int64_t step, double noise) {
  return (3.9 + 4.1 * std::exp(-static_cast<double>(step) / 60.0)) * (1.0 + 0.02 * noise);
}

/// Holds a planted comparison. The candidate's loss is `candidate(baseline loss, seed, step)` at every step of every
/// seed.
struct Planted {
  std::vector<std::int64_t> steps;
  std::vector<LossPair> pairs;
  TrainingLength length;
};

inline Planted plant(std::int64_t num_seeds, std::int64_t num_steps,
                     const std::function<double(double, std::int64_t, std::int64_t)>& candidate,
                     std::uint64_t data_seed = 0) {
  Planted planted;
  const Noise noise(data_seed);
  planted.length = {.tokens = 2048.0 * static_cast<double>(num_steps), .warmup_steps = 20};
  for (std::int64_t step = 1; step <= num_steps; ++step) planted.steps.push_back(step);
  for (std::int64_t seed = 1; seed <= num_seeds; ++seed) {
    LossPair& pair = planted.pairs.emplace_back(LossPair{seed, {}, {}});
    for (const std::int64_t step : planted.steps) {
      pair.baseline.push_back(learning_loss(step, noise(seed, step)));
      pair.candidate.push_back(candidate(pair.baseline.back(), seed, step));
    }
  }
  return planted;
}

/// Describes the folder of a run, as a trainer leaves it.
struct PlantedRun {
  std::int64_t seed = 1, steps = 200;
  std::function<double(double, std::int64_t)> loss = [](double baseline, std::int64_t) { return baseline; };
  std::map<std::string, std::string> config = {};   // keys that differ from the common ones
  std::map<std::string, std::string> dataset = {};  // checksums that differ from the common ones
  double tokens_per_second = 4000.0;
  std::int64_t memory_bytes = 1'000'000'000;
  int sqnr_layers = 0;          // 0 means no low precision
  std::int64_t last_step = -1;  // the step at which the run stopped; -1 means its end

  std::filesystem::path write(const std::filesystem::path& folder) const;
};

inline nlohmann::json planted_sqnr(const PlantedRun& run, std::int64_t step) {
  nlohmann::json sites;
  for (int layer = 0; layer < run.sqnr_layers; ++layer) {
    for (const char* site : {"attention.wq", "moe.experts.w13", "moe.experts.w2"}) {
      const double level = 31.5 - 0.05 * layer - 0.002 * static_cast<double>(step % 40);
      sites[fmt::format("layers.{}.{}", layer, site)] = {{"x", level}, {"w", level - 0.2}, {"dy", level - 1.0}};
    }
  }
  return sites;
}

inline std::filesystem::path PlantedRun::write(const std::filesystem::path& folder) const {
  nlohmann::json info = {{"format", "tessera-run"},
                         {"version", 1},
                         {"program", "0.1.0"},
                         {"threads", 2},
                         {"processor", "Planted <Processor> & Co."},
                         {"config",
                          {{"debug.seed", std::to_string(seed)},
                           {"training.steps", std::to_string(steps)},
                           {"training.seq_len", "512"},
                           {"training.local_batch_size", "4"},
                           {"training.global_batch_size", "4"},
                           {"training.dataset_path", "\"./data/gcide\""},
                           {"model.args.dim", "256"},
                           {"model.converters", "[]"},
                           {"lr_scheduler.warmup_steps", "20"},
                           {"optimizer.lr", "0.0008"},
                           {"job.dump_folder", "\"" + folder.string() + "\""}}},
                         {"dataset", {{"train", "0123456789abcdef"}}}};
  for (const auto& [key, value] : config) info["config"][key] = value;
  for (const auto& [key, value] : dataset) info["dataset"][key] = value;
  data::write_file(folder / "run.json", info.dump());
  const Noise noise(0);
  std::string lines;
  for (std::int64_t step = 1; step <= (last_step < 0 ? steps : last_step); ++step) {
    const double value = loss(learning_loss(step, noise(seed, step)), step);
    nlohmann::json line = {{"step", step},
                           {"grad_norm", 0.5 + 3.0 * std::exp(-static_cast<double>(step) / 20.0)},
                           {"tokens_per_second", tokens_per_second},
                           {"memory_bytes", memory_bytes}};
    line["loss"] = std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr);
    if (sqnr_layers > 0) line["quantization_sqnr_db"] = planted_sqnr(*this, step);
    lines += line.dump() + "\n";
  }
  data::write_file(folder / "metrics.jsonl", lines);
  return folder;
}

}  // namespace tessera::compare_test
