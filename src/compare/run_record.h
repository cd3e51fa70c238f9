// Reads what a run left in its folder: run.json (run/record/run_info.h) and metrics.jsonl (docs/metrics.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Holds signal-to-quantization-noise ratios in dB, by the kind of operand: "x" (activations), "w" (weights), "dy"
/// (gradients of outputs).
using SqnrByOperand = std::map<std::string, double>;

struct SqnrPoint {
  std::int64_t step = 0;
  /// The mean over a layer's sites, by operand and layer. Sites outside of layers are layer -1.
  std::map<std::string, std::map<int, double>> by_layer;
};

/// Describes a checkpoint that was committed.
struct CheckpointRecord {
  std::int64_t step = 0;
  double stall_seconds = 0.0;  // time that training waited
  double seconds = 0.0;        // time until it was committed
};

/// Describes a key whose value changed at a step, because the run was resumed with another configuration.
struct ConfigChange {
  std::string key, before, after;
  std::int64_t step = 0;
};

/// Says at which step a run broke down.
struct Break {
  std::int64_t step = 0;
  const char* what = "loss";  // or "gradient norm"
};

struct RunRecord {
  std::filesystem::path folder;

  std::map<std::string, std::string> config;   // every key, with its value as TOML
  std::map<std::string, std::string> dataset;  // checksums of "train", and of "val" if the run validates
  /// The keys that changed when the run was resumed: their values in order, with the step of each change.
  std::map<std::string, std::vector<std::string>> changed;
  std::string program, processor;
  std::int64_t threads = 0, num_data_ranks = 1;

  /// The logged steps. The other vectors have one value per logged step. It is NaN where the file has null.
  std::vector<std::int64_t> steps;
  std::vector<double> losses, grad_norms, tokens_per_second;
  /// These vectors have NaN where the file has null or no value.
  std::vector<double> mtp_losses, learning_rates, mfus, memory_bytes, step_seconds;
  std::vector<double> data_seconds, forward_seconds, backward_seconds, optimizer_seconds;  // parts of step_seconds
  /// The tokens of the busiest expert divided by the mean, by logged step and MoE layer. It is empty for a step without
  /// them.
  std::vector<std::vector<double>> expert_loads;
  std::vector<CheckpointRecord> checkpoints;
  double peak_memory_bytes = 0.0;
  std::map<std::int64_t, double> validation_losses;  // by step
  std::vector<SqnrPoint> sqnr;                       // empty without low precision
  std::map<std::string, SqnrByOperand> last_sqnr;    // by site ("layers.1.moe.experts.w13"), at the last measurement

  std::int64_t seed() const { return integer("debug.seed"); }
  std::int64_t num_steps() const { return integer("training.steps"); }
  /// Returns the number of tokens of all ranks in a step.
  double tokens_per_step() const;
  std::int64_t warmup_steps() const;
  /// Returns ln(model.args.vocab_size), the loss of a uniform guess, or nullopt if the file does not have that key.
  std::optional<double> uniform_loss() const;
  /// Returns training.max_norm, or nullopt if gradients are not clipped.
  std::optional<double> gradient_clip() const;
  /// Returns the lowest layer that has experts.
  std::int64_t first_moe_layer() const;
  /// Returns all entries of `changed`, sorted by step.
  std::vector<ConfigChange> changes() const;
  std::int64_t last_step() const { return steps.empty() ? 0 : steps.back(); }
  bool finished() const { return last_step() == num_steps(); }
  /// Returns the first logged step whose loss or gradient norm is not finite.
  std::optional<Break> broken() const;
  /// Returns whether the run is finished, or broke down in its last logged step, where a trainer stops.
  bool ended() const;

 private:
  std::int64_t integer(const std::string& key) const;
  /// Returns nullopt if the file does not have the key, because the program did not know it yet.
  std::optional<std::int64_t> find_integer(const std::string& key) const;
};

/// Reads only run.json.
RunRecord read_run_info(const std::filesystem::path& folder);

/// Reads both files. A last line that is cut off, as a killed run leaves it, is ignored. Throws Error, which names file
/// and line, if anything else is missing or damaged.
RunRecord read_run(const std::filesystem::path& folder);

/// Returns `path` if it is a run, or else the runs that are its direct subfolders, by name. Throws Error if there are
/// none.
std::vector<std::filesystem::path> find_runs(const std::filesystem::path& path);

/// Returns whether the folder holds at least one of a run's files.
bool is_run(const std::filesystem::path& folder);

}  // namespace tessera
