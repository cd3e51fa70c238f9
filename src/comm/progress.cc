#include "comm/progress.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

using Clock = WaitClock::Clock;

// The background thread need not poll often: a message of some hundred kilobytes takes about as long. Where many ranks
// share a core, it polls less often.
constexpr std::chrono::microseconds kBackgroundPause{100}, kBackgroundPauseOfMany{2000},
    kBackgroundPauseWithBell{10000};
/// A waiting rank yields its core between two polls, and sleeps between them once it has waited for this long. Where
/// many ranks share a core, it sleeps at once.
constexpr std::chrono::milliseconds kSpin{2};
constexpr int kManyRanksPerCore = 4;  // more than these are many
/// A sleep lasts this part of the wait so far, within the two limits.
constexpr int kPartOfWait = 16;
constexpr std::chrono::microseconds kShortestPause{50}, kLongestPause{1000};
/// How often a wait checks its timeout and the other ranks. Ranks with a bell are threads of one process. None of them
/// dies alone, and there may be thousands, so they check less often if their timeout allows it.
constexpr std::chrono::milliseconds kBetweenChecks{100}, kBetweenChecksWithBell{500};
constexpr int kChecksOfTimeout = 20;
/// A wait polls many times in this period, so a longer gap means that this process did not run.
constexpr std::chrono::seconds kLongestGap{1};
/// How long an abandoned operation may go on. All ranks have failed alike, so either all have started it, or it never
/// ends.
constexpr std::chrono::milliseconds kTimeOfAbandoned{500};
constexpr std::size_t kMostRanksToName = 8;

/// Returns whether many of the node's ranks share each core.
bool many_share_cores(const RankBoard* board) {
  static const int num_cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return board != nullptr && board->num_ranks() > kManyRanksPerCore * num_cores;
}

}  // namespace

WaitClock::Clock::duration WaitClock::elapsed() {
  const Clock::time_point now = Clock::now();
  const Clock::duration gap = now - std::exchange(looked_, now);
  if (gap > kLongestGap) begin_ += gap;
  return now - begin_;
}

/// Keeps the background thread from its work while another thread does it.
struct Progress::Waiting {
  explicit Waiting(Progress& the_progress) : progress(the_progress) {
    const std::lock_guard lock(progress.mutex_);
    ++progress.num_waiting_;
  }
  ~Waiting() {
    const std::lock_guard lock(progress.mutex_);
    if (--progress.num_waiting_ == 0 && !progress.pending_.empty()) progress.work_.notify_one();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  Progress& progress;
};

Progress::Progress(RankBoard* board, Seconds timeout, Bell* bell) : board_(board), bell_(bell), timeout_(timeout) {}

Progress::~Progress() {
  {
    const std::scoped_lock lock(mutex_, watch_.mutex);
    ending_ = true;
  }
  work_.notify_all();
  watch_.changes.notify_all();
  if (bell_ != nullptr) bell_->ring();
  if (background_.joinable()) background_.join();
  if (watch_.thread.joinable()) watch_.thread.join();
}

void Progress::start(std::shared_ptr<Operation> operation) {
  const std::lock_guard lock(mutex_);
  advance(*operation);
  if (operation->done_) return;
  if (!background_.joinable()) background_ = std::thread([this] { run_in_background(); });
  pending_.push_back(std::move(operation));
  work_.notify_one();
}

void Progress::advance_all() {
  if (error_) std::rethrow_exception(error_);
  try {
    for (const auto& operation : pending_) advance(*operation);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  std::erase_if(pending_, [](const auto& operation) { return operation->done_; });
}

void Progress::advance(Operation& operation) {
  if (operation.done_ || !operation.advance()) return;
  operation.done_ = true;
  recorder().end(operation.event_);
}

std::string Progress::describe_missing(const Operation& operation) {
  std::vector<int> senders, receivers;
  operation.find_missing(senders, receivers);
  const bool none_came = !senders.empty();
  std::vector<int>& ranks = none_came ? senders : receivers;
  if (operation.world_ranks_ == nullptr || ranks.empty()) return "";
  for (int& rank : ranks) rank = (*operation.world_ranks_)[static_cast<std::size_t>(rank)];
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  recorder().set_peer(operation.event_, ranks.front());
  const std::size_t told = std::min(ranks.size(), kMostRanksToName);
  const std::string more = told == ranks.size() ? "" : fmt::format(" and {} more", ranks.size() - told);
  return fmt::format("; {} rank{} {}{}", none_came ? "no message has come from" : "no message was taken by",
                     ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(told), ", "), more);
}

bool Progress::done(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (!operation.done_) advance_all();
  return operation.done_;
}

void Progress::wait(Operation& operation) {
  const auto missing = [&] {
    const std::lock_guard lock(mutex_);
    return describe_missing(operation);
  };
  if (bell_ == nullptr) {
    const auto pause = [this](Clock::duration waited) { pause_between_polls(waited); };
    return keep_polling(operation.name(), operation.event_, [&] { return done(operation); }, pause, missing, {});
  }
  std::uint32_t seen = 0;
  const auto poll = [&] {
    seen = bell_->count();
    return done(operation);
  };
  const auto pause = [&](Clock::duration) { bell_->wait_for(seen, between_checks()); };
  const Waiting waiting(*this);
  keep_polling(operation.name(), operation.event_, poll, pause, missing, {});
}

void Progress::abandon(const std::shared_ptr<Operation>& operation) noexcept {
  try {
    const Clock::time_point begin = Clock::now();
    while (!done(*operation) && Clock::now() - begin < kTimeOfAbandoned) std::this_thread::sleep_for(kShortestPause);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the caller already reports a failure
  }
  const std::lock_guard lock(mutex_);
  std::erase(pending_, operation);
}

void Progress::wait_until(const std::string& name, const std::function<bool()>& over,
                          const std::function<std::string()>& missing, const std::function<std::uint64_t()>& position,
                          std::uint64_t event) {
  const auto poll = [&] {
    if (over()) return true;
    const std::lock_guard lock(mutex_);
    advance_all();
    return false;
  };
  const auto pause = [this](Clock::duration waited) { pause_between_polls(waited); };  // stores ring no bell
  keep_polling(name, event, poll, pause, missing, position);
}

RankFailure Progress::failure(const std::string& name, const std::string& reason, const std::string& missing) const {
  return RankFailure(fmt::format("{} {}{}{}", name, reason, missing, board_ == nullptr ? "" : board_->describe()));
}

RankFailure Progress::late(const std::string& name, const std::string& missing) const {
  return failure(name, fmt::format("did not end within {:g} s ({})", timeout_.count(), timeout_key_), missing);
}

void Progress::fail_late(const std::string& name, const std::string& missing) const { throw late(name, missing); }

std::optional<RankFailure> Progress::failure_of_wait(const std::string& name, Clock::duration elapsed,
                                                     const std::string& missing) const {
  if (board_ != nullptr) {
    if (const auto dead = board_->find_dead()) {
      return failure(name, fmt::format("cannot end: rank {} has died", *dead), missing);
    }
  }
  if (elapsed <= timeout_) return std::nullopt;
  const std::vector<int> ranks = board_ == nullptr ? std::vector<int>() : board_->find_not_waiting();
  const std::string waiting_for =
      ranks.empty() ? "" : fmt::format("; waiting for rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  return late(name, waiting_for + missing);
}

Clock::duration Progress::between_checks() const {
  if (bell_ == nullptr) return kBetweenChecks;
  const Seconds part = std::clamp<Seconds>(timeout_ / kChecksOfTimeout, kBetweenChecks, kBetweenChecksWithBell);
  return std::chrono::duration_cast<Clock::duration>(part);
}

void Progress::pause_between_polls(Clock::duration waited) const {
  const Clock::duration spin = many_share_cores(board_) ? Clock::duration::zero() : Clock::duration(kSpin);
  if (waited < spin) return std::this_thread::yield();
  std::this_thread::sleep_for(std::clamp<Clock::duration>(waited / kPartOfWait, kShortestPause, kLongestPause));
}

void Progress::keep_polling(const std::string& name, std::uint64_t event, const std::function<bool()>& poll,
                            const std::function<void(Clock::duration)>& pause,
                            const std::function<std::string()>& missing,
                            const std::function<std::uint64_t()>& position) {
  WaitClock clock;
  const Clock::time_point begin = Clock::now();
  Clock::time_point checked = begin;
  std::uint64_t seen = position ? position() : 0;
  if (board_ != nullptr) {
    board_->set_operation(name);
    board_->set_waiting();
    board_->set_awaited(event);
  }
  while (!poll()) {
    const Clock::time_point now = Clock::now();
    pause(now - begin);
    if (now - checked < between_checks()) continue;
    checked = now;
    if (position) {
      const std::uint64_t before = std::exchange(seen, position());
      if (seen != before) {
        clock.restart();
        if (board_ != nullptr) board_->set_operation(name);
      }
    }
    if (board_ != nullptr) board_->set_waiting();
    const std::string what_is_missing = missing();  // it also tells the flight recorder
    if (const auto failure = failure_of_wait(name, clock.elapsed(), what_is_missing)) {
      call_failure_handler(*failure);
      throw *failure;
    }
  }
  if (board_ != nullptr) board_->set_operation("computation after " + name);
}

Progress::Watched::Watched(Progress& progress, std::string name) : progress_(progress) {
  const std::lock_guard lock(progress.watch_.mutex);
  TESSERA_CHECK(!progress.watch_.call, "{} within {}", name, progress.watch_.call->name);
  progress.start_watching();
  progress.watch_.call = {.name = std::move(name)};
  if (progress.watch_.is_idle) progress.watch_.changes.notify_all();
}

Progress::Watched::~Watched() {
  const std::lock_guard lock(progress_.watch_.mutex);
  const Call& call = *progress_.watch_.call;
  if (call.is_on_board) progress_.board_->set_operation("computation after " + call.name);
  progress_.watch_.call.reset();
}

void Progress::set_failure_handler(std::function<void(const std::exception&)> failure_handler) {
  const std::lock_guard lock(watch_.mutex);
  failure_handler_ = std::move(failure_handler);
  if (failure_handler_) start_watching();
  watch_.changes.notify_all();
}

void Progress::start_watching() {
  if (!watch_.thread.joinable()) watch_.thread = std::thread([this] { watch(); });
}

void Progress::watch() {
  std::unique_lock lock(watch_.mutex);
  std::int64_t looked = monotonic_ns();
  while (!watch_.changes.wait_for(lock, between_checks(), [this] { return ending_; })) {
    if (!watch_.call && !failure_handler_) {  // nobody would learn of what it finds
      watch_.is_idle = true;
      watch_.changes.wait(lock, [this] { return ending_ || watch_.call || failure_handler_; });
      watch_.is_idle = false;
      looked = monotonic_ns();
      continue;
    }
    const std::int64_t now = monotonic_ns();
    const std::int64_t before = std::exchange(looked, now);
    if (board_ != nullptr && std::chrono::nanoseconds(now - before) > kLongestGap) board_->set_stopped(before, now);
    std::optional<RankFailure> found = failure_of_call();
    if (!found && board_ != nullptr) {
      if (const auto dead = board_->find_dead_neighbour()) {
        found = failure("the run", fmt::format("cannot end: rank {} has died", *dead), "");
      }
    }
    if (!found) continue;
    lock.unlock();
    return call_failure_handler(*found);
  }
}

std::optional<RankFailure> Progress::failure_of_call() {
  if (!watch_.call) return std::nullopt;
  Call& call = *watch_.call;
  const Clock::duration elapsed = call.clock.elapsed();
  if (elapsed < between_checks()) return std::nullopt;
  if (board_ != nullptr) {
    if (!call.is_on_board) board_->set_operation(call.name);
    call.is_on_board = true;
    board_->set_waiting();
  }
  return failure_of_wait(call.name, elapsed, "");
}

void Progress::run_in_background() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (pending_.empty() || error_ || num_waiting_ > 0) {
      work_.wait(lock);
      continue;
    }
    const std::uint32_t seen = bell_ == nullptr ? 0 : bell_->count();
    try {
      advance_all();
    } catch (...) {
      continue;  // whoever waits for the operation gets the error
    }
    lock.unlock();
    if (bell_ != nullptr) bell_->wait(seen);
    // The rank's own waits do most of the work, so a woken thread leaves them time to come first.
    std::this_thread::sleep_for(bell_ != nullptr           ? kBackgroundPauseWithBell
                                : many_share_cores(board_) ? kBackgroundPauseOfMany
                                                           : kBackgroundPause);
    lock.lock();
  }
}

}  // namespace tessera
