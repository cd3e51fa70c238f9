// Explores all interleavings of the exchange of counted rows (comm/counted_exchange.h) on two and three ranks, over a
// network that delivers a rank's messages to another one in order, but at any time. A flush waits until all has
// arrived. NCCL promises less: that the send buffer may be written again. So a real network must deliver what it has
// taken, even if the sender has ended. One word stands for all rows that a rank sends to another. Checks that every
// word is read as it was meant, that no buffer is written before it is free, that no rank waits forever, and that
// nothing arrives at a rank that has ended. Also checks that the search finds a missing step.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace tessera {
namespace {

constexpr const char* kAllWait = "all ranks wait";

/// What a rank does for one other rank.
enum class Step : std::uint8_t {
  kPack,        // writes the word into the send buffer
  kAwaitEmpty,  // waits until the other rank has taken the words of all exchanges before
  kPut,         // sends the word, and a signal behind it
  kPutEarly,    // a fault: sends the signal, and the word behind it
  kAwaitThere,  // waits for the signal of the other rank's word
  kFlush,       // waits until all that was sent to the other rank has arrived
  kUnpack,      // takes the other rank's word out of the receive buffer
  kRelease,     // signals that the receive buffer is empty
  kEnd          // gives the buffers and connections back
};

/// Steps that a thread per other rank takes one after the other. All threads of a rank meet at the end of a phase.
struct Phase {
  std::uint8_t exchange;
  std::vector<Step> steps;
};
using Program = std::vector<Phase>;

/// Returns the exchanges of comm/counted_exchange.cu, kernel by kernel, and their end.
Program program_of(std::uint8_t num_exchanges) {
  Program program;
  for (std::uint8_t i = 0; i < num_exchanges; ++i) {
    program.push_back({i, {Step::kPack}});
    program.push_back({i, {Step::kAwaitEmpty, Step::kPut, Step::kAwaitThere}});
    program.push_back({i, {Step::kFlush}});
    program.push_back({i, {Step::kUnpack}});
    program.push_back({i, {Step::kRelease}});
  }
  program.push_back({num_exchanges, {Step::kAwaitEmpty}});
  program.push_back({num_exchanges, {Step::kFlush}});
  program.push_back({num_exchanges, {Step::kEnd}});
  return program;
}

constexpr std::size_t kMostRanks = 3;
template <typename T>
using PerPair = std::array<std::array<T, kMostRanks>, kMostRanks>;

enum class Message : char { kWord = 'w', kThere = 't', kEmpty = 'e' };

struct ModelState {
  std::array<std::uint8_t, kMostRanks> phase{};
  PerPair<std::uint8_t> step{};  // of a rank for another one, in the phase
  // The next two have a word by rank and other rank: the number of its exchange plus 1, and 0 once it was read.
  PerPair<std::uint8_t> to_send{}, received{};
  PerPair<std::uint8_t> num_there{}, num_empty{};  // signals that a rank has from another one
  PerPair<std::string> on_the_way;                 // messages from a rank to another one
  auto operator<=>(const ModelState&) const = default;
};

class Explorer {
 public:
  Explorer(std::size_t num_ranks, Program program) : num_ranks_(num_ranks), program_(std::move(program)) {}

  /// Returns what can go wrong, or an empty string if nothing can.
  std::string explore() {
    std::vector<ModelState> stack = {ModelState{}};
    visited_.insert(stack.back());
    while (!stack.empty()) {
      const ModelState state = stack.back();
      stack.pop_back();
      bool has_ended = true;
      std::vector<ModelState> next;
      for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
        has_ended = has_ended && state.phase[rank] == program_.size();
        for (std::size_t peer = 0; peer < num_ranks_; ++peer) {
          if (peer == rank) continue;
          for (const bool delivers : {false, true}) {
            if (!(delivers ? !state.on_the_way[rank][peer].empty() : can_go(state, rank, peer))) continue;
            next.push_back(state);
            const std::string fault = delivers ? deliver(next.back(), rank, peer) : go(next.back(), rank, peer);
            if (!fault.empty()) return fault;
          }
        }
      }
      if (next.empty() && !has_ended) return kAllWait;
      for (ModelState& one : next) {
        if (visited_.insert(one).second) stack.push_back(std::move(one));
      }
    }
    return {};
  }

  std::size_t num_states() const { return visited_.size(); }

 private:
  const Phase* phase_of(const ModelState& state, std::size_t rank) const {
    return state.phase[rank] < program_.size() ? &program_[state.phase[rank]] : nullptr;
  }

  bool can_go(const ModelState& state, std::size_t rank, std::size_t peer) const {
    const Phase* phase = phase_of(state, rank);
    if (phase == nullptr || state.step[rank][peer] == phase->steps.size()) return false;
    switch (phase->steps[state.step[rank][peer]]) {
      case Step::kAwaitEmpty:
        return state.num_empty[rank][peer] >= phase->exchange;
      case Step::kAwaitThere:
        return state.num_there[rank][peer] > phase->exchange;
      case Step::kFlush:
        return state.on_the_way[rank][peer].empty();
      default:
        return true;
    }
  }

  /// Takes a step of the rank for the peer. Returns what went wrong, or an empty string.
  std::string go(ModelState& state, std::size_t rank, std::size_t peer) const {
    const Phase& phase = *phase_of(state, rank);
    std::string& sent = state.on_the_way[rank][peer];
    const auto send = [&](Message message) { sent += static_cast<char>(message); };
    switch (phase.steps[state.step[rank][peer]]) {
      case Step::kPack:
        if (sent.find(static_cast<char>(Message::kWord)) != std::string::npos) return "packed over a word on its way";
        state.to_send[rank][peer] = static_cast<std::uint8_t>(phase.exchange + 1);
        break;
      case Step::kPut:
        send(Message::kWord);
        send(Message::kThere);
        break;
      case Step::kPutEarly:
        send(Message::kThere);
        send(Message::kWord);
        break;
      case Step::kUnpack:
        if (state.received[rank][peer] != phase.exchange + 1) return "read a word of another exchange";
        state.received[rank][peer] = 0;
        break;
      case Step::kRelease:
        send(Message::kEmpty);
        break;
      case Step::kEnd:
        if (!sent.empty()) return "ended before all had arrived";
        break;
      case Step::kAwaitEmpty:
      case Step::kAwaitThere:
      case Step::kFlush:
        break;
    }
    ++state.step[rank][peer];
    bool is_done = true;
    for (std::size_t other = 0; other < num_ranks_; ++other) {
      is_done = is_done && (other == rank || state.step[rank][other] == phase.steps.size());
    }
    if (is_done) {
      ++state.phase[rank];
      state.step[rank] = {};
    }
    return {};
  }

  /// Delivers the next message from the rank to the peer. Returns what went wrong, or an empty string.
  std::string deliver(ModelState& state, std::size_t rank, std::size_t peer) const {
    std::string& sent = state.on_the_way[rank][peer];
    const auto message = static_cast<Message>(sent.front());
    sent.erase(0, 1);
    if (state.phase[peer] == program_.size()) return "arrived after the end";
    if (message == Message::kWord) {
      if (state.received[peer][rank] != 0) return "overwritten before it was read";
      state.received[peer][rank] = state.to_send[rank][peer];
    } else {
      ++(message == Message::kThere ? state.num_there : state.num_empty)[peer][rank];
    }
    return {};
  }

  std::size_t num_ranks_;
  Program program_;
  std::set<ModelState> visited_;
};

TEST(CountedExchangeModel, NoInterleavingGoesWrong) {
  for (const auto& [num_ranks, num_exchanges] : {std::pair<std::size_t, std::uint8_t>{2, 6}, {3, 2}}) {
    Explorer explorer(num_ranks, program_of(num_exchanges));
    EXPECT_EQ(explorer.explore(), "") << num_ranks << " ranks";
    EXPECT_GT(explorer.num_states(), 500u) << num_ranks << " ranks";
  }
}

/// Replaces a step in all phases, or removes it. `in_end` says whether in the end's phases or in the exchanges'.
Program changed(Program program, Step step, std::vector<Step> by, bool in_end = false) {
  for (Phase& phase : program) {
    if ((phase.exchange == program.back().exchange) != in_end) continue;
    for (std::size_t i = 0; i < phase.steps.size(); ++i) {
      if (phase.steps[i] != step) continue;
      phase.steps.erase(phase.steps.begin() + static_cast<std::ptrdiff_t>(i));
      phase.steps.insert(phase.steps.begin() + static_cast<std::ptrdiff_t>(i), by.begin(), by.end());
      break;
    }
  }
  std::erase_if(program, [](const Phase& phase) { return phase.steps.empty(); });
  return program;
}

TEST(CountedExchangeModel, EveryStepIsNeeded) {
  const Program right = program_of(3);
  struct Fault {
    const char* name;
    Program program;
    std::string found;
  };
  const std::vector<Fault> faults = {
      {"the receiver's buffer is not waited for", changed(right, Step::kAwaitEmpty, {}),
       "overwritten before it was read"},
      {"rows are not waited for", changed(right, Step::kAwaitThere, {}), "read a word of another exchange"},
      {"the send buffer is not waited for", changed(right, Step::kFlush, {}), "packed over a word on its way"},
      {"signalled before the rows", changed(right, Step::kPut, {Step::kPutEarly}), "read a word of another exchange"},
      {"rows are not signalled", changed(right, Step::kPut, {}), kAllWait},
      {"not released", changed(right, Step::kRelease, {}), kAllWait},
      {"released too early",
       changed(changed(right, Step::kRelease, {}), Step::kUnpack, {Step::kRelease, Step::kUnpack}),
       "overwritten before it was read"},
      {"ended without the others' signals", changed(right, Step::kAwaitEmpty, {}, true), "arrived after the end"},
      {"ended before signals have arrived", changed(right, Step::kFlush, {}, true), "ended before all had arrived"},
  };
  for (const Fault& fault : faults) EXPECT_EQ(Explorer(2, fault.program).explore(), fault.found) << fault.name;
}

}  // namespace
}  // namespace tessera
