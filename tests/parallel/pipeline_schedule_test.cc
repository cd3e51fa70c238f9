// Compares pipeline schedules with an oracle that knows nothing but the rules, and with the papers' figures.
#include "parallel/pipeline_schedule.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <tuple>

#include "base/error.h"
#include "parallel/pipeline_timing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = PipelineScheduleKind;
using Pass = PipelinePass::Kind;

constexpr Kind kAllKinds[] = {Kind::k1F1B, Kind::kInterleaved1F1B, Kind::kZBV, Kind::kDualPipeV};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Visits schedules of 1 to 8 ranks, with at most two micro-batches more than three per rank. There are tails of all
/// sizes.
void for_each_schedule(const std::function<void(const PipelineSchedule&)>& visit) {
  for (const Kind kind : kAllKinds) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int stages :
           kind == Kind::kInterleaved1F1B ? std::vector{2, 3, 4} : std::vector{kind == Kind::k1F1B ? 1 : 2}) {
        for (int micro_batches = kind == Kind::kDualPipeV ? 2 * ranks : 1; micro_batches <= 3 * ranks + 2;
             ++micro_batches) {
          SCOPED_TRACE(fmt::format("{}: {} ranks, {} stages each, {} micro-batches", name_of(kind), ranks, stages,
                                   micro_batches));
          visit(make_pipeline_schedule(kind, ranks, stages, micro_batches));
        }
      }
    }
  }
}

/// A result to compute, with its stage and micro-batch. 'F' is a forward, 'I' an input gradient, and 'W' weight
/// gradients.
using Result = std::tuple<char, int, int>;

std::string results_of(const PipelinePass& pass) {
  switch (pass.kind) {
    case Pass::kForward:
      return "F";
    case Pass::kBackward:
      return "IW";
    case Pass::kBackwardInput:
      return "I";
    case Pass::kBackwardWeight:
      return "W";
  }
  return "";
}

struct OracleCosts {
  double forward = 1, input = 1, weight = 1, overlapped = 1, communication = 0;
};

/// The schedule as a graph of actions, and the longest paths through it. Fails if the schedule is not valid.
class Oracle {
 public:
  explicit Oracle(const PipelineSchedule& schedule, const OracleCosts& costs = {}) : costs_(costs) {
    num_stages_ = schedule.num_ranks * schedule.stages_per_rank;
    collect(schedule);
    connect(schedule);
    run();
  }

  double start(int rank, int idx) const { return nodes_[first_[rank] + idx].start; }
  double end(int rank, int idx) const { return nodes_[first_[rank] + idx].end(); }
  double makespan() const {
    double last = 0;
    for (const Node& node : nodes_) last = std::max(last, node.end());
    return last;
  }
  double idle(int rank) const {
    double busy = 0;
    for (const Node& node : nodes_) busy += node.rank == rank ? node.duration : 0;
    return makespan() - busy;
  }
  /// Returns the rank's idle time between its first and its last action.
  double idle_between(int rank) const {
    const Node& last = nodes_[first_[rank + 1] - 1];
    return idle(rank) - nodes_[first_[rank]].start - (makespan() - last.end());
  }
  /// Returns the largest number of activations that the rank holds at once. It holds one from the start of F to the end
  /// of W.
  int peak(int rank) const {
    std::vector<std::pair<double, int>> changes;  // releases sort before starts at the same time
    for (const auto& [result, node] : producer_) {
      if (nodes_[node].rank != rank) continue;
      if (std::get<0>(result) == 'F') changes.emplace_back(nodes_[node].start, 1);
      if (std::get<0>(result) == 'W') changes.emplace_back(nodes_[node].end(), -1);
    }
    std::sort(changes.begin(), changes.end());
    int held = 0, most = 0;
    for (const auto& [time, change] : changes) most = std::max(most, held += change);
    return most;
  }

 private:
  struct Node {
    int rank = 0;
    double duration = 0, start = 0;
    std::vector<std::pair<int, double>> next = {};  // and the delay until each may start
    int num_waits = 0;
    double end() const { return start + duration; }
  };

  static int rank_of(const PipelineSchedule& schedule, int stage) {
    const int ranks = schedule.num_ranks;
    const bool folded = schedule.kind == Kind::kZBV || schedule.kind == Kind::kDualPipeV;
    return folded && stage >= ranks ? 2 * ranks - 1 - stage : stage % ranks;
  }

  void collect(const PipelineSchedule& schedule) {
    ASSERT_EQ(std::ssize(schedule.actions), schedule.num_ranks);
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      first_.push_back(static_cast<int>(nodes_.size()));
      for (const PipelineAction& action : schedule.actions[rank]) {
        Node node{.rank = rank};
        for_each_pass(action, [&](const PipelinePass& pass) {
          EXPECT_EQ(rank_of(schedule, pass.stage), rank);
          for (const char result : results_of(pass)) {
            node.duration += result == 'F' ? costs_.forward : result == 'I' ? costs_.input : costs_.weight;
            EXPECT_TRUE(producer_.emplace(Result{result, pass.stage, pass.micro_batch}, nodes_.size()).second)
                << result << " twice: " << describe(pass);
          }
        });
        if (action.overlapped) {
          node.duration *= costs_.overlapped;
          EXPECT_EQ(results_of(action.pass) + results_of(*action.overlapped), "FIW");
          EXPECT_NE(action.pass.stage, action.overlapped->stage);
        }
        nodes_.push_back(node);
      }
    }
    first_.push_back(static_cast<int>(nodes_.size()));
    for (int stage = 0; stage < num_stages_; ++stage) {
      for (int micro_batch = 0; micro_batch < schedule.num_micro_batches; ++micro_batch) {
        for (const char result : {'F', 'I', 'W'}) {
          EXPECT_TRUE(producer_.contains({result, stage, micro_batch})) << result << stage << "," << micro_batch;
        }
      }
    }
    EXPECT_EQ(std::ssize(producer_), 3 * num_stages_ * schedule.num_micro_batches);
  }

  void connect(const PipelineSchedule& schedule) {
    const auto add = [&](int from, int to, double delay) {
      nodes_[from].next.emplace_back(to, delay);
      ++nodes_[to].num_waits;
    };
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      for (int node = first_[rank] + 1; node < first_[rank + 1]; ++node) add(node - 1, node, 0);
    }
    for (const auto& [result, node] : producer_) {
      const auto& [kind, stage, micro_batch] = result;
      const auto needs = [&, node = node, micro_batch = micro_batch](char what, int where) {
        const auto found = producer_.find({what, where, micro_batch});
        ASSERT_NE(found, producer_.end());
        const int from = static_cast<int>(found->second);
        const bool within =
            from == static_cast<int>(node) && what == 'I' && where == std::get<1>(result) && std::get<0>(result) == 'W';
        if (!within)
          add(from, static_cast<int>(node), nodes_[from].rank != nodes_[node].rank ? costs_.communication : 0);
      };
      if (kind == 'F' && stage > 0) needs('F', stage - 1);
      if (kind == 'I') needs('F', stage);
      if (kind == 'I' && stage + 1 < num_stages_) needs('I', stage + 1);
      if (kind == 'W') needs('I', stage);
    }
  }

  void run() {
    std::deque<int> ready;
    for (int node = 0; node < std::ssize(nodes_); ++node) {
      if (nodes_[node].num_waits == 0) ready.push_back(node);
    }
    std::size_t num_done = 0;
    for (; !ready.empty(); ++num_done) {
      const Node& node = nodes_[ready.front()];
      ready.pop_front();
      for (const auto& [next, delay] : node.next) {
        nodes_[next].start = std::max(nodes_[next].start, node.end() + delay);
        if (--nodes_[next].num_waits == 0) ready.push_back(next);
      }
    }
    EXPECT_EQ(num_done, nodes_.size()) << "the rest waits in a circle";
  }

  OracleCosts costs_;
  int num_stages_ = 0;
  std::vector<int> first_;  // first node of each rank, and the number of nodes
  std::vector<Node> nodes_;
  std::map<Result, std::size_t> producer_;
};

TEST(PipelineSchedule, AllAreValid) {
  for_each_schedule([](const PipelineSchedule& schedule) {
    const Oracle oracle(schedule);
    EXPECT_NO_THROW(check(schedule));
    ASSERT_FALSE(::testing::Test::HasFailure());
  });
}

TEST(PipelineSchedule, TimingIsTheOracles) {
  // Sums of these costs are exact in double precision.
  const OracleCosts costs{.forward = 1.25, .input = 1.5, .weight = 0.75, .overlapped = 0.875, .communication = 0.375};
  for_each_schedule([&](const PipelineSchedule& schedule) {
    const Oracle oracle(schedule, costs);
    const PipelineTiming timing = simulate(schedule, {.forward = {costs.forward},
                                                      .backward_input = {costs.input},
                                                      .backward_weight = {costs.weight},
                                                      .overlapped = costs.overlapped,
                                                      .communication = costs.communication});
    EXPECT_EQ(timing.makespan, oracle.makespan());
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      ASSERT_EQ(timing.spans[rank].size(), schedule.actions[rank].size());
      for (int i = 0; i < std::ssize(timing.spans[rank]); ++i) {
        ASSERT_EQ(timing.spans[rank][i].start, oracle.start(rank, i));
        ASSERT_EQ(timing.spans[rank][i].end, oracle.end(rank, i));
      }
      EXPECT_NEAR(timing.bubble_fraction[rank], oracle.idle(rank) / oracle.makespan(), 1e-12);
      EXPECT_EQ(timing.peak_in_flight[rank], oracle.peak(rank));
    }
    ASSERT_FALSE(::testing::Test::HasFailure());
  });
}

/// Expects the idle time and the peak of every rank, at these costs.
void expect_figures(const PipelineSchedule& schedule, const OracleCosts& costs, double idle,
                    const std::function<int(int)>& peak_of_rank) {
  const Oracle oracle(schedule, costs);
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    EXPECT_EQ(oracle.idle(rank), idle) << "rank " << rank;
    EXPECT_EQ(oracle.peak(rank), peak_of_rank(rank)) << "rank " << rank;
  }
}

// The idle time is (P - 1)(F + B). A rank holds the activations of the micro-batches between its stage and the end of
// the pipeline.
TEST(PipelineSchedule, FiguresOf1F1B) {
  for (const OracleCosts& costs : {OracleCosts{}, {.forward = 2, .input = 3, .weight = 1.5}}) {
    for_each_schedule([&](const PipelineSchedule& schedule) {
      if (schedule.kind != Kind::k1F1B) return;
      const int ranks = schedule.num_ranks;
      expect_figures(schedule, costs, (ranks - 1) * (costs.forward + costs.input + costs.weight),
                     [&](int rank) { return std::min(ranks - rank, schedule.num_micro_batches); });
    });
  }
}

// The idle time is (P - 1)(F + B) of one of v stages. That is 1/v of 1F1B's, whatever the tail.
TEST(PipelineSchedule, FiguresOfInterleaved1F1B) {
  for (const OracleCosts& costs : {OracleCosts{}, {.forward = 2, .input = 3, .weight = 1.5}}) {
    for_each_schedule([&](const PipelineSchedule& schedule) {
      const int ranks = schedule.num_ranks, micro_batches = schedule.num_micro_batches, v = schedule.stages_per_rank;
      if (schedule.kind != Kind::kInterleaved1F1B || micro_batches < ranks) return;
      const int groups = micro_batches / ranks, first_group = (micro_batches + groups - 1) / groups;
      expect_figures(schedule, costs, (ranks - 1) * (costs.forward + costs.input + costs.weight), [&](int rank) {
        return std::min(v * micro_batches, (v - 1) * first_group + 2 * (ranks - 1 - rank) + 1);
      });
    });
  }
}

// With F = I = W no rank ever waits between its first action and its last. It holds no more than 1F1B's first rank: P
// whole micro-batches. The idle time P - 1 is the way to the last rank, which no schedule can avoid. Fewer than 2P - 1
// micro-batches do not fill the pipeline.
TEST(PipelineSchedule, FiguresOfZBV) {
  for_each_schedule([&](const PipelineSchedule& schedule) {
    const int ranks = schedule.num_ranks, micro_batches = schedule.num_micro_batches;
    if (schedule.kind != Kind::kZBV) return;
    const Oracle oracle(schedule);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(oracle.peak(rank), 2 * ranks);
      EXPECT_EQ(oracle.idle(rank), std::max(ranks - 1, 4 * ranks - 2 - 2 * micro_batches));
      if (micro_batches < 2 * ranks - 1) continue;
      EXPECT_EQ(oracle.peak(rank), 2 * ranks);
      EXPECT_EQ(oracle.idle_between(rank), 0);
    }
  });
}

// DeepSeek's (PP/2 - 1)(F&B + B - 3W) over PP stages is (P - 1)(F&B + B - 3W) over P ranks. It is exact for F = I = W.
// A rank that overlaps more passes than the others is less idle if overlap saves time. Every rank holds PP + 1
// activations.
TEST(PipelineSchedule, FiguresOfDualPipeV) {
  for (const double overlapped : {1.0, 0.75}) {
    for_each_schedule([&](const PipelineSchedule& schedule) {
      if (schedule.kind != Kind::kDualPipeV) return;
      const int ranks = schedule.num_ranks;
      const Oracle oracle(schedule, {.overlapped = overlapped});
      const double pair = 3 * overlapped, formula = (ranks - 1) * (pair + 2 - 3);
      EXPECT_EQ(oracle.idle(ranks - 1), formula);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_LE(oracle.idle(rank), formula);
        EXPECT_TRUE(oracle.idle(rank) == formula || overlapped < 1.0);
        EXPECT_EQ(oracle.peak(rank), 2 * ranks + 1);
      }
    });
  }
}

TEST(PipelineSchedule, DualPipeVOverlapsInItsSteadyStateAndSplitsAroundIt) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::kDualPipeV, 4, 2, 20);
  std::vector<std::ptrdiff_t> num_overlapped, num_split;
  for (const auto& actions : schedule.actions) {
    num_overlapped.push_back(std::count_if(actions.begin(), actions.end(),
                                           [](const PipelineAction& action) { return action.overlapped.has_value(); }));
    num_split.push_back(std::count_if(actions.begin(), actions.end(), [](const PipelineAction& action) {
      return action.pass.kind == Pass::kBackwardWeight;
    }));
  }
  // Phase 4 has two overlapped actions in each of its M - 2P + r + 1 rounds, and the last rank has one fewer. Phase 5
  // has P - 1 - r of them.
  EXPECT_THAT(num_overlapped, ElementsAre(2 * 13 + 3, 2 * 14 + 2, 2 * 15 + 1, 2 * 16 - 1));
  // Phases 3 and 7 have P - 1 - r weight gradients each, and phase 6 has r + 1.
  EXPECT_THAT(num_split, ElementsAre(3 + 3 + 1, 2 + 2 + 2, 1 + 1 + 3, 4));
}

TEST(PipelineSchedule, AForwardMayOverlapTheBackwardBefore) {
  const PipelineSchedule one = make_overlapped_schedule(1), three = make_overlapped_schedule(3);
  const auto pass = [](Pass kind, int micro_batch) { return PipelinePass{kind, 0, micro_batch}; };
  EXPECT_THAT(one.actions, ElementsAre(ElementsAre(PipelineAction{pass(Pass::kForward, 0)},
                                                   PipelineAction{pass(Pass::kBackward, 0)})));
  EXPECT_THAT(three.actions, ElementsAre(ElementsAre(PipelineAction{pass(Pass::kForward, 0)},
                                                     PipelineAction{pass(Pass::kForward, 1), pass(Pass::kBackward, 0)},
                                                     PipelineAction{pass(Pass::kForward, 2), pass(Pass::kBackward, 1)},
                                                     PipelineAction{pass(Pass::kBackward, 2)})));
  check(one, 1);
  check(three, 2);
  EXPECT_THAT(most_held(three), ElementsAre(2));
  EXPECT_FALSE(pairs_passes(one, 0));
  EXPECT_TRUE(pairs_passes(three, 0));
}

// A limit of deferred weight gradients makes the bubble larger, but keeps most of the gain over 1F1B.
TEST(PipelineSchedule, ALimitOfDeferredWeightGradientsHolds) {
  for (const PipelineScheduleKind kind : {PipelineScheduleKind::kZBV, PipelineScheduleKind::kDualPipeV}) {
    for (const int num_ranks : {2, 4, 8, 16}) {
      const int num_micro_batches = 4 * num_ranks;
      const PipelineCosts twice{.forward = {2.0}, .backward_input = {2.0}, .backward_weight = {2.0}};
      const double plain =
          simulate(make_pipeline_schedule(PipelineScheduleKind::k1F1B, num_ranks, 1, num_micro_batches), twice)
              .makespan;
      double before = simulate(make_pipeline_schedule(kind, num_ranks, 2, num_micro_batches)).makespan;
      for (const int limit : {64, 4, 2, 1}) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, limit {}", name_of(kind), num_ranks, limit));
        const PipelineSchedule schedule = make_pipeline_schedule(kind, num_ranks, 2, num_micro_batches, limit);
        check(schedule);
        for (int rank = 0; rank < num_ranks; ++rank) EXPECT_LE(most_deferred(schedule, rank), limit);
        const double makespan = simulate(schedule).makespan;
        EXPECT_GE(makespan, before);
        EXPECT_LT(makespan, plain);
        before = makespan;
      }
    }
  }
  EXPECT_GT(most_deferred(make_pipeline_schedule(PipelineScheduleKind::kZBV, 4, 2, 16), 3), 2);
}

TEST(PipelineSchedule, ActivationsAreHeldUntilTheWeightGradientsAreDone) {
  PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 1, 1, 2);
  EXPECT_THAT(simulate(schedule).peak_in_flight, ElementsAre(1));
  schedule.actions[0] = {{{Pass::kForward, 0, 0}},       {{Pass::kBackwardInput, 0, 0}},
                         {{Pass::kForward, 0, 1}},       {{Pass::kBackwardWeight, 0, 0}},
                         {{Pass::kBackwardInput, 0, 1}}, {{Pass::kBackwardWeight, 0, 1}}};
  EXPECT_EQ(error_of([&] { check(schedule); }), "no error");
  EXPECT_THAT(simulate(schedule).peak_in_flight, ElementsAre(2));
  EXPECT_THAT(error_of([&] { check(schedule, 1); }), HasSubstr("rank 0 holds 2 activations"));
}

/// A message: whether it is a gradient, the sending stage, and the micro-batch.
using Message = std::tuple<bool, int, int>;

/// Returns the messages from one rank to another, in the order in which the sender sends or the receiver reads them.
std::vector<Message> messages(const PipelineSchedule& schedule, int from, int to, bool sent) {
  std::vector<Message> found;
  for (const PipelineAction& action : schedule.actions[sent ? from : to]) {
    for_each_pass(action, [&](const PipelinePass& pass) {
      if (pass.kind == Pass::kBackwardWeight) return;
      const bool gradient = pass.kind != Pass::kForward;
      const int away = gradient == sent ? -1 : 1, other = pass.stage + away;
      if (other < 0 || other >= schedule.num_stages() || schedule.rank_of_stage[other] != (sent ? to : from)) return;
      found.emplace_back(gradient, sent ? pass.stage : other, pass.micro_batch);
    });
  }
  return found;
}

// A transport without tags, such as NCCL, depends on this order.
TEST(PipelineSchedule, MessagesOfOneKindArriveInTheirOrder) {
  bool all_in_order = true;
  for_each_schedule([&](const PipelineSchedule& schedule) {
    for (int from = 0; from < schedule.num_ranks; ++from) {
      for (int to = 0; to < schedule.num_ranks; ++to) {
        if (from == to) continue;
        std::vector<Message> sent = messages(schedule, from, to, true), read = messages(schedule, from, to, false);
        EXPECT_TRUE(sent == read || schedule.kind != Kind::k1F1B);
        all_in_order = all_in_order && sent == read;
        const auto is_activation = [](const Message& message) { return !std::get<0>(message); };
        std::stable_partition(sent.begin(), sent.end(), is_activation);
        std::stable_partition(read.begin(), read.end(), is_activation);
        EXPECT_EQ(sent, read);
      }
    }
  });
  EXPECT_FALSE(all_in_order);
}

TEST(PipelineSchedule, StagesMayCostDifferently) {
  // There are two ranks and one micro-batch, so every pass waits for the one before it.
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 2, 1, 1);
  const PipelineTiming timing = simulate(
      schedule,
      {.forward = {1, 10}, .backward_input = {100, 1000}, .backward_weight = {1e4, 1e5}, .communication = 0.5});
  EXPECT_EQ(timing.makespan, 111'111 + 2 * 0.5);
  EXPECT_EQ(timing.spans[1][0].start, 1.5);
  EXPECT_EQ(timing.spans[1][1].end, 101'011.5);
}

TEST(PipelineSchedule, CostsThatCannotBe) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 2, 1, 1);
  const auto error = [&](const PipelineCosts& costs) { return error_of([&] { simulate(schedule, costs); }); };
  EXPECT_THAT(error({.forward = {1, 2, 3}}), HasSubstr("forward: 3 costs, expected 1 or 2"));
  EXPECT_THAT(error({.forward = {}}), HasSubstr("forward: 0 costs"));
  EXPECT_THAT(error({.backward_input = {0}}), HasSubstr("backward-input: the cost is 0"));
  EXPECT_THAT(error({.backward_weight = {std::nan("")}}), HasSubstr("backward-weight: the cost is nan"));
  EXPECT_THAT(error({.overlapped = -1}), HasSubstr("overlapped: the cost is -1"));
  EXPECT_THAT(error({.communication = -1}), HasSubstr("communication: the cost is -1"));
}

TEST(PipelineSchedule, Names) {
  for (const Kind kind : kAllKinds) EXPECT_EQ(pipeline_schedule_kind(name_of(kind)), kind);
  EXPECT_EQ(pipeline_schedule_kind("interleaved1f1b"), Kind::kInterleaved1F1B);
  EXPECT_EQ(pipeline_schedule_kind("DUALPIPEV"), Kind::kDualPipeV);
  EXPECT_EQ(pipeline_schedule_kind("zbv"), Kind::kZBV);
  EXPECT_EQ(name_of(Kind::kZBV), "ZBVZeroBubble");
  for (const char* unknown : {"GPipe", "", "1F1", "1F1B "}) {
    EXPECT_THAT(
        error_of([&] { pipeline_schedule_kind(unknown); }),
        AllOf(HasSubstr(fmt::format("'{}'", unknown)), HasSubstr("1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV")));
  }
}

TEST(PipelineSchedule, ImpossibleNumbers) {
  const auto error = [](Kind kind, int ranks, int stages, int micro_batches) {
    return error_of([&] { make_pipeline_schedule(kind, ranks, stages, micro_batches); });
  };
  for (const Kind kind : kAllKinds) {
    const int stages = min_stages_per_rank(kind);
    EXPECT_THAT(error(kind, 0, stages, 8), AllOf(HasSubstr(name_of(kind)), HasSubstr("ranks is 0, expected 1")));
    EXPECT_THAT(error(kind, 4, stages, 0), HasSubstr("micro-batches is 0, expected 1"));
    EXPECT_THAT(error(kind, 4, stages, -8), HasSubstr("micro-batches is -8"));
    EXPECT_THAT(error(kind, 4, 0, 8), HasSubstr("stages per rank is 0"));
    EXPECT_THAT(error(kind, 1, stages, 2'000'000'000), HasSubstr("too many"));
  }
  EXPECT_THAT(error(Kind::k1F1B, 2'000'000'000, 1, 1), HasSubstr("too many"));
  EXPECT_THAT(error(Kind::kZBV, 2'000'000'000, 2, 1), HasSubstr("too many"));
  EXPECT_THAT(error(Kind::kZBV, 100'000, 2, 1), HasSubstr("too many"));
  EXPECT_THAT(error(Kind::kInterleaved1F1B, 2'000'000'000, 2'000'000'000, 1), HasSubstr("too many"));
  EXPECT_THAT(error(Kind::k1F1B, 4, 2, 8), AllOf(HasSubstr("is 2, expected 1"), HasSubstr("Interleaved1F1B")));
  EXPECT_THAT(error(Kind::kInterleaved1F1B, 4, 1, 8), HasSubstr("is 1, expected 2 or more; 1F1B has 1"));
  EXPECT_THAT(error(Kind::kZBV, 4, 3, 8), HasSubstr("is 3, expected 2"));
  EXPECT_THAT(error(Kind::kDualPipeV, 4, 2, 7), HasSubstr("is 7, expected 8 or more"));
}

// Everything must take linear time in the number of actions, even with the longest chains.
TEST(PipelineSchedule, ManyRanksOrMicroBatchesTakeNoTime) {
  EXPECT_EQ(simulate(make_pipeline_schedule(Kind::k1F1B, 100'000, 1, 1)).makespan, 300'000);
  EXPECT_EQ(simulate(make_pipeline_schedule(Kind::kZBV, 4, 2, 100'000)).makespan, 600'003);
}

// ---- Planted errors

std::string check_error(const PipelineSchedule& schedule, std::optional<int> max_in_flight = {}) {
  return error_of([&] { check(schedule, max_in_flight); });
}

TEST(PipelineScheduleCheck, NamesTheBlockedActionOfEveryRank) {
  PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 3, 1, 2);
  // Rank 0 waits for a gradient before it sends the second forward. Rank 1 waits for that forward before it sends a
  // gradient.
  std::swap(schedule.actions[0][1], schedule.actions[0][2]);
  const std::string message = check_error(schedule);
  EXPECT_THAT(message, HasSubstr("rank 0 at its action 1, backward of micro-batch 0 in stage 0, for the backward of "
                                 "micro-batch 0 in stage 1"));
  EXPECT_THAT(message, HasSubstr("rank 1 at its action 1, forward of micro-batch 1 in stage 1, for the forward of "
                                 "micro-batch 1 in stage 0"));
  EXPECT_THAT(message, HasSubstr("rank 2 at its action 2, forward of micro-batch 1 in stage 2, for the forward of "
                                 "micro-batch 1 in stage 1"));
  EXPECT_EQ(error_of([&] { simulate(schedule); }), message);
}

TEST(PipelineScheduleCheck, AnOverlappedPairWaitsForBothInputs) {
  PipelineSchedule schedule = make_pipeline_schedule(Kind::kDualPipeV, 1, 2, 2);
  schedule.actions[0] = {{{Pass::kForward, 0, 0}},  {{Pass::kForward, 0, 1}, PipelinePass{Pass::kBackward, 1, 0}},
                         {{Pass::kForward, 1, 0}},  {{Pass::kForward, 1, 1}, PipelinePass{Pass::kBackward, 0, 0}},
                         {{Pass::kBackward, 1, 1}}, {{Pass::kBackward, 0, 1}}};
  EXPECT_THAT(check_error(schedule), HasSubstr("rank 0 at its action 1, backward of micro-batch 0 in stage 1, for the "
                                               "forward of micro-batch 0 in stage 1"));
  std::swap(schedule.actions[0][1], schedule.actions[0][2]);
  EXPECT_EQ(check_error(schedule), "no error");
  std::swap(schedule.actions[0][2].pass, *schedule.actions[0][2].overlapped);
  EXPECT_THAT(check_error(schedule),
              HasSubstr("rank 0 overlaps the backward of micro-batch 0 in stage 1 with the "
                        "forward of micro-batch 1 in stage 0, expected a forward with a backward"));
}

/// Returns the error in ZB-V on two ranks, after a change of one rank's actions.
template <typename Change>
std::string error_after(int rank, Change&& change) {
  PipelineSchedule schedule = make_pipeline_schedule(Kind::kZBV, 2, 2, 3);
  change(schedule.actions[rank]);
  return check_error(schedule);
}

std::vector<PipelineAction>::iterator find(std::vector<PipelineAction>& actions, const PipelinePass& pass) {
  const auto found = std::find(actions.begin(), actions.end(), PipelineAction{pass});
  EXPECT_NE(found, actions.end()) << describe(pass);
  return found;
}

TEST(PipelineScheduleCheck, NamesWhatIsMissing) {
  EXPECT_EQ(error_after(0, [](auto&) {}), "no error");
  EXPECT_THAT(error_after(0,
                          [](auto& actions) {
                            actions.erase(find(actions, {Pass::kForward, 3, 2}));
                          }),
              HasSubstr("rank 0 lacks the forward of micro-batch 2 in stage 3"));
  EXPECT_THAT(error_after(1,
                          [](auto& actions) {
                            actions.erase(find(actions, {Pass::kBackwardInput, 1, 2}));
                            actions.erase(find(actions, {Pass::kBackwardWeight, 1, 2}));
                          }),
              HasSubstr("rank 1 lacks the backward of micro-batch 2 in stage 1"));
  EXPECT_THAT(error_after(1,
                          [](auto& actions) {
                            actions.erase(find(actions, {Pass::kBackwardWeight, 2, 0}));
                          }),
              HasSubstr("rank 1 lacks the weight gradients of micro-batch 0 in stage 2"));
}

TEST(PipelineScheduleCheck, NamesWhatIsThereTwice) {
  EXPECT_THAT(error_after(0, [](auto& actions) { actions.push_back(actions.front()); }),
              HasSubstr("rank 0 has the forward of micro-batch 0 in stage 0 although it is done"));
  EXPECT_THAT(error_after(0,
                          [](auto& actions) {
                            actions.push_back({{Pass::kBackward, 3, 1}});
                          }),
              HasSubstr("rank 0 has the backward of micro-batch 1 in stage 3 although it is done"));
}

TEST(PipelineScheduleCheck, NamesHalvesInTheWrongOrder) {
  EXPECT_THAT(
      error_after(
          0,
          [](auto& actions) {
            std::iter_swap(find(actions, {Pass::kBackwardInput, 3, 0}), find(actions, {Pass::kBackwardWeight, 3, 0}));
          }),
      HasSubstr("rank 0 has the weight gradients of micro-batch 0 in stage 3 before its input gradient"));
}

TEST(PipelineScheduleCheck, NamesTheWrongRank) {
  EXPECT_THAT(error_after(1, [](auto& actions) { actions.front().pass.stage = 3; }),
              HasSubstr("rank 1 has the forward of micro-batch 0 in stage 3, which belongs on rank 0"));
  EXPECT_THAT(error_after(1, [](auto& actions) { actions.front().pass.stage = 4; }),
              AllOf(HasSubstr("rank 1 has the forward of micro-batch 0 in stage 4"), HasSubstr("stages 0 to 3")));
  EXPECT_THAT(error_after(1, [](auto& actions) { actions.front().pass.micro_batch = -1; }),
              AllOf(HasSubstr("micro-batch -1"), HasSubstr("micro-batches 0 to 2")));
  PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 2, 1, 1);
  schedule.rank_of_stage = {1, 1};
  EXPECT_THAT(check_error(schedule), HasSubstr("rank 0 has 0 stages, expected 1"));
  schedule.rank_of_stage = {0, 2};
  EXPECT_THAT(check_error(schedule), HasSubstr("stage 1 is on rank 2, expected 0 to 1"));
  schedule.num_ranks = 3;
  EXPECT_THAT(check_error(schedule), HasSubstr("actions of 2 ranks, expected 3"));
}

TEST(PipelineScheduleCheck, RefusesMoreActivationsThanTheLimit) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 4, 1, 8);
  EXPECT_EQ(check_error(schedule, 4), "no error");
  EXPECT_THAT(check_error(schedule, 3), HasSubstr("rank 0 holds 4 activations at once, expected 3 or fewer"));
  EXPECT_EQ(check_error(make_pipeline_schedule(Kind::kDualPipeV, 4, 2, 8), 9), "no error");
  EXPECT_THAT(check_error(make_pipeline_schedule(Kind::kDualPipeV, 4, 2, 8), 8), HasSubstr("holds 9 activations"));
}

}  // namespace
}  // namespace tessera
