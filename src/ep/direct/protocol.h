// The protocol of one-sided dispatch and combine: which steps a rank takes in which call, as data that the
// implementation runs (direct_dispatcher.cc) and that the model checker explores (tests/ep/protocol_model_test.cc).
//
// Every rank has a window into which all ranks store, itself included. Per source rank and kind of flag it holds a word
// that the source sets with a release store to the number of its call, the epoch; a wait is an acquire load of at least
// the own epoch, from every source. Epochs only grow, so no signal is missed, and as all ranks make the same calls in
// the same order they agree on what an epoch is.
//
//   ready    the source has entered this call: what its window held for earlier calls of this kind it no longer needs.
//   stored   the source's stores of this call into this window have been made.
//
// Why no store overwrites what is still read, and no read comes too early. A read of a buffer follows, in each call,
// the wait for `stored` of all sources, so it sees what this call stored. It remains that the next store into the same
// buffer comes after the last read. Stores of rank A into a buffer of rank B:
//
//  - Rows and gradients: B uses them until it enters the next call that fills them. There B signals ready first, and A
//    stores only after it has waited for B's ready of that very call.
//  - Sums: B reads them within the call that stores them, and signals ready in a later call. A must have waited for
//    that. Every call but those that store sums has a round of ready flags; a call that stores sums takes one at its
//    beginning if the call before it stored sums too (CallSequence). This is a function of the calls made, so that the
//    ranks agree on it.
//  - Counts: A stores them before it waits for anything, into what B read in the dispatch before. In that one B read
//    its counts before it stored rows, and signalled `stored` to A after that; A waited for this before its dispatch
//    ended. So every dispatch runs all its steps, also one that finds too many rows and throws in the end. On GPUs
//    other blocks of B may read them after that; there counts have two places, by turns, and A comes to the same one
//    again only after B's next call has stored, which begins when the one before has ended.
//  - What goes along with rows or sums (what copies are for, weights, their gradients) is stored and read in the same
//    steps as these.
//
// An own store into the own window is made in the same steps, and is covered by the same argument.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

namespace tessera::ep {

/// What a rank of the group does, together with the others.
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

/// A step is done for every rank of the group, in any order, before the next begins.
struct Step {
  enum class Action : std::uint8_t {
    kStore,   // into `buffer` of the other's window
    kSignal,  // `flag` of the other's window
    kAwait,   // `flag` that the other sets in the own window
    kRead,    // what the other stored into the own `buffer`
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
/// The steps of kCombine and kDispatchBackward. Where no round of ready flags is needed, the first two are left out.
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
  bool after_sums_ = false;  // the call before stored sums
};

/// Told of every step before it begins, for tests that delay ranks.
class StepHook {
 public:
  virtual ~StepHook() = default;
  virtual void before(const Step& step) = 0;
};

}  // namespace tessera::ep
