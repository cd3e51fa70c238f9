// Runs the messages of pipelines by the strictest rule: a send ends only after its receive was posted.
#include "parallel/pipeline_messages.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"

namespace tessera {
namespace {

using Kind = PipelineScheduleKind;
using Pass = PipelinePass::Kind;

/// Says what a rank does: it computes, or does something with a message. A receiver waits for its arrival, and a sender
/// for its memory.
struct Event {
  enum class Kind { kSend, kPost, kAwait, kCompute } kind;
  std::pair<int, int> ranks;  // from, to
  std::size_t number = 0;     // of the message among those of the two ranks
  int time = 0;               // of a computation
};

/// Memory that messages are sent from or received into. It may be used anew once what was sent from it has arrived.
struct Memory {
  int micro_batch = -1;  // -1: free
  std::vector<Event> sent;
};

/// Lists a rank's events. Its memory is as the executor's: a forward takes a slot of its stage, and outputs and their
/// gradients take the stage's buffer that was used least recently. With `ample` memory there are as many buffers as the
/// stage holds micro-batches.
class Program {
 public:
  Program(const PipelineSchedule& schedule, int rank, bool ample, bool in_turns) : schedule_(schedule), rank_(rank) {
    const std::vector<int> held = most_held(schedule);
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      const int held_there = held[static_cast<std::size_t>(stage)];
      slots_[stage].resize(static_cast<std::size_t>(held_there));
      buffers_[stage].resize(
          static_cast<std::size_t>(ample ? held_there : num_output_buffers(schedule, stage, held_there)));
    }
    const auto posted = posted_receives(schedule, rank);
    std::map<int, int> num_inputs;
    const auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < actions.size(); ++i) {
      for (const PipelineMessage& message : posted[i]) {
        if (message.is_gradient) {
          take(buffers_[message.stage]).micro_batch = message.micro_batch;
        } else {
          EXPECT_LE(++num_inputs[message.stage], num_input_buffers(held[static_cast<std::size_t>(message.stage)]));
        }
        add(Event::Kind::kPost, source_of(message), rank, message);
      }
      // In turns, a pair waits for both messages before it sends.
      const bool is_pair = in_turns && actions[i].overlapped;
      if (is_pair) for_each_pass(actions[i], [&](const PipelinePass& pass) { begin(pass); });
      for_each_pass(actions[i], [&](const PipelinePass& pass) {
        if (!is_pair) begin(pass);
        end(pass);
        if (frees_activations(pass) && is_remote(pass.stage - 1)) --num_inputs[pass.stage];
      });
    }
  }

  std::vector<Event> events;

 private:
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

  static Memory& find(std::vector<Memory>& all, int micro_batch) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const Memory& memory) { return memory.micro_batch == micro_batch; });
    TESSERA_CHECK(found != all.end(), "micro-batch {}", micro_batch);
    return *found;
  }

  /// Takes what is free and was used least recently, once it may be used anew. It becomes the last one.
  Memory& take(std::vector<Memory>& all) {
    std::rotate(&find(all, -1), &find(all, -1) + 1, &*all.end());
    events.insert(events.end(), all.back().sent.begin(), all.back().sent.end());
    all.back().sent.clear();
    return all.back();
  }

  void send(const PipelineMessage& message, int to, Memory& from) {
    add(Event::Kind::kSend, rank_, rank_of(to), message);
    from.sent = {{Event::Kind::kAwait, events.back().ranks, events.back().number}};
  }

  void compute(int time) { events.push_back({Event::Kind::kCompute, {}, 0, time}); }

  /// Waits for what the pass receives.
  void begin(const PipelinePass& pass) {
    const int stage = pass.stage, m = pass.micro_batch;
    if (pass.kind == Pass::kForward) {
      take(slots_[stage]).micro_batch = m;
      if (is_remote(stage - 1)) add(Event::Kind::kAwait, rank_of(stage - 1), rank_, {false, stage, m});
    } else if (pass.kind != Pass::kBackwardWeight && is_remote(stage + 1)) {
      add(Event::Kind::kAwait, rank_of(stage + 1), rank_, {true, stage, m});
    }
  }

  void end(const PipelinePass& pass) {
    const int stage = pass.stage, m = pass.micro_batch;
    const bool sends_output = is_remote(stage + 1), has_next = stage + 1 < schedule_.num_stages();
    if (pass.kind == Pass::kForward) {
      Memory* const output = sends_output ? &take(buffers_[stage]) : nullptr;
      compute(2);
      if (sends_output) send({false, stage + 1, m}, stage + 1, *output);
    } else if (pass.kind == Pass::kBackwardWeight) {
      compute(2);
    } else {
      compute(pass.kind == Pass::kBackward ? 4 : 2);
      Memory& gradient = find(has_next ? buffers_[stage] : slots_[stage], m);
      if (is_remote(stage - 1)) send({true, stage - 1, m}, stage - 1, gradient);
      if (stage > 0 && rank_of(stage - 1) == rank_) take(buffers_[stage - 1]).micro_batch = m;
      if (has_next) gradient.micro_batch = -1;
    }
    if (frees_activations(pass)) find(slots_[stage], m).micro_batch = -1;
  }

  const PipelineSchedule& schedule_;
  int rank_;
  std::map<int, std::vector<Memory>> slots_, buffers_;  // by stage
};

/// Runs all ranks as far as they get. Returns the time at which the last one ends, or -1 if one waits for ever.
int run_time(const PipelineSchedule& schedule, bool ample = false, bool in_turns = false) {
  std::vector<std::vector<Event>> programs;
  for (int rank = 0; rank < schedule.num_ranks; ++rank)
    programs.push_back(Program(schedule, rank, ample, in_turns).events);
  std::map<std::pair<int, int>, std::vector<int>> sent, posted;  // when
  std::vector<std::size_t> at(programs.size(), 0);
  std::vector<int> now(programs.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      for (; at[rank] < programs[rank].size(); ++at[rank], moved = true) {
        const Event& event = programs[rank][at[rank]];
        std::vector<int>&sends = sent[event.ranks], &posts = posted[event.ranks];
        now[rank] += event.time;
        if (event.kind == Event::Kind::kCompute) continue;
        if (event.kind == Event::Kind::kAwait) {
          if (event.number >= std::min(sends.size(), posts.size())) break;
          now[rank] = std::max({now[rank], sends[event.number], posts[event.number]});
          continue;
        }
        std::vector<int>& times = event.kind == Event::Kind::kSend ? sends : posts;
        EXPECT_EQ(event.number, times.size()) << "not in order";
        times.push_back(now[rank]);
      }
    }
  }
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    if (at[rank] < programs[rank].size()) return -1;
  }
  return *std::max_element(now.begin(), now.end());
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
            const PipelineSchedule schedule = make_pipeline_schedule(kind, ranks, stages, micro_batches, max_deferred);
            const int time = run_time(schedule);
            ASSERT_GE(time, 0);
            EXPECT_EQ(time, run_time(schedule, true));
            EXPECT_GE(run_time(schedule, false, true), 0);
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
