// Runs the messages of pipelines by the strictest rule: a send ends only after its receive was posted.
#include "parallel/pipeline_messages.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <utility>

namespace tessera {
namespace {

using Kind = PipelineScheduleKind;
using Pass = PipelinePass::Kind;

/// Says what a rank does with a message. A receiver waits for its arrival, and a sender for its memory.
struct Event {
  enum class Kind { kSend, kPost, kAwait } kind;
  std::pair<int, int> ranks;  // from, to
  std::size_t number;         // of the message among those of the two ranks
};

/// Lists a rank's events. Its memory is as the executor's: a forward takes a slot of its stage. The slot may serve
/// another micro-batch once the messages that it has sent have arrived.
class Program {
 public:
  Program(const PipelineSchedule& schedule, int rank) : schedule_(schedule), rank_(rank) {
    const std::vector<int> held = most_held(schedule);
    const auto posted = posted_receives(schedule, rank);
    std::map<int, int> num_inputs;
    const auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < actions.size(); ++i) {
      for (const PipelineMessage& message : posted[i]) {
        add(Event::Kind::kPost, source_of(message), rank, message);
        const int held_there = held[static_cast<std::size_t>(message.stage)];
        if (message.is_gradient) continue;
        EXPECT_LE(++num_inputs[message.stage], num_input_buffers(held_there));
      }
      for_each_pass(actions[i], [&](const PipelinePass& pass) {
        std::vector<Slot>& slots = slots_[pass.stage];
        slots.resize(static_cast<std::size_t>(held[static_cast<std::size_t>(pass.stage)]));
        run(pass, slots);
        if (frees_activations(pass) && is_remote(pass.stage - 1)) --num_inputs[pass.stage];
      });
    }
  }

  std::vector<Event> events;

 private:
  struct Slot {
    int micro_batch = -1;
    std::vector<Event> sends;
  };

  bool is_remote(int stage) const { return 0 <= stage && stage < schedule_.num_stages() && rank_of(stage) != rank_; }
  int rank_of(int stage) const { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  int source_of(const PipelineMessage& message) const {
    return rank_of(message.stage + (message.is_gradient ? 1 : -1));
  }

  void add(Event::Kind kind, int from, int to, const PipelineMessage& message) {
    const std::vector<PipelineMessage> all = messages_between(schedule_, from, to);
    const auto found = std::find(all.begin(), all.end(), message);
    ASSERT_NE(found, all.end());
    events.push_back({kind, {from, to}, static_cast<std::size_t>(found - all.begin())});
  }

  static Slot& slot_of(std::vector<Slot>& slots, int micro_batch) {
    return *std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.micro_batch == micro_batch; });
  }

  void run(const PipelinePass& pass, std::vector<Slot>& slots) {
    const int stage = pass.stage, m = pass.micro_batch;
    const auto send = [&](int to, bool is_gradient, Slot& slot) {
      if (!is_remote(to)) return;
      add(Event::Kind::kSend, rank_, rank_of(to), {is_gradient, to, m});
      slot.sends.push_back({Event::Kind::kAwait, events.back().ranks, events.back().number});
    };
    if (pass.kind == Pass::kForward) {
      Slot& slot = slot_of(slots, -1);
      events.insert(events.end(), slot.sends.begin(), slot.sends.end());
      slot = {.micro_batch = m, .sends = {}};
      if (is_remote(stage - 1)) add(Event::Kind::kAwait, rank_of(stage - 1), rank_, {false, stage, m});
      send(stage + 1, false, slot);
    } else if (pass.kind != Pass::kBackwardWeight) {
      if (is_remote(stage + 1)) add(Event::Kind::kAwait, rank_of(stage + 1), rank_, {true, stage, m});
      send(stage - 1, true, slot_of(slots, m));
    }
    if (frees_activations(pass)) slot_of(slots, m).micro_batch = -1;
  }

  const PipelineSchedule& schedule_;
  int rank_;
  std::map<int, std::vector<Slot>> slots_;  // by stage
};

/// Runs all ranks as far as they get. Returns the number of ranks that wait for ever.
int num_stuck(const PipelineSchedule& schedule) {
  std::vector<std::vector<Event>> programs;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) programs.push_back(Program(schedule, rank).events);
  std::map<std::pair<int, int>, std::size_t> sent, posted;
  std::vector<std::size_t> at(programs.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      for (; at[rank] < programs[rank].size(); ++at[rank], moved = true) {
        const Event& event = programs[rank][at[rank]];
        std::size_t &num_sent = sent[event.ranks], &num_posted = posted[event.ranks];
        if (event.kind == Event::Kind::kAwait && event.number >= std::min(num_sent, num_posted)) break;
        if (event.kind == Event::Kind::kAwait) continue;
        std::size_t& count = event.kind == Event::Kind::kSend ? num_sent : num_posted;
        EXPECT_EQ(event.number, count++) << "not in order";
      }
    }
  }
  int stuck = 0;
  for (std::size_t rank = 0; rank < programs.size(); ++rank) stuck += at[rank] < programs[rank].size() ? 1 : 0;
  return stuck;
}

TEST(PipelineMessages, NoRankWaitsForEver) {
  for (const Kind kind : {Kind::k1F1B, Kind::kInterleaved1F1B, Kind::kZBV, Kind::kDualPipeV}) {
    for (const int ranks : {2, 3, 4, 5, 8, 16}) {
      for (const int stages :
           kind == Kind::kInterleaved1F1B ? std::vector{2, 3} : std::vector{min_stages_per_rank(kind)}) {
        for (const int micro_batches : {1, 2, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 3, 4 * ranks}) {
          if (kind == Kind::kDualPipeV && micro_batches < 2 * ranks) continue;
          for (const int max_deferred : {1, 2, kNoLimit}) {
            SCOPED_TRACE(fmt::format("{}: {} ranks, {} stages each, {} micro-batches, {} deferred", name_of(kind),
                                     ranks, stages, micro_batches, max_deferred));
            ASSERT_EQ(num_stuck(make_pipeline_schedule(kind, ranks, stages, micro_batches, max_deferred)), 0);
          }
        }
      }
    }
  }
}

// In a V, a rank sends activations of one stage and gradients of another to the rank below it.
TEST(PipelineMessages, OneRankSendsBothKindsInItsOrder) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::kZBV, 2, 2, 2);
  const std::vector<PipelineMessage> messages = messages_between(schedule, 0, 1);
  EXPECT_THAT(messages, ::testing::UnorderedElementsAre(PipelineMessage{false, 1, 0}, PipelineMessage{false, 1, 1},
                                                        PipelineMessage{true, 2, 0}, PipelineMessage{true, 2, 1}));
  EXPECT_EQ(messages.front(), (PipelineMessage{false, 1, 0}));
  EXPECT_TRUE(messages_between(schedule, 0, 0).empty());
}

// Without deferral 1F1B's rank 0 sends a micro-batch's activation, and posts its gradient before it goes on.
TEST(PipelineMessages, AGradientIsPostedOnceItsForwardHasRun) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 2, 1, 3);
  const auto posted = posted_receives(schedule, 0);  // F0 F1 B0 F2 B1 B2
  ASSERT_EQ(posted.size(), 6u);
  EXPECT_TRUE(posted[0].empty());
  EXPECT_EQ(posted[1], (std::vector{PipelineMessage{true, 0, 0}}));
  EXPECT_EQ(posted[2], (std::vector{PipelineMessage{true, 0, 1}}));
  EXPECT_TRUE(posted[3].empty());
  EXPECT_EQ(posted[4], (std::vector{PipelineMessage{true, 0, 2}}));
}

}  // namespace
}  // namespace tessera
