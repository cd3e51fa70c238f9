// Explores the protocol (ep/direct/protocol.h) as GPUs run it (ep/direct/direct_device.cuh), on two ranks. A call is a
// kernel. Some of its blocks store and the others read, chunk by chunk. Blocks agree by an atomic counter and flags,
// and memory is as weak as the PTX model allows. (protocol_model_test.cc explores the steps of ranks that are threads.)
//
// What is stored and read is checked with vector clocks. A word must be stored before it is read, and read before it is
// stored again, by a chain of releases and acquires. Otherwise some GPU may see it in another order. So the order of
// stores and reads in the search does not matter, but that of synchronizing steps does. The search takes signals and
// arrivals at the counter in every order. A wait ends as soon as its flag allows, because a later end could only
// acquire more. For the same reason, a launch happens as soon as it can.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "tests/ep/protocol_model.h"

namespace tessera::ep::gpu_model {
namespace {

constexpr int kRanks = 2, kSenders = 2, kReceivers = 2, kChunks = 2;
constexpr int kBlocks = kSenders + kReceivers;
// An agent is a block, or the stream of a rank, which launches calls and uses their results in between.
constexpr int kAgentsOfRank = kBlocks + 1, kAgents = kRanks * kAgentsOfRank, kStream = kBlocks;
constexpr int kPlaces = 2;          // of counts
constexpr int kMaxOperations = 30;  // per block and call
constexpr int kMaxCalls = 7;        // per test, with the last one that only has uses
static_assert(kMaxCalls * (kMaxOperations + 1) < 256);

/// Says how the kernels synchronize.
struct Kernels {
  bool fence_before_arrival = true;  // __threadfence() before the atomic addition
  bool fence_after_arrival = true;   // __threadfence_system() in the block that arrives last
  bool last_block_signals = true;    // false: the first one
  bool signals_release = true;
  bool awaits_acquire = true;
  bool chunks_have_numbers = true;  // false: a wait for `stored` is over with the call's first chunk
  bool counts_by_turns = true;      // false: counts have one place
  bool launches_in_order = true;    // false: a call does not wait for what the stream did before
};

/// What an agent does. A block executes all operations of a call in order.
struct Operation {
  enum class Kind : std::uint8_t { kStore, kRead, kSignal, kAwait, kArrive };
  Kind kind;
  Buffer buffer = Buffer::kNone;
  Flag flag = Flag::kReady;
  std::uint8_t peer = 0, chunk = 0;
  std::uint8_t value = 0;  // of the flag, or the epoch of the words
  bool if_chosen = false;  // kSignal: only the block that the counter chose does it
};

struct CallPlan {
  std::array<std::vector<Operation>, kBlocks> of_block;
  std::vector<Operation> uses_before;  // by the stream
};

std::uint8_t stored_value(std::uint8_t epoch, int chunk) {
  return static_cast<std::uint8_t>(epoch * kChunks + chunk + 1);
}

/// Divides the steps of a call among its blocks, as the kernels do.
void add_steps(CallPlan& plan, const std::vector<Step>& steps, std::uint8_t epoch, const Kernels& kernels) {
  using Kind = Operation::Kind;
  const auto for_peers = [](auto&& add) {
    for (int peer = 0; peer < kRanks; ++peer) add(static_cast<std::uint8_t>(peer));
  };
  const auto has = [&](const Step& step) { return std::find(steps.begin(), steps.end(), step) != steps.end(); };
  Buffer filled = Buffer::kNone;
  for (const Step& step : steps) {
    const bool is_counts = step.buffer == Buffer::kCounts;
    if (step.action == Step::Action::kStore && !is_counts) filled = step.buffer;
    for (int block = 0; block < kBlocks; ++block) {
      std::vector<Operation>& operations = plan.of_block[static_cast<std::size_t>(block)];
      for_peers([&](std::uint8_t peer) {
        Operation operation{
            .kind = Kind::kStore, .buffer = step.buffer, .flag = step.flag, .peer = peer, .value = epoch};
        switch (step.action) {
          case Step::Action::kStore:  // The first block stores counts.
            if (is_counts && block == 0) operations.push_back(operation);
            return;
          case Step::Action::kSignal:
            operation.kind = Kind::kSignal;
            if (step.flag == Flag::kReady && block == 0) operations.push_back(operation);
            return;
          case Step::Action::kAwait:
            operation.kind = Kind::kAwait;
            if (step.flag == Flag::kReady) operations.push_back(operation);
            return;
          case Step::Action::kRead:  // Every block reads counts.
            operation.kind = Kind::kRead;
            if (is_counts) operations.push_back(operation);
            return;
        }
      });
    }
  }
  for (int c = 0; c < kChunks; ++c) {
    const auto chunk = static_cast<std::uint8_t>(c);
    const std::uint8_t stored = stored_value(epoch, c);
    for (int block = 0; block < kSenders; ++block) {
      std::vector<Operation>& operations = plan.of_block[static_cast<std::size_t>(block)];
      for_peers([&](std::uint8_t peer) {
        operations.push_back({.kind = Kind::kStore, .buffer = filled, .peer = peer, .chunk = chunk, .value = epoch});
      });
      operations.push_back({.kind = Kind::kArrive, .chunk = chunk});
      for_peers([&](std::uint8_t peer) {
        if (!has(signal(Flag::kStored))) return;
        operations.push_back(
            {.kind = Kind::kSignal, .flag = Flag::kStored, .peer = peer, .value = stored, .if_chosen = true});
      });
    }
    for (int block = kSenders; block < kBlocks; ++block) {
      std::vector<Operation>& operations = plan.of_block[static_cast<std::size_t>(block)];
      for_peers([&](std::uint8_t peer) {
        if (!has(await(Flag::kStored))) return;
        const std::uint8_t value = kernels.chunks_have_numbers ? stored : stored_value(epoch, 0);
        operations.push_back({.kind = Kind::kAwait, .flag = Flag::kStored, .peer = peer, .value = value});
      });
      for_peers([&](std::uint8_t peer) {
        operations.push_back({.kind = Kind::kRead, .buffer = filled, .peer = peer, .chunk = chunk, .value = epoch});
      });
    }
  }
}

/// Returns the calls of a rank, and one more that only has uses. The layer uses rows and gradients right before the
/// call that fills them again.
std::vector<CallPlan> plan_of(const std::vector<Call>& calls, const Kernels& kernels, const Mutation& mutate) {
  std::vector<CallPlan> plans;
  CallSequence sequence;
  std::array<std::uint8_t, kNumBuffers> stored_in{};
  const auto use = [&](CallPlan& plan, Buffer buffer) {
    const std::uint8_t epoch = stored_in[static_cast<std::size_t>(buffer)];
    for (int peer = 0; peer < kRanks && epoch != 0; ++peer) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        plan.uses_before.push_back({.kind = Operation::Kind::kRead,
                                    .buffer = buffer,
                                    .peer = static_cast<std::uint8_t>(peer),
                                    .chunk = static_cast<std::uint8_t>(chunk),
                                    .value = epoch});
      }
    }
  };
  for (const Call call : calls) {
    const CallSequence::Entry entry = sequence.next(call);
    const auto epoch = static_cast<std::uint8_t>(entry.epoch);
    std::vector<Step> steps(entry.steps.begin(), entry.steps.end());
    if (mutate) steps = mutate(call, std::move(steps));
    CallPlan& plan = plans.emplace_back();
    for (const Step& step : steps) {
      if (step.action != Step::Action::kStore || step.buffer == Buffer::kCounts) continue;
      if (step.buffer != Buffer::kSums) use(plan, step.buffer);
      stored_in[static_cast<std::size_t>(step.buffer)] = epoch;
    }
    add_steps(plan, steps, epoch, kernels);
    for (const std::vector<Operation>& operations : plan.of_block) TESSERA_CHECK(operations.size() <= kMaxOperations);
  }
  TESSERA_CHECK(plans.size() < kMaxCalls);
  CallPlan& last = plans.emplace_back();
  use(last, Buffer::kRows);
  use(last, Buffer::kGradients);
  return plans;
}

/// Holds, for every agent, up to which time its stores and reads are known to have happened. An agent's time is its
/// place in its program, so that it does not depend on the order in which blocks arrived.
using Clock = std::array<std::uint8_t, kAgents>;

void join(Clock& clock, const Clock& other) {
  for (std::size_t i = 0; i < kAgents; ++i) clock[i] = std::max(clock[i], other[i]);
}

/// A word of a window: what one block of `source` stores for one chunk.
struct Word {
  std::uint8_t writer = 0, written_at = 0, epoch = 0;
  std::array<std::uint8_t, kAgentsOfRank> read_at{};  // by agents of the window's rank
};

/// The counter of a chunk's arrivals.
struct Counter {
  std::uint8_t count = 0;
  Clock clock{};
};
struct FlagValue {
  std::uint8_t value = 0;
  Clock clock{};
};

/// Has no padding, so that its bytes identify it.
struct State {
  std::array<std::uint8_t, kRanks> call{};              // the call that runs on a rank
  std::array<std::uint8_t, kAgents> at{}, is_chosen{};  // a block's next operation
  std::array<Clock, kAgents> clocks{};
  std::array<std::array<Counter, kChunks>, kRanks> arrivals{};
  std::array<std::array<std::array<FlagValue, kRanks>, kRanks>, kNumFlags> flags{};  // [flag][window][source]
  std::array<std::array<std::array<std::array<Word, kSenders * kChunks>, kRanks>, kRanks>, kNumBuffers> words{};
};
static_assert(std::has_unique_object_representations_v<State>);

class Explorer {
 public:
  Explorer(const std::vector<Call>& calls, const Kernels& kernels = {}, const Mutation& mutate = {})
      : kernels_(kernels), plans_(plan_of(calls, kernels, mutate)) {}

  /// Returns what can go wrong, or an empty string if nothing can.
  std::string explore() {
    State first;
    for (int rank = 0; rank < kRanks; ++rank) launch(first, rank);
    take_unordered_operations(first);
    std::vector<State> stack = {first};
    while (!stack.empty() && fault_.empty()) {
      const State state = stack.back();
      stack.pop_back();
      bool moved = false;
      for (int agent = 0; agent < kAgents && fault_.empty(); ++agent) {
        State next = state;
        if (!take_ordered(next, agent)) continue;
        take_unordered_operations(next);
        moved = true;
        if (visited_.insert(hash(next)).second) stack.push_back(next);
      }
      const bool ended = std::ranges::all_of(state.call, [&](int call) { return is_last(call); });
      if (!moved && !ended) return "all blocks wait";
    }
    return fault_;
  }
  std::size_t num_states() const { return visited_.size(); }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  static int agent_of(int rank, int i) { return rank * kAgentsOfRank + i; }
  static std::uint64_t hash(const State& state) {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&state), sizeof(State)});
  }
  bool is_last(int call) const { return call + 1 == static_cast<int>(plans_.size()); }
  const std::vector<Operation>& operations(const State& state, int agent) const {
    return plans_[state.call[index(agent / kAgentsOfRank)]].of_block[index(agent % kAgentsOfRank)];
  }
  static Clock& clock(State& state, int agent) { return state.clocks[index(agent)]; }
  /// Advances the agent's time to its next operation.
  static void advance(State& state, int agent) {
    const int call = state.call[index(agent / kAgentsOfRank)];
    clock(state, agent)[index(agent)] =
        static_cast<std::uint8_t>(call * (kMaxOperations + 1) + state.at[index(agent)] + 1);
  }

  Word& word(State& state, int window, int source, const Operation& operation, int part) const {
    const int place = operation.buffer != Buffer::kCounts ? operation.chunk * kSenders + part
                      : kernels_.counts_by_turns          ? operation.value % kPlaces
                                                          : 0;
    return state.words[static_cast<std::size_t>(operation.buffer)][index(window)][index(source)][index(place)];
  }
  void store(State& state, int agent, const Operation& operation) {
    const int rank = agent / kAgentsOfRank, window = operation.peer;
    Word& to = word(state, window, rank, operation, agent % kAgentsOfRank);
    const Clock& known = clock(state, agent);
    if (to.written_at > known[to.writer]) fault_ = "stored twice at the same time";
    for (int reader = 0; reader < kAgentsOfRank; ++reader) {
      if (to.read_at[index(reader)] > known[index(agent_of(window, reader))]) fault_ = "overwritten while it is read";
    }
    to = {.writer = static_cast<std::uint8_t>(agent), .written_at = known[index(agent)], .epoch = operation.value};
  }
  void read(State& state, int agent, const Operation& operation) {
    const int rank = agent / kAgentsOfRank;
    const Clock& known = clock(state, agent);
    const int num_parts = operation.buffer == Buffer::kCounts ? 1 : kSenders;
    for (int part = 0; part < num_parts; ++part) {
      Word& from = word(state, rank, operation.peer, operation, part);
      if (from.epoch != operation.value || from.written_at > known[from.writer]) fault_ = "read before it is there";
      from.read_at[index(agent % kAgentsOfRank)] = known[index(agent)];
    }
  }

  /// Takes all steps whose order does not matter, until every block is before a signal or an arrival, or waits.
  void take_unordered_operations(State& state) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int agent = 0; agent < kAgents; ++agent) {
        if (agent % kAgentsOfRank == kStream) {
          moved |= next_call(state, agent / kAgentsOfRank);
          continue;
        }
        const std::vector<Operation>& all = operations(state, agent);
        std::uint8_t& at = state.at[index(agent)];
        for (; at < all.size() && take_unordered(state, agent, all[at]); ++at, advance(state, agent)) moved = true;
      }
    }
  }
  /// Takes an operation whose order does not matter. Returns false if it is another one, or a wait that is not over.
  bool take_unordered(State& state, int agent, const Operation& operation) {
    switch (operation.kind) {
      case Operation::Kind::kStore:
        store(state, agent, operation);
        return true;
      case Operation::Kind::kRead:
        read(state, agent, operation);
        return true;
      case Operation::Kind::kAwait: {
        const FlagValue& seen = flag_of(state, agent / kAgentsOfRank, operation.peer, operation.flag);
        if (seen.value < operation.value) return false;
        if (kernels_.awaits_acquire) join(clock(state, agent), seen.clock);
        return true;
      }
      case Operation::Kind::kSignal:
        return operation.if_chosen && state.is_chosen[index(agent)] == 0;
      case Operation::Kind::kArrive:
        break;
    }
    return false;
  }
  static FlagValue& flag_of(State& state, int window, int source, Flag flag) {
    return state.flags[static_cast<std::size_t>(flag)][index(window)][index(source)];
  }

  /// Begins the rank's call. Blocks know what the stream has done.
  void launch(State& state, int rank) {
    const int stream = agent_of(rank, kStream);
    for (const Operation& use : plans_[state.call[index(rank)]].uses_before) read(state, stream, use);
    for (int block = 0; block < kBlocks; ++block) {
      const int agent = agent_of(rank, block);
      state.at[index(agent)] = state.is_chosen[index(agent)] = 0;
      if (kernels_.launches_in_order) join(clock(state, agent), clock(state, stream));
      advance(state, agent);
    }
  }

  /// Takes the signal or the arrival that a block is before. Returns false if it is before none.
  bool take_ordered(State& state, int agent) {
    const int rank = agent / kAgentsOfRank;
    if (agent % kAgentsOfRank == kStream) return false;
    const std::vector<Operation>& all = operations(state, agent);
    if (state.at[index(agent)] == all.size()) return false;
    const Operation& operation = all[state.at[index(agent)]];
    Clock& known = clock(state, agent);
    if (operation.kind == Operation::Kind::kSignal) {
      FlagValue& to = flag_of(state, operation.peer, rank, operation.flag);
      if (to.value >= operation.value) fault_ = "a flag goes back";
      to = {operation.value, kernels_.signals_release ? known : Clock{}};
    } else if (operation.kind == Operation::Kind::kArrive) {
      Counter& arrivals = state.arrivals[index(rank)][operation.chunk];
      if (kernels_.fence_before_arrival) join(arrivals.clock, known);
      const bool is_last = ++arrivals.count == kSenders, is_first = arrivals.count == 1;
      state.is_chosen[index(agent)] = kernels_.last_block_signals ? is_last : is_first;
      if (is_last && kernels_.fence_after_arrival) join(known, arrivals.clock);
      if (is_last) arrivals = {};
    } else {
      return false;
    }
    ++state.at[index(agent)];
    advance(state, agent);
    return true;
  }

  /// Launches the rank's next call if the one before has ended. Returns false if it has not.
  bool next_call(State& state, int rank) {
    std::uint8_t& call = state.call[index(rank)];
    if (is_last(call)) return false;
    for (int block = 0; block < kBlocks; ++block) {
      const int agent = agent_of(rank, block);
      if (state.at[index(agent)] != operations(state, agent).size()) return false;
    }
    for (int block = 0; block < kBlocks; ++block) {
      join(clock(state, agent_of(rank, kStream)), clock(state, agent_of(rank, block)));
    }
    ++call;
    advance(state, agent_of(rank, kStream));
    launch(state, rank);
    return true;
  }

  Kernels kernels_;
  std::vector<CallPlan> plans_;
  std::unordered_set<std::uint64_t> visited_;
  std::string fault_;
};

TEST(GpuProtocol, NoOrderGoesWrong) {
  const std::vector<std::vector<Call>> sequences = {{kD, kC, kCB, kDB, kD, kC}, {kD, kC, kA, kCB, kDB, kD},
                                                    {kD, kD, kC, kC, kCB, kCB}, {kD, kC, kD, kC, kD, kC},
                                                    {kD, kD, kD, kC},           {kD, kCB, kDB, kDB}};
  for (const std::vector<Call>& calls : sequences) {
    std::string name;
    for (const Call call : calls) name += std::string(name.empty() ? "" : ", ") + name_of(call);
    Explorer explorer(calls);
    EXPECT_EQ(explorer.explore(), "") << name;
    std::printf("%s: %zu states\n", name.c_str(), explorer.num_states());
    EXPECT_GT(explorer.num_states(), 1000U);
  }
}

TEST(GpuProtocol, EverySynchronizationIsNeeded) {
  struct Mutant {
    const char* name;
    Kernels kernels;
    std::vector<Call> calls = {kD, kC};
  };
  const std::vector<Mutant> mutants = {
      {"no fence before an arrival", {.fence_before_arrival = false}},
      {"no fence in the last block", {.fence_after_arrival = false}},
      {"the first block signals", {.last_block_signals = false}},
      {"signals do not release", {.signals_release = false}},
      {"waits do not acquire", {.awaits_acquire = false}},
      {"any chunk ends a wait", {.chunks_have_numbers = false}},
      {"counts have one place", {.counts_by_turns = false}, {kD, kD}},
      {"calls are not in order", {.launches_in_order = false}, {kD, kC, kD}},
  };
  for (const Mutant& mutant : mutants) {
    EXPECT_EQ(Explorer(mutant.calls).explore(), "") << mutant.name << ", but without it";
    EXPECT_NE(Explorer(mutant.calls, mutant.kernels).explore(), "") << mutant.name;
  }
}

TEST(GpuProtocol, EveryStepIsNeeded) {
  struct Fault {
    const char* name;
    std::vector<Call> of;
    std::vector<Step> left_out;
    std::vector<Call> calls;
  };
  const std::vector<Step> round = {signal(Flag::kReady), await(Flag::kReady)};
  const std::vector<Fault> faults = {
      {"counts are not waited for", {kD}, {await(Flag::kReady)}, {kD, kC}},
      {"rows are not waited for", {kD}, {await(Flag::kStored)}, {kD, kC}},
      {"rows are not signalled", {kD}, {signal(Flag::kStored)}, {kD, kC}},
      {"no round before gradients", {kCB}, round, {kD, kC, kCB, kDB, kCB, kDB}},
      {"no round before rows come again", {kA}, round, {kD, kC, kA, kCB, kDB, kA}},
      {"no round between sums", {kC}, round, {kD, kD, kC, kC}},
      {"no round between sums, backward", {kDB}, round, {kD, kCB, kDB, kDB}},
  };
  for (const Fault& fault : faults) {
    EXPECT_EQ(Explorer(fault.calls).explore(), "") << fault.name << ", but without it";
    EXPECT_NE(Explorer(fault.calls, {}, without(fault.of, fault.left_out)).explore(), "") << fault.name;
  }
}

}  // namespace
}  // namespace tessera::ep::gpu_model
