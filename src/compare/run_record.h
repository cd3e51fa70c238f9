// What a run left in its folder: run.json (run/record/run_info.h) and metrics.jsonl (docs/metrics.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Signal-to-quantization-noise ratios in dB, by the kind of operand: "x" (activations), "w" (weights), "dy" (gradients
/// of outputs).
using SqnrByOperand = std::map<std::string, double>;

struct SqnrPoint {
  std::int64_t step = 0;
  /// Per operand and layer, the mean over the layer's sites. Sites outside of layers are layer -1.
  std::map<std::string, std::map<int, double>> by_layer;
};

/// A checkpoint that was committed.
struct CheckpointRecord {
  std::int64_t step = 0;
  double stall_seconds = 0.0;  // for how long training waited
  double seconds = 0.0;        // until it was committed
};

/// A key that had another value from a step on, because the run was resumed with another configuration.
struct ConfigChange {
  std::string key, before, after;
  std::int64_t step = 0;
};

/// Where a run broke down.
struct Break {
  std::int64_t step = 0;
  const char* what = "loss";  // or "gradient norm"
};

struct RunRecord {
  std::filesystem::path folder;

  std::map<std::string, std::string> config;   // every key, its value as TOML
  std::map<std::string, std::string> dataset;  // checksums of "train", and of "val" if the run validates
  /// Keys that were changed when the run was resumed: their values in turn, with the step of each change.
  std::map<std::string, std::vector<std::string>> changed;
  std::string program, processor;
  std::int64_t threads = 0, num_data_ranks = 1;

  /// The logged steps, and per logged step; NaN where the file has null.
  std::vector<std::int64_t> steps;
  std::vector<double> losses, grad_norms, tokens_per_second;
  /// Likewise; NaN also where the file does not have them.
  std::vector<double> mtp_losses, learning_rates, mfus, memory_bytes, step_seconds;
  std::vector<double> data_seconds, forward_seconds, backward_seconds, optimizer_seconds;  // parts of step_seconds
  /// Per logged step and MoE layer: tokens of the busiest expert over the mean. A step without is empty.
  std::vector<std::vector<double>> expert_loads;
  std::vector<CheckpointRecord> checkpoints;
  double peak_memory_bytes = 0.0;
  std::map<std::int64_t, double> validation_losses;  // by step
  std::vector<SqnrPoint> sqnr;                       // empty without low precision
  std::map<std::string, SqnrByOperand> last_sqnr;    // by site ("layers.1.moe.experts.w13"), at the last measurement

  std::int64_t seed() const { return integer("debug.seed"); }
  std::int64_t num_steps() const { return integer("training.steps"); }
  /// Counts the tokens of all ranks.
  double tokens_per_step() const;
  std::int64_t warmup_steps() const;
  /// ln(model.args.vocab_size): the loss of a guess that knows nothing. Nothing where the file does not say.
  std::optional<double> uniform_loss() const;
  /// training.max_norm. Nothing where gradients are not clipped.
  std::optional<double> gradient_clip() const;
  /// The lowest layer that has experts.
  std::int64_t first_moe_layer() const;
  /// All of `changed`, by step.
  std::vector<ConfigChange> changes() const;
  std::int64_t last_step() const { return steps.empty() ? 0 : steps.back(); }
  bool finished() const { return last_step() == num_steps(); }
  /// The first logged step whose loss or gradient norm is not finite.
  std::optional<Break> broken() const;
  /// Finished, or broken in its last logged step, which is where a trainer stops.
  bool ended() const;

 private:
  std::int64_t integer(const std::string& key) const;
  /// Nothing if the file does not have the key, because the program did not know it yet.
  std::optional<std::int64_t> find_integer(const std::string& key) const;
};

/// Reads run.json alone.
RunRecord read_run_info(const std::filesystem::path& folder);

/// Reads both files. A last line that is cut off, as a killed run leaves it, counts as not there. Throws Error, naming
/// file and line, for anything else that is missing or damaged.
RunRecord read_run(const std::filesystem::path& folder);

/// The run that `path` is, or the runs that are its direct subfolders, by name. Throws Error if there are none.
std::vector<std::filesystem::path> find_runs(const std::filesystem::path& path);

/// A text of a file in a message: cut, and without anything that a terminal would obey.
std::string printable(const std::string& text);

/// Whether the folder holds a run's files, or one of them.
bool is_run(const std::filesystem::path& folder);

}  // namespace tessera
