#include "system/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string_view>
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
  constexpr double kMost = 1e9;  // 32 years, as a damaged file may say
  const auto whole = static_cast<std::int64_t>(std::clamp(seconds, 0.0, kMost));
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
  std::string line = numbers(extra);
  const std::size_t room = num_columns() - 1;  // a line that wraps cannot be overwritten
  line = bar(room - std::min(room, line.size())) + line;
  line.resize(std::min(line.size(), room));
  // fputs ignores a terminal that has been closed; fmt::print would throw.
  std::fputs(("\r\033[K" + line).c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

std::string ProgressBar::bar(std::size_t room) const {
  constexpr std::size_t kFrame = std::string_view("[] ").size(), kNarrowest = 5, kWidest = 30;
  if (room < kFrame + kNarrowest) return {};
  const std::size_t width = std::min(room - kFrame, kWidest);
  const double share = total_ == 0 ? 1.0 : std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  const auto filled = static_cast<std::size_t>(static_cast<double>(width) * share);
  return fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", width - filled);
}

std::string ProgressBar::numbers(const std::string& extra) const {
  const double done = static_cast<double>(done_), total = static_cast<double>(total_), elapsed = since_start_.seconds(),
               rate = elapsed > 0 ? done / elapsed : 0;
  std::string done_text = format_quantity(done, unit_);
  if (unit_ != "B") done_text.resize(done_text.size() - unit_.size() - 1);  // "3 of 8 steps"
  std::string text = fmt::format("{}: {:.0f}%, {} of {}, {}", what_, total > 0 ? 100.0 * done / total : 100.0,
                                 done_text, format_quantity(total, unit_), format_quantity(rate, unit_ + "/s"));
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
