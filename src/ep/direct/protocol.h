// The protocol of one-sided dispatch and combine. It says which steps a rank takes in which call. The steps are data,
// which the implementation runs (direct_dispatcher.cc) and the model checker explores
// (tests/ep/protocol_model_test.cc).
//
// Every rank has a window into which all ranks store, itself included. The window holds one word per source rank and
// kind of flag. The source sets the word, with a release store, to the number of its call, the epoch. A wait is an
// acquire load of at least this rank's epoch, from every source. Epochs only grow, so no signal is missed. All ranks
// make the same calls in the same order, so they agree on what an epoch is.
//
//   ready    The source has entered this call. It no longer needs what its window held for earlier calls of this kind.
//   stored   The source has made its stores of this call into this window.
//
// Why does no store overwrite what is still read, and why does no read come too early? In each call, a read of a buffer
// follows the wait for `stored` of all sources, so it sees what this call stored. It remains to show that the next
// store into the same buffer comes after the last read. Consider stores of rank A into a buffer of rank B:
//
// - Rows and gradients: B uses them until it enters the next call that fills them. There B signals ready first, and A
//   stores only after it has waited for B's ready of that very call.
// - Sums: B reads them within the call that stores them, and signals ready in a later call. A must have waited for
//   that. Every call that stores no sums has a round of ready flags. A call that stores sums has one at its beginning
//   if the call before it stored sums too (CallSequence). This depends on the calls made only, so the ranks agree on
//   it.
// - Counts: A stores them before it waits for anything, over what B read in the dispatch before. In that dispatch B
//   read its counts before it stored rows, and signalled `stored` to A after that. A waited for this before its
//   dispatch ended. On GPUs other blocks of B may read the counts after that signal. So counts have two places there,
//   which calls use by turns. A comes to the same place again only after B's next call has stored, and that call begins
//   when the one before has ended.
// - Data that goes along with rows or sums (what copies are for, weights, their gradients) is stored and read in the
//   same steps as these.
//
// A rank's stores into its own window are made in the same steps, and the same argument covers them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

namespace tessera::ep {

/// The calls that a rank of the group makes together with the others.
enum class Call : std::uint8_t { kDispatch, kDispatchAgain, kCombine, kCombineBackward, kDispatchBackward };

constexpr const char* name_of(Call call) {
  constexpr const char* kNames[] = {"dispatch", "dispatch again", "combine", "combine backward", "dispatch backward"};
  return kNames[static_cast<int>(call)];
}

/// The parts of a window that steps store into and read from.
enum class Buffer : std::uint8_t { kNone, kCounts, kRows, kGradients, kSums };
inline constexpr int kNumBuffers = 5;

enum class Flag : std::uint8_t { kReady, kStored };
inline constexpr int kNumFlags = 2;

/// Describes a step. It is done for every rank of the group, in any order, before the next step begins.
struct Step {
  enum class Action : std::uint8_t {
    kStore,   // into `buffer` of the other's window
    kSignal,  // `flag` of the other's window
    kAwait,   // `flag` that the other sets in this rank's window
    kRead,    // what the other stored into this rank's `buffer`
  };
  Action action;
  Flag flag = Flag::kReady;
  Buffer buffer = Buffer::kNone;

  bool operator==(const Step&) const = default;
};

constexpr Step store(Buffer buffer) { return {.action = Step::Action::kStore, .buffer = buffer}; }
constexpr Step read(Buffer buffer) { return {.action = Step::Action::kRead, .buffer = buffer}; }
constexpr Step signal(Flag flag) { return {.action = Step::Action::kSignal, .flag = flag}; }
constexpr Step await(Flag flag) { return {.action = Step::Action::kAwait, .flag = flag}; }

inline constexpr Step kDispatchSteps[] = {
    store(Buffer::kCounts), signal(Flag::kReady),  await(Flag::kReady),  read(Buffer::kCounts),
    store(Buffer::kRows),   signal(Flag::kStored), await(Flag::kStored), read(Buffer::kRows),
};
inline constexpr Step kDispatchAgainSteps[] = {
    signal(Flag::kReady),  await(Flag::kReady),  store(Buffer::kRows),
    signal(Flag::kStored), await(Flag::kStored), read(Buffer::kRows),
};
inline constexpr Step kCombineBackwardSteps[] = {
    signal(Flag::kReady),  await(Flag::kReady),  store(Buffer::kGradients),
    signal(Flag::kStored), await(Flag::kStored), read(Buffer::kGradients),
};
/// The steps of kCombine and kDispatchBackward. The first two are left out where no round of ready flags is needed.
inline constexpr Step kSumSteps[] = {
    signal(Flag::kReady),  await(Flag::kReady),  store(Buffer::kSums),
    signal(Flag::kStored), await(Flag::kStored), read(Buffer::kSums),
};

/// Gives every call of a rank its epoch and its steps.
class CallSequence {
 public:
  struct Entry {
    std::uint64_t epoch;
    std::span<const Step> steps;
  };

  Entry next(Call call) {
    const bool stores_sums = call == Call::kCombine || call == Call::kDispatchBackward;
    const std::span<const Step> steps = steps_of(call);
    const bool after_sums = std::exchange(after_sums_, stores_sums);
    return {++epoch_, stores_sums && !after_sums ? steps.subspan(2) : steps};
  }

 private:
  static std::span<const Step> steps_of(Call call) {
    switch (call) {
      case Call::kDispatch:
        return kDispatchSteps;
      case Call::kDispatchAgain:
        return kDispatchAgainSteps;
      case Call::kCombineBackward:
        return kCombineBackwardSteps;
      case Call::kCombine:
      case Call::kDispatchBackward:
        break;
    }
    return kSumSteps;
  }

  std::uint64_t epoch_ = 0;
  bool after_sums_ = false;  // the call before this one stored sums
};

/// A dispatcher calls before() when a step is about to begin. Tests use this to delay ranks.
class StepHook {
 public:
  virtual ~StepHook() = default;
  virtual void before(const Step& step) = 0;
};

}  // namespace tessera::ep
