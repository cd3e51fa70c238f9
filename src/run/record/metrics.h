// Reports a run to people: a line per step, a progress bar on a terminal, metrics.jsonl, TensorBoard's files and
// metrics for Prometheus.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>

#include "run/record/line_file.h"
#include "run/record/tensorboard.h"
#include "step/training_step.h"
#include "system/metrics_server.h"
#include "system/progress_bar.h"

namespace tessera {

/// Returns the resident memory that this process takes for itself, in bytes: anonymous and shared memory, without
/// mapped files. The system can drop and reread the pages of mapped files (token shards, the program) whenever it needs
/// room.
std::size_t resident_bytes();

/// Returns the highest rate of the device that a run computes on, for MFU. It is metrics.peak_tflops or, for a GPU that
/// is known, its dense bfloat16 rate. 0 means unknown.
double peak_tflops(const JobConfig& config, Device device);

/// Returns whether this metrics.jsonl has the validation loss of a step. Throws Error if there is a file that cannot be
/// read.
bool has_validation_loss(const std::filesystem::path& path, std::int64_t step);

/// Formats a size: "1.25GiB".
std::string format_gib(std::size_t bytes);

/// Holds what a line of metrics has besides the step's result. Means are over the steps since the last line.
struct Rates {
  double tokens_per_second = 0.0, tflops = 0.0;
  std::optional<double> mfu;  // as a fraction, if the device's peak is known
  std::size_t memory_bytes = 0;
  double step_seconds = 0.0;
  PhaseSeconds seconds;
  double later_rounds = 0.0;  // StepResult::later_rounds, per step
};

/// Returns the log's line of a step. With its time and level it has at most 100 columns, if rates are below 10 million.
std::string step_line(const StepResult& result, const Rates& rates, std::int64_t num_steps);

struct MetricsOptions {
  std::filesystem::path path;                // path of metrics.jsonl
  std::filesystem::path tensorboard_folder;  // empty: no event files
  std::int64_t first_step = 1, num_steps = 0, log_freq = 1;
  double flop_per_token = 0.0;          // computed by model/config.h
  double peak_flops = 0.0;              // of the device, per second; 0: unknown
  Device device = Device::kCpu;         // the device whose memory is reported
  std::size_t memory_bytes = 0;         // memory that this device has
  std::vector<std::string> moe_layers;  // names, in the order of StepResult::expert_load and expert_tokens
  int num_ranks = 1;                    // rates are per rank
  std::string prometheus_address = {};  // "HOST:PORT" where metrics are served; empty: nowhere
  std::string run_id = {};              // for Prometheus
};

class MetricsWriter {
 public:
  /// Appends to the file. It drops lines of step `first_step` and later, which a run has left that this one resumes.
  /// Throws Error if the file cannot be read or written. Later the storage may fail for a while: lines are kept until
  /// it takes them. If the file was deleted, the functions that write a line throw Error.
  explicit MetricsWriter(const MetricsOptions& options);
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// Must be called after each step. Writes a line if the step is due, was made twice, or has a loss or gradient norm
  /// that is not finite. No step follows one that is not finite.
  void step(const StepResult& result);
  void validation(std::int64_t step, double loss);
  /// Must be called after a save is committed, with how long training waited and how long the save took.
  void checkpoint(std::int64_t step, double stall_seconds, double seconds);
  /// Writes the checksum of the model's state after a step whose replicas were compared.
  void state_checksum(std::int64_t step, std::uint64_t checksum);
  /// Removes the progress bar of a terminal until the next step. Call it before others log.
  void clear_progress();
  /// Stops the training time until resume(). No step may be under way then.
  void pause();
  void resume();

 private:
  using Clock = std::chrono::steady_clock;
  /// Holds the steps since the last line.
  struct Window {
    Clock::time_point begin;  // is put off by pauses
    std::int64_t tokens = 0, steps = 0;
    PhaseSeconds seconds = {};  // the sums over these steps
    double later_rounds = 0.0;  // the same

    void add(const StepResult& result);
    /// Returns the means until `end`, when the last of these steps ended. Sets neither tflops, mfu nor memory_bytes.
    Rates means(Clock::time_point end, int num_ranks) const;
  };

  /// Returns the scalars of a step, under TorchTitan's names where it has them. TensorBoard sorts groups of tags by
  /// name and opens the first two. So "_overview" and grad_norm are open, not a group with a card per layer.
  Scalars scalars_of(const StepResult& result, const Rates& rates) const;
  /// Writes to TensorBoard's file, if there is one. Gives it up if storage fails.
  void write_tensorboard(std::int64_t step, const Scalars& scalars);
  /// Returns the memory in use. On a CPU it is the highest resident_bytes() after any step so far, because the system's
  /// own peak (VmHWM) includes mapped files. On a GPU it is what is taken of its memory now, which does not change
  /// during a run.
  std::size_t memory_in_use() const;
  /// Publishes for Prometheus the numbers in the line of a step, and the time when it was written.
  void publish(const StepResult& result, const Rates& rates);
  /// Writes the loads of the step's experts over those of an earlier line: with the first line and the last one, and
  /// every half a minute.
  void write_expert_loads(const StepResult& result);
  void draw_progress(std::int64_t step, double loss);

  MetricsOptions options_;
  std::optional<LineFile> file_;
  std::optional<TensorBoardWriter> tensorboard_;
  std::optional<ProgressBar> progress_;  // only on a terminal
  std::optional<MetricsServer> server_;
  std::int64_t tokens_ = 0;  // of all ranks, since this process began
  std::int64_t repeated_steps_ = 0;
  double saved_at_ = 0.0;  // Unix time of the last checkpoint, or of this process's start
  bool told_memory_ = false;
  Clock::time_point loads_due_;  // when a line writes the next loads of experts
  Window window_;
  Clock::time_point paused_at_;
  std::size_t peak_resident_bytes_ = 0;
};

}  // namespace tessera
