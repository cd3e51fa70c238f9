#include "launch/watch/run_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/median.h"

namespace tessera {
namespace {

/// Names of sections, as in comm/observe/rank_file.h.
constexpr std::string_view kStarting = "starting", kLoading = "loading", kStep = "step", kEnded = "ended";

/// Seconds between two polls that mean a suspension: this process polls several times in this period.
constexpr double kSuspendedSeconds = 2.0;
constexpr std::size_t kStepsOfMedian = 50;
/// How many times longer than the usual step a step may take.
constexpr double kUsualTimes = 3.0;

std::string describe_rank(const RankReport& rank) {
  return fmt::format("rank {} is in step {}, for {:.1f} s in {}{}", rank.rank, rank.step, rank.section_seconds,
                     rank.operation.empty() ? rank.section : rank.operation, rank.is_stopped ? ", and is stopped" : "");
}

}  // namespace

RunWatch::RunWatch(const WatchOptions& options, std::vector<std::string> nodes, int ranks_per_node, double now)
    : options_(options), nodes_(std::move(nodes)), ranks_per_node_(ranks_per_node), begin_(now), looked_(now) {
  for (const std::string& node : nodes_) node_states_[node].seen = now;
}

void RunWatch::report(const std::string& node, const std::vector<RankReport>& ranks, double now) {
  look(now);
  const auto found = node_states_.find(node);
  if (found == node_states_.end()) return;  // the node is a spare
  found->second.seen = now;
  for (const RankReport& report : ranks) {
    if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= world_size()) continue;
    Rank& rank = ranks_[report.rank];
    if (!report.is_stopped || report.step != rank.report.step) rank.stopped_since.reset();
    if (report.is_stopped && !rank.stopped_since) rank.stopped_since = now;
    if (report.step != rank.report.step || report.section != rank.report.section) rank.suspended_seconds = 0.0;
    rank.report = report;
    rank.reported = now;
  }
  note_steps(now);
}

void RunWatch::lose(const std::string& node, const std::string& how) {
  if (const auto found = node_states_.find(node); found != node_states_.end()) found->second.lost = how;
}

void RunWatch::note_steps(double now) {
  const std::int64_t before = std::exchange(step_, step());
  if (step_ == before) return;
  if (before > 0 && step_ > before) {
    step_seconds_.push_back((now - step_time_) / static_cast<double>(step_ - before));
    if (step_seconds_.size() > kStepsOfMedian) step_seconds_.pop_front();
  }
  step_time_ = now;
}

std::int64_t RunWatch::step() const {
  if (ranks_.size() < world_size()) return 0;
  std::int64_t least = ranks_.begin()->second.report.step;
  for (const auto& [number, rank] : ranks_) least = std::min(least, rank.report.step);
  return least;
}

double RunWatch::step_seconds() const {
  return step_seconds_.empty() ? 0.0 : median({step_seconds_.begin(), step_seconds_.end()});
}

bool RunWatch::all_stopped() const {
  return ranks_.size() == world_size() &&
         std::ranges::all_of(ranks_, [](const auto& rank) { return rank.second.stopped_since.has_value(); });
}

void RunWatch::look(double now) {
  const double seconds = now - std::exchange(looked_, now);
  const bool was_suspended = seconds > kSuspendedSeconds;
  if (!was_suspended && !all_stopped()) return;
  begin_ += seconds;
  step_time_ += seconds;
  window_step_ = 0;
  for (auto& [name, node] : node_states_) {
    if (was_suspended) node.seen += seconds;  // if all ranks are stopped, monitors still report
  }
  for (auto& [number, rank] : ranks_) {
    rank.suspended_seconds += seconds;
    if (rank.stopped_since) *rank.stopped_since += seconds;
  }
}

std::optional<Failure> RunWatch::find(double now) {
  look(now);
  if (auto found = find_lost_node(now)) return found;
  if (auto found = find_ended()) return found;
  if (auto found = find_stopped(now)) return found;
  if (auto found = find_late(now)) return found;
  return find_slow(now);
}

bool RunWatch::are_done() const {
  const auto is_done = [](const auto& rank) { return rank.second.report.exit_status == 0; };
  return ranks_.size() == world_size() && std::ranges::all_of(ranks_, is_done);
}

std::optional<Failure> RunWatch::find_lost_node(double now) const {
  for (const std::string& name : nodes_) {
    const Node& node = node_states_.at(name);
    const double silent = now - node.seen;
    if (!node.lost && silent <= options_.node_timeout) continue;
    return Failure{.kind = FailureKind::kNodeLost,
                   .node = name,
                   .sure = Certainty::kCertain,
                   .step = step_,
                   .evidence = {node.lost ? fmt::format("{}: {}", name, *node.lost)
                                          : fmt::format("the monitor of {} has been silent for {:.1f} s (limit {:g} s)",
                                                        name, silent, options_.node_timeout)}};
  }
  return std::nullopt;
}

std::optional<Failure> RunWatch::find_ended() const {
  const Failure* first = nullptr;
  Failure own, killed;
  bool others_failed = false;
  std::size_t num_killed = 0;
  std::map<FailureKind, std::size_t> num_of_kind;
  for (const auto& [number, rank] : ranks_) {
    const RankReport& report = rank.report;
    if (!report.exit_status && !report.is_ended) continue;
    if (!report.exit_status) {
      ++num_killed;
      if (first == nullptr) {
        killed = {.kind = FailureKind::kRankDied,
                  .rank = number,
                  .node = node_of(number),
                  .sure = Certainty::kCertain,
                  .step = report.step,
                  .evidence = {fmt::format("the process of rank {} on {} ended in step {} without a word, as by a "
                                           "signal: look for the kernel's messages (out of memory?)",
                                           number, node_of(number), report.step)}};
        first = &killed;
      }
      continue;
    }
    const std::optional<FailureKind> kind = kind_of_status(*report.exit_status);
    others_failed = others_failed || (!kind && *report.exit_status != 0);
    // A rank that waits for others ends because of them. A rank's own reason counts more than a process that is gone.
    if (!kind || *report.exit_status > 128) continue;
    ++num_of_kind[*kind];
    if (first == &own) continue;
    own = {.kind = *kind,
           .rank = number,
           .node = node_of(number),
           .sure = Certainty::kCertain,
           .step = report.step,
           .evidence = {fmt::format("rank {} on {} ended with status {}: {}", number, node_of(number),
                                    *report.exit_status, report.end_message)}};
    first = &own;
  }
  // A failure of all ranks points at none of them.
  if (first == &own && num_of_kind[own.kind] == world_size() && world_size() > 1) {
    own.rank.reset();
    own.node.clear();
    own.sure = Certainty::kUnknown;
  }
  if (num_killed == world_size() && world_size() > 1) {
    return Failure{
        .kind = FailureKind::kRankDied,
        .step = step_,
        .evidence = {fmt::format("the processes of all {} ranks ended without a word, as by a signal", num_killed)}};
  }
  if (first != nullptr) return *first;
  if (!others_failed) return std::nullopt;
  return Failure{.kind = FailureKind::kRankHung,
                 .step = step_,
                 .evidence = {"ranks ended because another one did not come in time"}};
}

std::optional<Failure> RunWatch::find_stopped(double now) const {
  const auto is_stopped = [](const auto& rank) { return rank.second.stopped_since.has_value(); };
  // Ctrl-Z and scontrol suspend stop all ranks, which is not a failure.
  if (std::ranges::all_of(ranks_, is_stopped)) return std::nullopt;
  for (const auto& [number, rank] : ranks_) {
    if (!rank.stopped_since || now - *rank.stopped_since < options_.stopped_seconds) continue;
    return Failure{
        .kind = FailureKind::kRankHung,
        .rank = number,
        .node = node_of(number),
        .sure = Certainty::kCertain,
        .step = rank.report.step,
        .evidence = {fmt::format("{}, for {:.1f} s", describe_rank(rank.report), now - *rank.stopped_since)}};
  }
  return std::nullopt;
}

std::optional<Failure> RunWatch::find_late(double now) const {
  if (ranks_.size() < world_size()) {
    if (now - begin_ <= options_.start_timeout) return std::nullopt;
    return Failure{.kind = FailureKind::kStartFailed,
                   .sure = Certainty::kUnknown,
                   .evidence = {fmt::format("{} of {} ranks have come within {:g} s (comm.init_timeout_seconds)",
                                            ranks_.size(), world_size(), options_.start_timeout)}};
  }
  const double usual = step_seconds();
  std::optional<Failure> found;
  std::size_t num_late = 0;
  std::string limits;  // of the first rank that is late
  for (const auto& [number, rank] : ranks_) {
    const RankReport& report = rank.report;
    if (report.section == kEnded || rank.stopped_since) continue;
    const bool is_start = report.section == kStarting || report.section == kLoading, is_step = report.section == kStep;
    const double limit = is_start                 ? options_.start_timeout
                         : is_step && usual > 0.0 ? std::max(options_.hang_floor, kUsualTimes * usual)
                                                  : options_.other_timeout;
    const bool has_known_length = is_step || report.section == kStarting;
    if (!has_known_length && world_size() == 1) continue;  // one rank votes with nobody, and storage may take long
    const double seconds =
        has_known_length ? report.section_seconds : std::min(report.section_seconds, report.operation_seconds);
    const double age = seconds - rank.suspended_seconds + (now - rank.reported);
    if (age <= limit) continue;
    ++num_late;
    if (found) continue;
    found = {.kind = FailureKind::kRankHung, .sure = Certainty::kUnknown, .step = report.step};
    limits = fmt::format("within {:.1f} s (limit {:.1f} s{})", age, limit,
                         usual > 0.0 ? fmt::format("; a step usually takes {:.2f} s", usual) : "");
  }
  if (found) found->evidence.push_back(fmt::format("{} of {} ranks did not get on {}", num_late, world_size(), limits));
  return found;
}

std::optional<Failure> RunWatch::find_slow(double now) {
  if (ranks_.size() < 2 || step_ < 3) return std::nullopt;  // the first steps are slower
  const bool is_first = window_step_ == 0;
  if (!is_first && (step_ - window_step_ < options_.slow_window || now - window_time_ < options_.slow_window_seconds)) {
    return std::nullopt;
  }
  for (auto& [number, rank] : ranks_) {
    const double idle = rank.report.idle_seconds, seconds = rank.reported - rank.window_time;
    if (!is_first) {
      rank.compute_per_step =
          std::max(0.0, seconds - (idle - rank.window_idle)) / static_cast<double>(step_ - window_step_);
    }
    rank.window_time = rank.reported;
    rank.window_idle = idle;
  }
  window_step_ = step_;
  window_time_ = now;
  return is_first ? std::nullopt : compare_ranks();
}

std::optional<Failure> RunWatch::compare_ranks() {
  std::optional<Failure> found;
  for (auto& [number, rank] : ranks_) {
    std::vector<double> others;
    for (const auto& [other_number, other] : ranks_) {
      if (other_number != number) others.push_back(other.compute_per_step);
    }
    const double usual = median(others);
    const bool is_slow = rank.compute_per_step > std::max(options_.slow_factor * usual, usual + options_.slow_seconds);
    rank.slow_windows = is_slow ? rank.slow_windows + 1 : 0;
    if (rank.slow_windows < 2 || found) continue;
    found = Failure{.kind = FailureKind::kRankSlow,
                    .rank = number,
                    .node = node_of(number),
                    .sure = Certainty::kLikely,
                    .step = rank.report.step,
                    .evidence = {fmt::format("rank {} on {} computes {:.3f} s per step, the others {:.3f} s (median)",
                                             number, node_of(number), rank.compute_per_step, usual)}};
  }
  return found;
}

}  // namespace tessera
