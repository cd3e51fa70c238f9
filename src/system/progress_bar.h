// How far long work is, on standard error: a bar that is drawn again and again on a terminal, elsewhere a log line
// every 30 seconds. Silent if the log shows no information (spdlog's level).
//
//   ProgressBar bar("tokenizing", num_bytes, "B");
//   while (...) bar.advance(size);
#pragma once

#include <cstdint>
#include <string>

#include "base/stopwatch.h"

namespace tessera {

/// "1.25 GB", "12.3 k documents", "7 documents".
std::string format_quantity(double count, const std::string& unit);

/// "1:02:03", "2:03".
std::string format_duration(double seconds);

/// Not for several threads at once.
class ProgressBar {
 public:
  /// `what` is done, as "tokenizing"; `total` counts in `unit`: "B" for bytes, or a plural.
  ProgressBar(std::string what, std::uint64_t total, std::string unit, double seconds_between_lines = 30.0);
  /// Clears the bar.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void advance(std::uint64_t count) { set(done_ + count); }
  /// `extra` is shown behind the rest.
  void set(std::uint64_t done, const std::string& extra = "");
  /// Takes the bar off the screen, so that something else can be written. The next call draws it again.
  void clear();

 private:
  std::string numbers(const std::string& extra) const;

  std::string what_;
  std::uint64_t total_;
  std::string unit_;
  bool is_terminal_;
  double seconds_between_;
  std::uint64_t done_ = 0;
  Stopwatch since_start_, since_shown_;
  bool drawn_ = false;
};

}  // namespace tessera
