// Reads the kernel's files and counters for probes.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "health/probe.h"

namespace tessera {

/// How long an event is reported, in seconds.
inline constexpr double kHoldSeconds = 600.0;

/// Reads the files of /proc and /sys, or of a folder that replaces them. Any of them may vanish, be empty or hold
/// nonsense at any time.
class Sysroot {
 public:
  explicit Sysroot(std::filesystem::path root = "/") : root_(std::move(root)) {}

  /// Returns where a file is. `path` is the kernel's name of it: "/sys/class/net".
  std::filesystem::path operator/(std::string_view path) const;
  /// Returns a file's text, at most 64 KiB, without white space around it. Returns nullopt if the file cannot be read.
  std::optional<std::string> text(std::string_view path) const;
  /// Returns the number that the file begins with, such as 12 or 0xc, or nullopt if there is none.
  std::optional<std::int64_t> number(std::string_view path) const;
  bool exists(std::string_view path) const;
  /// Returns the names in a folder, sorted. There are none if there is no such folder.
  std::vector<std::string> names(std::string_view folder) const;
  bool is_real() const { return root_ == "/"; }

 private:
  std::filesystem::path root_;
};

/// Measures how fast counters rise. One error now and then is no trend, however short the time between two polls is.
class CounterRates {
 public:
  /// Returns by how much the counter has risen within the last minute. If calls are further apart, it is the rise per
  /// minute since the last one. It is 0 at the first call, and after the counter has restarted. `now` is in seconds.
  double per_minute(const std::string& counter, double value, double now);
  void clear() { seen_.clear(); }

 private:
  struct Sample {
    double value = 0.0, time = 0.0;
  };
  std::map<std::string, std::deque<Sample>> seen_;  // of the last minute, and one sample before it
};

/// Measures how far counters have risen since they were first seen. Earlier counts are not news.
class CounterRises {
 public:
  /// Returns the rise since the first call. If the counter has fallen since, as a new driver's does, returns the rise
  /// since its lowest value.
  std::int64_t rise(const std::string& counter, std::int64_t value);
  void clear() { first_.clear(); }

 private:
  std::map<std::string, std::int64_t> first_;
};

/// Remembers parts that were well at one time. A part that never was may not be in use, like a port without a cable.
class KnownGood {
 public:
  /// Returns whether the part was well in an earlier call, and is not now.
  bool has_failed(const std::string& part, bool is_well);
  /// Returns the parts that were well and are not among those that are `there`.
  std::vector<std::string> missing(const std::set<std::string>& there) const;
  /// Forgets that the part was well.
  void forget(const std::string& part) { parts_.erase(part); }

 private:
  std::set<std::string> parts_;
};

/// Holds events for kHoldSeconds, so that two polls see them.
class HeldEvents {
 public:
  /// Adds an event. It replaces an earlier one of the same signal and part.
  void add(Finding finding, double now);
  void append_to(std::vector<Finding>& findings, double now);
  void clear() { events_.clear(); }

 private:
  std::map<std::pair<std::string, std::string>, std::pair<Finding, double>> events_;
};

}  // namespace tessera
