// Shows the progress of long work on standard error. On a terminal it redraws a bar. Elsewhere it logs a line every 30
// seconds. It is silent if the log's level (spdlog) hides information.
//
//   ProgressBar bar("tokenizing", num_bytes, "B");
//   while (...) bar.advance(size);
#pragma once

#include <cstdint>
#include <string>

#include "base/stopwatch.h"

namespace tessera {

/// Formats a count with its unit: "1.25 GB", "12.3 k documents", "7 documents".
std::string format_quantity(double count, const std::string& unit);

/// Formats a duration as hours, minutes and seconds, "1:02:03", or as minutes and seconds, "2:03".
std::string format_duration(double seconds);

/// Shows a progress bar, for one thread.
class ProgressBar {
 public:
  /// `what` names the work, such as "tokenizing". `total` counts in `unit`, which is "B" for bytes or a plural noun.
  ProgressBar(std::string what, std::uint64_t total, std::string unit, double seconds_between_lines = 30.0);
  /// Clears the bar.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void advance(std::uint64_t count) { set(done_ + count); }
  /// Sets how much is done. `extra` is shown at the end of the line.
  void set(std::uint64_t done, const std::string& extra = "");
  /// Removes the bar from the screen, so that other text can be written. The next call of `set` draws it again.
  void clear();

 private:
  /// Returns the bar itself, in at most `room` columns. Returns "" if that is too narrow.
  std::string bar(std::size_t room) const;
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
