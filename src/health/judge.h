// Makes one verdict of what the probes of a node find, poll after poll.
//
// - Hard evidence that is there in two polls in a row makes the node bad. One poll alone may be a glitch.
// - Soft evidence makes it suspect. Two different signals that are there in two polls in a row make it bad; that a node
//   was bad often before counts as such a signal.
// - A bad node stays bad until an active check has passed.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "health/verdict.h"

namespace tessera {

struct JudgeOptions {
  int polls_to_bad = 2;
  int lemon_count = 3;       // a node that was bad so often
  double lemon_days = 30.0;  // within so many days counts as one more soft signal
};

class Judge {
 public:
  /// `past`: Unix times at which the node became bad, as the ledger has them.
  Judge(std::string node, std::vector<double> past, const JudgeOptions& options = {});

  /// Judges the node after a poll of all probes. `unix_now` may jump.
  NodeVerdict judge(const std::vector<Finding>& findings, double unix_now);
  /// How often the node became bad, the past included.
  std::size_t times_bad() const { return past_.size(); }
  /// An active check has passed: what was found before it counts no more.
  void pass_active_check(double unix_time);

 private:
  struct Seen {
    int polls = 0;  // in a row
    double since = 0.0;
  };
  bool is_lemon(double unix_now) const;
  /// The reason for which the node is bad by the findings of this poll; empty if it is not.
  std::string find_reason(const std::vector<Finding>& findings, double unix_now) const;

  std::string node_;
  std::vector<double> past_;
  JudgeOptions options_;
  std::map<std::pair<std::string, std::string>, Seen> seen_;  // by signal and part
  double bad_since_ = 0.0, active_check_ = 0.0;
  std::string reason_;
};

/// Times at which the node became bad: a line of JSON each in a file, of which the newest 1000 are kept.
class HealthLedger {
 public:
  explicit HealthLedger(std::filesystem::path path) : path_(std::move(path)) {}
  /// Lines that are damaged are left out.
  std::vector<double> read() const;
  /// Throws Error if it cannot be written.
  void add(const NodeVerdict& verdict);

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
