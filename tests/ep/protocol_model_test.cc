// Explores all interleavings of the protocol's steps (ep/direct/protocol.h) on two and three ranks. One word stands for
// all that a rank stores into a part of another's window. Checks that every word is read as it was meant, that none is
// overwritten before that, and that no rank waits forever. Also checks that the search finds a missing step.
//
// Every word and flag has one writer, so memory is a function of how far the ranks have come. The search therefore
// marks states by that alone.
#include "tests/ep/protocol_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

namespace tessera::ep {
namespace {

constexpr int kMaxRanks = 3;
constexpr const char* kAllWait = "all ranks wait";

/// A step of the program that all ranks run.
struct ModelStep {
  Step step;
  std::uint8_t epoch = 0;     // of the call
  std::uint8_t expected = 0;  // for kRead: what the words must be, which is the epoch of the call that stored them
  bool use = false;           // kRead by the layer's computation, between calls
};
using Program = std::vector<ModelStep>;

/// Returns the calls' steps. Before a call fills rows or gradients again, the layer uses what the call before it has
/// left there. It may use them until then.
Program program_of(const std::vector<Call>& calls, const Mutation& mutate) {
  Program program;
  CallSequence sequence;
  std::array<std::uint8_t, kNumBuffers> stored_in{};
  const auto use = [&](Buffer buffer) {
    const std::uint8_t expected = stored_in[static_cast<std::size_t>(buffer)];
    if (expected != 0) program.push_back({.step = read(buffer), .expected = expected, .use = true});
  };
  for (const Call call : calls) {
    const CallSequence::Entry entry = sequence.next(call);
    const auto epoch = static_cast<std::uint8_t>(entry.epoch);
    std::vector<Step> steps(entry.steps.begin(), entry.steps.end());
    if (call == Call::kDispatch || call == Call::kDispatchAgain) use(Buffer::kRows);
    if (call == Call::kCombineBackward) use(Buffer::kGradients);
    if (mutate) steps = mutate(call, std::move(steps));
    for (const Step& step : steps) {
      if (step.action == Step::Action::kStore) stored_in[static_cast<std::size_t>(step.buffer)] = epoch;
    }
    for (const Step& step : steps) program.push_back({.step = step, .epoch = epoch, .expected = epoch});
  }
  use(Buffer::kRows);
  use(Buffer::kGradients);
  return program;
}

struct State {
  // Each rank has its step, and the ranks for which the step is done.
  std::array<std::uint8_t, kMaxRanks> at{}, done{};
  // Each rank's window has, by source, the epoch of the call that stored the word, and whether it is still to be read.
  using Words = std::array<std::array<std::uint8_t, kMaxRanks>, kMaxRanks>;
  std::array<Words, kNumBuffers> words{}, unread{};
  std::array<Words, kNumFlags> flags{};
};

class Explorer {
 public:
  Explorer(int num_ranks, Program program) : num_ranks_(num_ranks), program_(std::move(program)) {}

  /// Returns what can go wrong, or an empty string if nothing can.
  std::string explore() {
    std::size_t num_keys = 1;
    for (int rank = 0; rank < num_ranks_; ++rank) num_keys *= positions();
    visited_.assign(num_keys, false);
    std::vector<State> stack = {State{}};
    visit(stack.back());
    while (!stack.empty()) {
      const State state = stack.back();
      stack.pop_back();
      ++num_states_;
      bool moved = false, ended = true;
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (at(state, rank) == program_.size()) continue;
        ended = false;
        for (int peer = 0; peer < num_ranks_; ++peer) {
          if ((state.done[index(rank)] >> peer & 1) != 0 || !can_go(state, rank, peer)) continue;
          State next = state;
          const std::string fault = go(next, rank, peer);
          if (!fault.empty()) return fault;
          moved = true;
          if (visit(next)) stack.push_back(next);
        }
      }
      if (!moved && !ended) return kAllWait;
    }
    return {};
  }

  std::int64_t num_states() const { return num_states_; }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  static std::size_t at(const State& state, int rank) { return state.at[index(rank)]; }
  std::size_t positions() const { return (program_.size() + 1) << num_ranks_; }

  /// Marks the state. Returns true if it is new.
  bool visit(const State& state) {
    std::size_t key = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      key = key * positions() + (at(state, rank) << num_ranks_) + state.done[index(rank)];
    }
    const bool is_new = !visited_[key];
    visited_[key] = true;
    return is_new;
  }

  const ModelStep& step_of(const State& state, int rank) const { return program_[at(state, rank)]; }

  bool can_go(const State& state, int rank, int peer) const {
    const ModelStep& step = step_of(state, rank);
    return step.step.action != Step::Action::kAwait ||
           state.flags[static_cast<std::size_t>(step.step.flag)][index(rank)][index(peer)] >= step.epoch;
  }

  /// Takes the step for one peer. Returns what went wrong, or an empty string.
  std::string go(State& state, int rank, int peer) const {
    const ModelStep& step = step_of(state, rank);
    const auto buffer = static_cast<std::size_t>(step.step.buffer);
    switch (step.step.action) {
      case Step::Action::kStore:
        if (state.unread[buffer][index(peer)][index(rank)] != 0) return "overwritten before it was read";
        state.words[buffer][index(peer)][index(rank)] = step.epoch;
        state.unread[buffer][index(peer)][index(rank)] = 1;
        break;
      case Step::Action::kSignal:
        state.flags[static_cast<std::size_t>(step.step.flag)][index(peer)][index(rank)] = step.epoch;
        break;
      case Step::Action::kAwait:
        break;
      case Step::Action::kRead:
        if (state.words[buffer][index(rank)][index(peer)] != step.expected) return "read a word of another call";
        state.unread[buffer][index(rank)][index(peer)] = 0;
        break;
    }
    state.done[index(rank)] = static_cast<std::uint8_t>(state.done[index(rank)] | 1 << peer);
    if (state.done[index(rank)] == (1 << num_ranks_) - 1) {
      state.done[index(rank)] = 0;
      ++state.at[index(rank)];
    }
    return {};
  }

  int num_ranks_;
  Program program_;
  std::vector<bool> visited_;
  std::int64_t num_states_ = 0;
};

struct Sequence {
  const char* name;
  std::vector<Call> calls;
};

std::vector<Sequence> sequences() {
  return {
      {"two steps", {kD, kC, kCB, kDB, kD, kC, kCB, kDB}},  {"forwards only", {kD, kC, kD, kC, kD, kC}},
      {"recomputed", {kD, kC, kA, kCB, kDB, kD, kC}},       {"two layers", {kD, kC, kD, kC, kCB, kDB, kCB, kDB}},
      {"overlapped", {kD, kD, kC, kC, kCB, kCB, kDB, kDB}}, {"dispatches that fail", {kD, kD, kD, kC}},
  };
}

TEST(Protocol, NoInterleavingGoesWrong) {
  for (const Sequence& sequence : sequences()) {
    for (const int num_ranks : {2, 3}) {
      Explorer explorer(num_ranks, program_of(sequence.calls, {}));
      EXPECT_EQ(explorer.explore(), "") << sequence.name << ", " << num_ranks << " ranks";
      std::printf("%s on %d ranks: %lld states\n", sequence.name, num_ranks,
                  static_cast<long long>(explorer.num_states()));
      EXPECT_GT(explorer.num_states(), 1000);
    }
  }
}

/// Moves each signal before the store that it signals.
std::vector<Step> too_early(Call, std::vector<Step> steps) {
  for (std::size_t i = 1; i < steps.size(); ++i) {
    if (steps[i] == signal(Flag::kStored)) std::swap(steps[i - 1], steps[i]);
  }
  return steps;
}

TEST(Protocol, EveryStepIsNeeded) {
  const std::vector<Call> all = {kD, kA, kC, kCB, kDB};
  const std::vector<Step> ready_round = {signal(Flag::kReady), await(Flag::kReady)};
  struct Fault {
    const char* name;
    Mutation mutation;
    std::vector<Call> calls;
    bool waits = false;  // ranks wait forever; otherwise a word is wrong
  };
  const std::vector<Fault> faults = {
      {"counts are not waited for", without({kD}, {await(Flag::kReady)}), {kD, kC, kD, kC}},
      {"signalled before stored", too_early, {kD, kC, kD, kC}},
      {"rows are not waited for", without({kD}, {await(Flag::kStored)}), {kD, kC, kD, kC}},
      {"rows are not signalled", without({kD}, {signal(Flag::kStored)}), {kD, kC}, true},
      {"sums are not waited for", without({kC}, {await(Flag::kStored)}), {kD, kC, kD, kC}},
      {"no round before gradients", without({kCB}, ready_round), {kD, kC, kCB, kDB, kCB, kDB}},
      {"no round before gradients, two steps", without({kCB}, ready_round), {kD, kCB, kCB}},
      {"no round before rows come again", without({kA}, ready_round), {kD, kC, kA, kCB, kDB, kA}},
      {"no round between sums", without({kC, kDB}, ready_round), {kD, kD, kC, kC}},
      {"no round between sums, backward", without({kC, kDB}, ready_round), {kD, kCB, kDB, kDB}},
      {"ready is not signalled", without(all, {signal(Flag::kReady)}), {kD, kC}, true},
  };
  for (const Fault& fault : faults) {
    for (const int num_ranks : {2, 3}) {
      Explorer right(num_ranks, program_of(fault.calls, {}));
      EXPECT_EQ(right.explore(), "") << fault.name << ", but without the fault";
      Explorer wrong(num_ranks, program_of(fault.calls, fault.mutation));
      const std::string found = wrong.explore();
      EXPECT_NE(found, "") << fault.name << ", " << num_ranks << " ranks";
      EXPECT_EQ(found == kAllWait, fault.waits) << fault.name << ": " << found;
    }
  }
}

/// A dispatch that throws must have taken all its steps. If it ends after the counts, the next dispatch's counts come
/// too early.
TEST(Protocol, ADispatchThatFailsMustGoOn) {
  int num_dispatches = 0;
  const Mutation first_ends_early = [&](Call call, std::vector<Step> steps) {
    if (call == kD && num_dispatches++ == 0) steps.resize(4);
    return steps;
  };
  Explorer explorer(2, program_of({kD, kD}, first_ends_early));
  EXPECT_NE(explorer.explore(), "");
}

}  // namespace
}  // namespace tessera::ep
