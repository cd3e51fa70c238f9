// What a person sees of a run: a line per step, a progress bar on a terminal, and metrics.jsonl.
#pragma once

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "train/training_step.h"

namespace tessera {

/// Resident memory of this process now, and its highest value so far, in bytes.
std::size_t resident_bytes();
std::size_t peak_resident_bytes();

/// "1.25GiB".
std::string format_gib(std::size_t bytes);

class MetricsWriter {
 public:
  /// Appends to `path`; lines of steps after `first_step` - 1, from a run that this one resumes, are dropped.
  /// `flop_per_token` as in model/config.h; `peak_flops` of the device per second, 0 if unknown; `memory_bytes` of the
  /// machine.
  MetricsWriter(const std::filesystem::path& path, std::int64_t first_step, std::int64_t num_steps,
                std::int64_t log_freq, double flop_per_token, double peak_flops, std::size_t memory_bytes);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// After each step; writes if the step is due.
  void step(std::int64_t step, const StepResult& result);
  void validation(std::int64_t step, double loss);
  /// Time from now to the next call of step() with `resume` in between does not count as training time.
  void pause();
  void resume();

 private:
  using Clock = std::chrono::steady_clock;

  void draw_progress(std::int64_t step, double loss);
  void clear_progress();
  void append(const std::string& line);

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::int64_t first_step_, num_steps_, log_freq_;
  double flop_per_token_, peak_flops_;
  std::size_t memory_bytes_;
  bool terminal_, progress_drawn_ = false;
  Clock::time_point window_begin_, paused_at_;
  Clock::duration run_time_{};  // of all closed windows
  std::int64_t window_tokens_ = 0;
};

}  // namespace tessera
