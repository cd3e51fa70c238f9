// Records what ran when, and writes it in Chrome's trace format (chrome://tracing, Perfetto).
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

class TraceRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Reserves memory for this many events of the host. Later ones are dropped, and the file then says that it is not
  /// complete. Events of the GPU have no limit.
  explicit TraceRecorder(std::size_t max_events = 1 << 18) { events_.reserve(max_events); }

  void start() {
    events_.clear();
    gpu_events_.clear();
    is_complete_ = true;
    recording_ = true;
  }
  void stop() { recording_ = false; }
  bool recording() const { return recording_; }

  /// The rows of the picture. Of two passes that run in turns, the second has a row of its own.
  enum class Row { kHost, kGpu, kSecondPass };
  /// Sets the row of the host's events that end from now on.
  void set_row(Row row) { row_ = row; }
  /// Records an event of the host. `name` must be a literal, because only its address is stored.
  void record(const char* name, Clock::time_point begin, Clock::time_point end) {
    if (events_.size() < events_.capacity()) {
      events_.push_back({name, begin, end, row_});
    } else {
      is_complete_ = false;
    }
  }

  /// Records what a GPU ran. Call it when the times are known. These events get their own row in the picture.
  void record_on_gpu(std::string name, Clock::time_point begin, Clock::time_point end) {
    gpu_events_.push_back({std::move(name), begin, end});
  }

  /// Writes the events as {"traceEvents": [...]}, with times in microseconds since the first event began.
  void write(const std::filesystem::path& path) const;

 private:
  struct Event {
    const char* name;
    Clock::time_point begin, end;
    Row row;
  };
  struct GpuEvent {
    std::string name;
    Clock::time_point begin, end;
  };
  std::vector<Event> events_;
  std::vector<GpuEvent> gpu_events_;
  bool recording_ = false, is_complete_ = true;
  Row row_ = Row::kHost;
};

/// Records the time from its construction to its destruction. It does nothing if `recorder` is null or not recording.
class TraceScope {
 public:
  TraceScope(TraceRecorder* recorder, const char* name)
      : recorder_(recorder != nullptr && recorder->recording() ? recorder : nullptr), name_(name) {
    if (recorder_ != nullptr) begin_ = TraceRecorder::Clock::now();
  }
  ~TraceScope() {
    if (recorder_ != nullptr) recorder_->record(name_, begin_, TraceRecorder::Clock::now());
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceRecorder* recorder_;
  const char* name_;
  TraceRecorder::Clock::time_point begin_;
};

}  // namespace tessera
