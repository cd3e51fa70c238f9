#include "system/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/log.h"

namespace tessera {
namespace {

/// Returns the width in columns of the terminal on standard error.
std::size_t num_columns() {
  constexpr std::size_t kUsual = 80;
  struct winsize size {};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsual;
}

}  // namespace

std::string format_quantity(double count, const std::string& unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T"};
  std::size_t power = 0;
  for (; count >= 999.5 && power + 1 < std::size(kPrefixes); ++power) count /= 1000.0;
  // It shows three digits, but no fraction of a countable thing. A space separates a prefix from a word.
  const int decimals = power == 0 && count == static_cast<double>(static_cast<std::int64_t>(count)) ? 0
                       : count < 9.995                                                              ? 2
                       : count < 99.95                                                              ? 1
                                                                                                    : 0;
  const char* space = power > 0 && unit.size() > 1 && !unit.starts_with("B/") ? " " : "";
  return fmt::format("{:.{}f} {}{}{}", count, decimals, kPrefixes[power], space, unit);
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

ProgressBar::ProgressBar(std::string what, std::uint64_t total, std::string unit, double seconds_between_lines)
    : what_(std::move(what)),
      total_(total),
      unit_(std::move(unit)),
      is_terminal_(stderr_is_terminal()),
      seconds_between_(is_terminal_ ? 0.1 : seconds_between_lines) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::set(std::uint64_t done, const std::string& extra) {
  done_ = done;
  if (since_shown_.seconds() < seconds_between_ || !spdlog::should_log(spdlog::level::info)) return;
  since_shown_ = {};
  if (!is_terminal_) {
    spdlog::info("{}", numbers(extra));
    return;
  }
  constexpr std::uint64_t kWidth = 30;
  const auto filled =
      total_ == 0 ? kWidth
                  : static_cast<std::uint64_t>(static_cast<double>(kWidth) *
                                               std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_)));
  std::string line = fmt::format("[{:#<{}}{:.<{}}] {}", "", filled, "", kWidth - filled, numbers(extra));
  line.resize(std::min(line.size(), num_columns() - 1));  // a line that wraps cannot be overwritten
  // fputs ignores a terminal that has been closed; fmt::print would throw.
  std::fputs(("\r\033[K" + line).c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

std::string ProgressBar::numbers(const std::string& extra) const {
  const double done = static_cast<double>(done_), total = static_cast<double>(total_), elapsed = since_start_.seconds(),
               rate = elapsed > 0 ? done / elapsed : 0;
  std::string text =
      fmt::format("{}: {:.0f}%, {} of {}, {}", what_, total > 0 ? 100.0 * done / total : 100.0,
                  format_quantity(done, unit_), format_quantity(total, unit_), format_quantity(rate, unit_ + "/s"));
  if (done > 0) text += fmt::format(", ETA {}", format_duration(std::max(0.0, total - done) / rate));
  if (!extra.empty()) text += ", " + extra;
  return text;
}

void ProgressBar::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace tessera
