// Combines what the probes of a node find, poll after poll, into one verdict.
//
// - Hard evidence in two polls in a row makes the node bad. In a single poll it may be a glitch.
// - Soft evidence makes the node suspect. Two different signals in two polls in a row make it bad, unless both report
//   the same event. A node that was bad often before has such a signal.
// - A bad node stays bad until an active check has passed, and after it two polls in a row have found no hard evidence.
//   A poll in which a probe cannot look, and could look before, does not count: it says nothing about what is wrong.
//   A check that finds the node bad again is void: it does not test links or disks, and these may still be broken.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "health/verdict.h"

namespace tessera {

struct JudgeOptions {
  int polls_to_bad = 2;
  int lemon_count = 3;       // a node that was bad this often
  double lemon_days = 30.0;  // within this many days has one more soft signal
};

class Judge {
 public:
  /// `past` has the Unix times at which the node became bad, from the ledger.
  Judge(std::string node, std::vector<double> past, const JudgeOptions& options = {});

  /// Continues from the last verdict of a daemon that has ended. A node that was bad is still bad.
  void resume(const NodeVerdict& before);
  /// Judges the node after a poll of all probes. `unix_now` may jump. `is_complete` says whether all probes have looked
  /// that could look in an earlier poll.
  NodeVerdict judge(const std::vector<Finding>& findings, double unix_now, bool is_complete = true);
  /// Returns how often the node became bad, the past included.
  std::size_t times_bad() const { return past_.size(); }
  /// Records that an active check has passed. Findings before it no longer count. The next polls decide whether it
  /// makes the node well.
  void pass_active_check(double unix_time);

 private:
  struct Seen {
    int polls = 0;  // polls in a row
    double since = 0.0;
  };
  bool is_lemon(double unix_now) const;
  /// Returns how often the node was bad in the last lemon_days.
  std::int64_t recent_times_bad(double unix_now) const;
  /// Returns why the findings of this poll make the node bad, or "" if they do not.
  std::string find_reason(const std::vector<Finding>& findings, double unix_now) const;
  /// Lets this poll decide whether the last active check counts.
  void confirm_check(const std::vector<Finding>& findings, const std::string& reason, bool is_complete);

  std::string node_;
  std::vector<double> past_;
  JudgeOptions options_;
  std::map<std::pair<std::string, std::string>, Seen> seen_;  // by signal and part
  double bad_since_ = 0.0, active_check_ = 0.0;
  double passed_check_ = 0.0;  // Unix time of a check that passed and does not count yet; 0: none
  int polls_since_check_ = 0;  // complete polls in a row without hard evidence
  std::string reason_;
};

/// Reads and writes a file with the times at which the node became bad, one line of JSON each. It keeps the newest
/// 1000.
class HealthLedger {
 public:
  explicit HealthLedger(std::filesystem::path path) : path_(std::move(path)) {}
  /// Returns the times. It skips damaged lines.
  std::vector<double> read() const;
  /// Adds the time of the verdict, in a new folder if need be. Throws Error if the file cannot be written.
  void add(const NodeVerdict& verdict);

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
