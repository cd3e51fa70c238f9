#include "comm/observe/flight_analysis.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/exit_status.h"

namespace tessera {
namespace {

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Returns whether the rank ended because of its own error, not because another rank failed or a signal asked it to
/// end.
bool failed_by_itself(const RankState& state) {
  if (!state.end) return false;
  const int status = state.end->exit_status;
  return status != static_cast<int>(ExitStatus::kDone) && status != static_cast<int>(ExitStatus::kRankFailed) &&
         status <= static_cast<int>(ExitStatus::kSignal);
}

/// Returns whether the rank was stopped and continued shortly before it ended or was last heard of. mpirun continues
/// the stopped processes that it kills.
bool was_stopped(const RankState& state) {
  constexpr std::int64_t kShortlyNs = 5'000'000'000;
  const std::int64_t heard_of =
      std::max({state.section_since_ns, state.operation_since_ns, state.wait_begin_ns, state.stopped_until_ns});
  return state.stopped_until_ns != 0 && heard_of - state.stopped_until_ns < kShortlyNs;
}

class Analysis {
 public:
  Analysis(std::span<const RankState> states, int world_size) : world_size_(world_size) {
    for (const RankState& state : states) {
      if (state.world_rank >= world_size) continue;  // a damaged file
      states_[state.world_rank] = &state;
      for (const RankState::Group& group : state.groups) members_[group.id].emplace_back(state.world_rank, &group);
    }
    for (int rank = 0; rank < world_size; ++rank) {
      if (!states_.contains(rank)) without_file_.push_back(rank);
    }
    all_were_stopped_ = std::ranges::all_of(states, was_stopped);  // as by `scontrol suspend`
    for (const auto& [rank, state] : states_) follow(*state);
  }

  Culprit culprit() const {
    for (const auto& find :
         {&Analysis::find_failed, &Analysis::find_gone, &Analysis::find_not_waiting, &Analysis::find_lost_message}) {
      if (std::optional<Culprit> found = (this->*find)()) return *found;
    }
    return {.ranks = {}, .sure = Certainty::kUnknown, .reason = "no rank waits for another one"};
  }

 private:
  /// The operation that a rank waits in, and the ranks that it waits for.
  struct Wait {
    std::set<int> for_ranks;
    std::string operation;
    bool all_came = false;  // all ranks have begun the operation; a message between them is missing
  };

  bool is_gone(int rank) const {
    const auto found = states_.find(rank);
    if (found == states_.end() || is_stopped(rank)) return true;
    return !found->second->end && found->second->process == ProcessState::kEnded;
  }

  std::string describe(const RankState& state, const RankState::Event& event) const {
    const RankState::Group& group = state.groups[event.group];
    if (event.sequence != 0) return fmt::format("{} {} of {}", name_of(event.kind), event.sequence, group.axis);
    return fmt::format("{} of {}", name_of(event.kind), group.axis);
  }

  /// Returns the ranks of a group that have started fewer than `sequence` collective operations in it. If files of
  /// members are missing, all ranks without a file count as members.
  std::set<int> not_come(const RankState::Group& group, std::uint64_t sequence) const {
    std::set<int> ranks;
    const auto& members = members_.at(group.id);
    for (const auto& [rank, member] : members) {
      if (member->sequence < sequence) ranks.insert(rank);
    }
    if (static_cast<int>(members.size()) < group.size) ranks.insert(without_file_.begin(), without_file_.end());
    return ranks;
  }

  /// Finds the ranks that this rank waits for.
  void follow(const RankState& state) {
    if (!state.is_waiting()) return;
    Wait& wait = waits_[state.world_rank];
    wait.operation = state.operation;
    if (const RankState::Event* event = state.find_event(state.awaited_event)) {
      wait.operation = describe(state, *event);
      if (is_collective(event->kind)) wait.for_ranks = not_come(state.groups[event->group], event->sequence);
      wait.all_came = is_collective(event->kind) && wait.for_ranks.empty();
      const bool has_peer = 0 <= event->peer && event->peer < world_size_;
      if (wait.for_ranks.empty() && has_peer) wait.for_ranks.insert(event->peer);
    } else {  // it waits for its GPU, or for something that is not recorded
      for (const RankState::Group& group : state.groups) wait.for_ranks.merge(not_come(group, group.sequence));
    }
    wait.for_ranks.erase(state.world_rank);
    // A rank may be killed while it waits for a message that is on its way. That wait would have ended, so it does not
    // count. A wait for a rank that is gone does count.
    const bool would_end =
        wait.all_came && std::ranges::none_of(wait.for_ranks, [&](int rank) { return is_gone(rank); });
    if (is_gone(state.world_rank) && would_end) waits_.erase(state.world_rank);
  }

  bool is_stopped(int rank) const {
    const auto found = states_.find(rank);
    if (found == states_.end()) return false;
    const RankState& state = *found->second;
    return (!state.end && state.process == ProcessState::kStopped) || (!all_were_stopped_ && was_stopped(state));
  }

  /// Follows the waits of these ranks and returns the ranks where they end: those that wait for nobody, or are stopped.
  std::set<int> ends_of_waits(const std::set<int>& from) const {
    std::set<int> seen, ends;
    std::vector<int> next(from.begin(), from.end());
    while (!next.empty()) {
      const int rank = next.back();
      next.pop_back();
      if (!seen.insert(rank).second) continue;
      const auto wait = waits_.find(rank);
      if (wait == waits_.end() || is_stopped(rank)) {
        ends.insert(rank);
      } else {
        next.insert(next.end(), wait->second.for_ranks.begin(), wait->second.for_ranks.end());
      }
    }
    return ends;
  }

  /// Returns, for example, "; ranks 0, 2 wait for it in all-gather 118 of dp_shard". Returns "" if no rank waits for
  /// `rank`.
  std::string who_waits_for(int rank) const {
    std::vector<int> waiting;
    std::string operation;
    for (const auto& [waiter, wait] : waits_) {
      if (!wait.for_ranks.contains(rank) || is_gone(waiter)) continue;
      if (waiting.empty()) operation = wait.operation;
      if (wait.operation == operation) waiting.push_back(waiter);
    }
    if (waiting.empty()) return "";
    return fmt::format("; {} wait{} for it in {}", ranks_text(waiting), waiting.size() == 1 ? "s" : "", operation);
  }

  std::optional<Culprit> find_failed() const {
    std::vector<int> failed;
    bool same_message = true, same_status = true;
    for (const auto& [rank, state] : states_) {
      if (!failed_by_itself(*state)) continue;
      failed.push_back(rank);
      const RankState::End& first = *states_.at(failed.front())->end;
      same_message = same_message && state->end->message == first.message;
      same_status = same_status && state->end->exit_status == first.exit_status;
    }
    if (failed.empty()) return std::nullopt;
    const RankState::End& end = *states_.at(failed.front())->end;
    const std::string why = fmt::format("ended with exit status {}: {}", end.exit_status, first_line(end.message));
    // Ranks tell each other of an error, and then all end with the same message. An error of the program, the data or
    // the storage may also hit every rank, each with its own message.
    const bool all_failed = static_cast<int>(failed.size()) == world_size_;
    if (failed.size() > 1 && (same_message || (same_status && all_failed))) {
      return Culprit{.ranks = {}, .sure = Certainty::kCertain, .reason = fmt::format("{} {}", ranks_text(failed), why)};
    }
    return Culprit{.ranks = failed,
                   .sure = failed.size() == 1 ? Certainty::kCertain : Certainty::kLikely,
                   .reason = fmt::format("rank {} {}", failed.front(), why)};
  }

  std::optional<Culprit> find_gone() const {
    std::set<int> gone;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (is_gone(rank)) gone.insert(rank);
    }
    if (gone.empty()) return std::nullopt;
    // A launcher kills the other ranks, too. A rank is innocent if it was killed while it waited for another one that
    // is gone.
    std::set<int> first;
    for (const int rank : gone) {
      const std::set<int> ends = ends_of_waits({rank});
      const auto is_other = [&](int end) { return end != rank && gone.contains(end); };
      if (std::ranges::none_of(ends, is_other)) first.insert(rank);
    }
    const std::vector<int> ranks(first.begin(), first.end());
    const auto of_first = states_.find(ranks.front());
    std::string what = "left no file";
    if (of_first != states_.end()) {
      const RankState& state = *of_first->second;
      const double seconds = 1e-9 * static_cast<double>(state.stopped_until_ns - state.stopped_from_ns);
      const std::string fate = state.process == ProcessState::kStopped && !state.end ? "is stopped"
                               : is_stopped(ranks.front()) ? fmt::format("was stopped for {:.1f} s", seconds)
                                                           : "has died";
      what = fmt::format("{} in step {}, in {}", fate, state.step, state.operation);
    }
    // On an overloaded machine, several processes may not run for a while.
    const bool may_be_busy = ranks.size() > 1 && is_stopped(ranks.front());
    return Culprit{
        .ranks = ranks,
        .sure = first.size() == gone.size() && !may_be_busy ? Certainty::kCertain : Certainty::kLikely,
        .reason = fmt::format("rank {} {}{}{}", ranks.front(), what, who_waits_for(ranks.front()), others(ranks))};
  }

  static std::string others(const std::vector<int>& ranks) {
    if (ranks.size() == 1) return "";
    return fmt::format("; likewise {}", ranks_text({ranks.begin() + 1, ranks.end()}));
  }

  std::optional<Culprit> find_not_waiting() const {
    std::set<int> waiting;
    for (const auto& [rank, wait] : waits_) waiting.insert(rank);
    const std::set<int> found = ends_of_waits(waiting);
    if (found.empty()) return std::nullopt;
    const std::vector<int> ranks(found.begin(), found.end());
    const RankState& state = *states_.at(ranks.front());
    const double seconds = 1e-9 * static_cast<double>(state.read_ns - state.operation_since_ns);
    const std::string age = state.read_ns == 0 ? "" : fmt::format(" for {:.1f} s", seconds);
    return Culprit{
        .ranks = ranks,
        .sure = ranks.size() == 1 && waiting.size() + 1 == states_.size() ? Certainty::kCertain : Certainty::kLikely,
        .reason = fmt::format("rank {} waits for nobody: it is in {}{}, in step {}{}{}", ranks.front(), state.operation,
                              age, state.step, who_waits_for(ranks.front()), others(ranks))};
  }

  /// Handles the case that every rank waits: a message was lost between two ranks that are both in the operation.
  std::optional<Culprit> find_lost_message() const {
    std::set<int> senders, receivers;
    std::string operation;
    for (const auto& [rank, wait] : waits_) {
      if (!wait.all_came || wait.for_ranks.empty()) continue;
      if (senders.empty()) operation = wait.operation;
      senders.insert(wait.for_ranks.begin(), wait.for_ranks.end());
      receivers.insert(rank);
    }
    if (senders.empty()) return std::nullopt;
    const std::vector<int> from(senders.begin(), senders.end()), to(receivers.begin(), receivers.end());
    // If several ranks miss messages of one rank, the links among the several work.
    const bool one_sends = from.size() == 1 && to.size() > 1, one_receives = to.size() == 1 && from.size() > 1;
    std::set<int> both = senders;
    both.insert(receivers.begin(), receivers.end());
    return Culprit{.ranks = one_sends      ? from
                            : one_receives ? to
                                           : std::vector<int>(both.begin(), both.end()),
                   .sure = one_sends || one_receives ? Certainty::kLikely : Certainty::kUnknown,
                   .reason = fmt::format("all ranks have come to {}, but messages from {} have not arrived at {}: the "
                                         "network between them may have failed",
                                         operation, ranks_text(from), ranks_text(to))};
  }

  int world_size_;
  std::map<int, const RankState*> states_;
  std::map<std::uint64_t, std::vector<std::pair<int, const RankState::Group*>>> members_;
  std::vector<int> without_file_;
  bool all_were_stopped_ = false;
  std::map<int, Wait> waits_;
};

}  // namespace

std::string_view name_of(Certainty sure) {
  switch (sure) {
    case Certainty::kUnknown:
      return "unknown";
    case Certainty::kLikely:
      return "likely";
    case Certainty::kCertain:
      return "certain";
  }
  return "unknown";
}

Culprit find_culprit(std::span<const RankState> states, int world_size) {
  return Analysis(states, world_size).culprit();
}

}  // namespace tessera
