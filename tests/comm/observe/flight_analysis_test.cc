// Tests which rank find_culprit() blames, with made-up states of ranks. Unless a test says otherwise, four ranks are in
// the group "world".
#include "comm/observe/flight_analysis.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kWorld = 1;

/// Returns a rank that computes. It has started `sequence` collective operations of the world.
RankState computing(int rank, std::uint64_t sequence) {
  RankState state{.world_rank = rank,
                  .world_size = 4,
                  .attempt = 1,
                  .pid = 100 + rank,
                  .process = ProcessState::kLives,
                  .read_ns = 20'000'000'000,
                  .step = 17,
                  .section = Section::kStep,
                  .operation = "computation after x",
                  .operation_since_ns = 8'000'000'000,
                  .end = {},
                  .groups = {{.id = kWorld, .axis = "world", .rank = rank, .size = 4, .sequence = sequence}},
                  .events = {}};
  return state;
}

/// Returns a rank that waits in the world's all-gather with the number `sequence`. `missing` is the rank whose message
/// has not arrived, or -1.
RankState waiting(int rank, std::uint64_t sequence, int missing = -1) {
  RankState state = computing(rank, sequence);
  state.operation = "all-gather of x (world)";
  state.wait_begin_ns = 9'000'000'000;
  state.awaited_event = 5;
  state.events = {{.number = 5, .kind = FlightKind::kAllGather, .sequence = sequence, .peer = missing, .begin_ns = 1}};
  return state;
}

/// Returns a rank that waits for a message from rank `from`.
RankState receiving(int rank, std::uint64_t sequence, int from) {
  RankState state = waiting(rank, sequence, from);
  state.events.front().kind = FlightKind::kReceive;
  state.events.front().sequence = 0;
  return state;
}

RankState with_process(RankState state, ProcessState process) {
  state.process = process;
  return state;
}

RankState ended(RankState state, int status, const std::string& message) {
  state.section = Section::kEnded;
  state.process = ProcessState::kEnded;
  state.end = {.exit_status = status, .message = message};
  return state;
}

Culprit culprit_of(const std::vector<RankState>& states, int world_size = 4) {
  return find_culprit(states, world_size);
}

TEST(FlightAnalysis, TheRankThatHasNotBegunIsBlamed) {
  const Culprit found = culprit_of({waiting(0, 118), waiting(1, 118), computing(2, 117), waiting(3, 118)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_EQ(
      found.reason,
      "rank 2 waits for nobody: it is in computation after x for 12.0 s, in step 17; ranks 0, 1, 3 wait for it in "
      "all-gather 118 of world");
}

/// Rank 0 waits for rank 1, which waits for rank 2, which waits for rank 3.
TEST(FlightAnalysis, WaitsAreFollowed) {
  const Culprit found = culprit_of({receiving(0, 8, 1), receiving(1, 8, 2), receiving(2, 8, 3), computing(3, 8)});
  EXPECT_THAT(found.ranks, ElementsAre(3));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_THAT(found.reason, HasSubstr("rank 2 waits for it in receive of world"));
}

TEST(FlightAnalysis, RanksThatCannotBeOfTheWorldAreNotBlamed) {
  EXPECT_THAT(culprit_of({receiving(0, 8, 17), waiting(1, 8), waiting(2, 8), waiting(3, 8)}).ranks,
              ::testing::Not(::testing::Contains(17)));
  EXPECT_THAT(
      culprit_of({waiting(0, 8), waiting(1, 8), computing(2, 7), waiting(3, 8), ended(computing(9, 1), 1, "x")}).ranks,
      ElementsAre(2));
}

TEST(FlightAnalysis, TwoThatComputeAreLikely) {
  const Culprit found = culprit_of({waiting(0, 3), computing(1, 2), computing(2, 2), waiting(3, 3)});
  EXPECT_THAT(found.ranks, ElementsAre(1, 2));
  EXPECT_EQ(found.sure, Certainty::kLikely);
  EXPECT_THAT(found.reason, HasSubstr("likewise rank 2"));
}

TEST(FlightAnalysis, ARankThatIsStoppedIsBlamedWhereverItIs) {
  const Culprit found =
      culprit_of({waiting(0, 9), with_process(waiting(1, 8), ProcessState::kStopped), waiting(2, 9), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(1));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_THAT(found.reason, HasSubstr("rank 1 is stopped in step 17, in all-gather of x (world)"));
}

/// The launcher continued the stopped rank in order to end it. The rank then reached the operation that the others had
/// given up.
TEST(FlightAnalysis, ARankThatWasContinuedToBeEnded) {
  std::vector<RankState> states = {ended(waiting(0, 9, 1), 70, "late"), ended(waiting(1, 9, 0), 70, "rank 0 has died"),
                                   ended(waiting(2, 9, 1), 70, "late"),
                                   with_process(waiting(3, 9, 1), ProcessState::kEnded)};
  states[1].stopped_from_ns = 5'000'000'000;
  states[1].stopped_until_ns = 8'500'000'000;
  const Culprit found = culprit_of(states);
  EXPECT_THAT(found.ranks, ElementsAre(1));
  EXPECT_EQ(found.sure, Certainty::kLikely);
  EXPECT_THAT(found.reason, HasSubstr("rank 1 was stopped for 3.5 s"));
  // A stop that was long ago is not to blame.
  std::vector<RankState> later = states;
  later[1].operation_since_ns = later[1].stopped_until_ns + 10'000'000'000;
  EXPECT_THAT(culprit_of(later).reason, ::testing::Not(HasSubstr("was stopped")));
  // If the whole run was suspended, all ranks were stopped, and none is blamed for it.
  for (RankState& state : states) {
    state.stopped_from_ns = 5'000'000'000;
    state.stopped_until_ns = 8'500'000'000;
  }
  EXPECT_THAT(culprit_of(states).reason, ::testing::Not(HasSubstr("was stopped")));
}

TEST(FlightAnalysis, ADeadRankIsBlamed) {
  const Culprit found = culprit_of({ended(waiting(0, 9), 70, "cannot end: rank 2 has died"),
                                    ended(computing(1, 8), 70, "the run cannot end: rank 2 has died"),
                                    with_process(computing(2, 8), ProcessState::kEnded), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_THAT(found.reason, HasSubstr("rank 2 has died"));
}

/// The launcher has killed rank 1, too. Rank 1 waited for rank 0, and rank 0 waited for rank 2.
TEST(FlightAnalysis, RanksThatWereKilledWhileTheyWaitedAreInnocent) {
  const Culprit found = culprit_of(
      {ended(receiving(0, 8, 2), 70, "late"), with_process(receiving(1, 8, 0), ProcessState::kEnded),
       with_process(computing(2, 8), ProcessState::kEnded), with_process(receiving(3, 8, 1), ProcessState::kEnded)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kLikely);
}

/// A rank may be killed while it waits itself. The other ranks are then one operation ahead of it.
TEST(FlightAnalysis, ARankThatWasKilledWhileItWaited) {
  const Culprit found =
      culprit_of({waiting(0, 9), waiting(1, 9), with_process(waiting(2, 8), ProcessState::kEnded), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kCertain);
}

/// Two ranks were killed in the operation that all had started. Only rank 2 had not sent its part.
TEST(FlightAnalysis, ARankThatWasKilledBetweenTwoMessages) {
  const Culprit found =
      culprit_of({ended(waiting(0, 9, 2), 70, "late"), with_process(waiting(1, 9, 2), ProcessState::kEnded),
                  with_process(waiting(2, 9), ProcessState::kEnded), waiting(3, 9, 2)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kLikely);
}

TEST(FlightAnalysis, ANodeThatIsGoneLeavesNoFiles) {
  const Culprit found = culprit_of({waiting(0, 9), waiting(1, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(2, 3));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_EQ(found.reason, "rank 2 left no file; ranks 0, 1 wait for it in all-gather 9 of world; likewise rank 3");
}

TEST(FlightAnalysis, AnErrorOfItsOwnIsBlamedOnItsRank) {
  const Culprit found = culprit_of({ended(waiting(0, 9), 70, "late"), waiting(1, 9),
                                    ended(computing(2, 8), 1, "check failed\nmore"), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_EQ(found.reason, "rank 2 ended with exit status 1: check failed");
  // Whoever sends a signal asks all ranks to end.
  const Culprit asked = culprit_of(
      {ended(waiting(0, 9), 70, "late"), waiting(1, 9), ended(computing(2, 8), 143, "signal 15"), waiting(3, 9)});
  EXPECT_THAT(asked.reason, ::testing::Not(HasSubstr("ended with exit status")));
}

/// No rank is to blame for a step that is not finite, or for an error that the ranks have told each other.
TEST(FlightAnalysis, WhatAllRanksSayIsNobodysFault) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 4; ++rank) states.push_back(ended(computing(rank, 8), 71, "step 17: loss nan"));
  const Culprit found = culprit_of(states);
  EXPECT_THAT(found.ranks, IsEmpty());
  EXPECT_EQ(found.sure, Certainty::kCertain);
  EXPECT_EQ(found.reason, "ranks 0, 1, 2, 3 ended with exit status 71: step 17: loss nan");
  // Every rank met the same kind of error by itself, so no rank is blamed. When only three ranks have it, they are
  // blamed.
  for (int rank = 0; rank < 4; ++rank) {
    states[static_cast<std::size_t>(rank)] = ended(computing(rank, 8), 1, fmt::format("no shard {}", rank));
  }
  EXPECT_THAT(culprit_of(states).ranks, IsEmpty());
  states[3] = ended(waiting(3, 9), 70, "late");
  EXPECT_THAT(culprit_of(states).ranks, ElementsAre(0, 1, 2));
}

/// All ranks have started the operation, but no message from rank 3 arrives.
TEST(FlightAnalysis, LostMessagesOfOneRankMakeItLikely) {
  const Culprit found = culprit_of({waiting(0, 9, 3), waiting(1, 9, 3), waiting(2, 9, 3), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(3));
  EXPECT_EQ(found.sure, Certainty::kLikely);
  EXPECT_THAT(found.reason, HasSubstr("messages from rank 3 have not arrived at ranks 0, 1, 2"));
}

TEST(FlightAnalysis, ALostMessageBetweenTwoMayBeEithers) {
  const Culprit found = culprit_of({waiting(0, 9, 3), waiting(1, 9), waiting(2, 9), waiting(3, 9)});
  EXPECT_THAT(found.ranks, ElementsAre(0, 3));
  EXPECT_EQ(found.sure, Certainty::kUnknown);
}

/// A rank with a GPU waits for the GPU. Its file shows only which operations the rank has enqueued.
TEST(FlightAnalysis, OfGpusTheRankThatHasEnqueuedLess) {
  std::vector<RankState> states = {waiting(0, 40), waiting(1, 40), computing(2, 38), waiting(3, 40)};
  for (RankState& state : states) {
    state.awaited_event = 0;
    state.events.clear();
  }
  const Culprit found = culprit_of(states);
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_EQ(found.sure, Certainty::kCertain);
}

TEST(FlightAnalysis, NobodyWaits) {
  const Culprit found = culprit_of({computing(0, 9), computing(1, 9), computing(2, 9), computing(3, 9)});
  EXPECT_THAT(found.ranks, IsEmpty());
  EXPECT_EQ(found.sure, Certainty::kUnknown);
  EXPECT_THAT(culprit_of({}, 0).ranks, IsEmpty());
}

}  // namespace
}  // namespace tessera
