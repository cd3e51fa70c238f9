#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "base/error.h"

namespace tessera {
namespace {

using Kind = PipelineScheduleKind;
using Pass = PipelinePass::Kind;

constexpr std::array kNames = {
    std::pair{Kind::k1F1B, "1F1B"},
    std::pair{Kind::kInterleaved1F1B, "Interleaved1F1B"},
    std::pair{Kind::kZBV, "ZBVZeroBubble"},
    std::pair{Kind::kDualPipeV, "DualPipeV"},
};
constexpr std::string_view kShortZbv = "ZBV";

/// The most forwards of a schedule. Its actions and all that is computed from them are in memory.
constexpr std::int64_t kMaxForwards = std::int64_t{1} << 20;

bool equal_but_for_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

/// Returns the stage of a rank's chunk `chunk`, from 0. Stages are placed in a V, or round and round.
int stage_of(Kind kind, int num_ranks, int rank, int chunk) {
  const bool way_back = (kind == Kind::kZBV || kind == Kind::kDualPipeV) && chunk == 1;
  return way_back ? 2 * num_ranks - 1 - rank : chunk * num_ranks + rank;
}

/// Collects the actions of a rank. Each chunk takes the micro-batches in their order, so a schedule only says which
/// chunk does what next.
class RankActions {
 public:
  RankActions(const PipelineSchedule& schedule, int rank) : max_deferred_(schedule.max_deferred) {
    for (int chunk = 0; chunk < schedule.stages_per_rank; ++chunk) {
      chunks_.push_back({.stage = stage_of(schedule.kind, schedule.num_ranks, rank, chunk)});
    }
  }

  void forward(int chunk) { actions_.push_back({next_forward(chunk)}); }
  void backward(int chunk) {
    make_room();
    actions_.push_back({next_backward(Pass::kBackward, chunk)});
  }
  /// Adds an input gradient, and before it weight gradients if too many wait.
  void backward_input(int chunk) {
    make_room();
    actions_.push_back({next_backward(Pass::kBackwardInput, chunk)});
    PipelinePass weight = actions_.back().pass;
    weight.kind = Pass::kBackwardWeight;
    waiting_.push_back(weight);
  }
  /// Adds the weight gradients that have waited longest. With a limit (max_deferred) there may be none left. It
  /// then adds nothing.
  void backward_weight() {
    if (!waiting_.empty() || max_deferred_ == kNoLimit) take_weight(waiting_.begin());
  }
  void backward_weight(int chunk) {
    const auto found = find_weight(chunk);
    if (found != waiting_.end() || max_deferred_ == kNoLimit) take_weight(found);
  }
  void all_backward_weights(int chunk) {
    while (find_weight(chunk) != waiting_.end()) backward_weight(chunk);
  }
  void overlapped(int forward_chunk, int backward_chunk) {
    make_room();
    const PipelinePass pass = next_forward(forward_chunk);
    actions_.push_back({pass, next_backward(Pass::kBackward, backward_chunk)});
  }

  int num_forwards(int chunk) const { return chunks_[chunk].num_forwards; }
  bool weights_wait() const { return !waiting_.empty(); }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  struct Chunk {
    int stage = 0, num_forwards = 0, num_backwards = 0;
  };
  using Waiting = std::vector<PipelinePass>;

  /// Adds weight gradients until those of one more backward may wait.
  void make_room() {
    while (std::ssize(waiting_) >= max_deferred_) backward_weight();
  }

  PipelinePass next_forward(int chunk) { return {Pass::kForward, chunks_[chunk].stage, chunks_[chunk].num_forwards++}; }
  PipelinePass next_backward(Pass kind, int chunk) {
    return {kind, chunks_[chunk].stage, chunks_[chunk].num_backwards++};
  }
  Waiting::iterator find_weight(int chunk) {
    return std::find_if(waiting_.begin(), waiting_.end(),
                        [&](const PipelinePass& pass) { return pass.stage == chunks_[chunk].stage; });
  }
  void take_weight(Waiting::iterator weight) {
    TESSERA_CHECK(weight != waiting_.end());
    actions_.push_back({*weight});
    waiting_.erase(weight);
  }

  int max_deferred_;
  std::vector<Chunk> chunks_;
  Waiting waiting_;  // weight gradients of split backwards, oldest first
  std::vector<PipelineAction> actions_;
};

/// Returns a 1F1B schedule for any number of chunks: forwards fill the pipeline, then forwards and backwards alternate,
/// then the remaining backwards run. Forward k is of chunk order[k]; the backwards use the mirrored order.
std::vector<PipelineAction> one_forward_one_backward(RankActions rank, const std::vector<int>& order, int num_chunks,
                                                     std::int64_t num_warmup) {
  const std::int64_t num_steps = std::ssize(order);
  for (std::int64_t k = 0; k < std::min(num_warmup, num_steps); ++k) rank.forward(order[k]);
  for (std::int64_t k = 0; k < num_steps; ++k) {
    if (num_warmup + k < num_steps) rank.forward(order[num_warmup + k]);
    rank.backward(num_chunks - 1 - order[k]);
  }
  return rank.take();
}

void make_1f1b(PipelineSchedule& schedule) {
  const std::vector<int> order(schedule.num_micro_batches, 0);
  for (int r = 0; r < schedule.num_ranks; ++r) {
    schedule.actions.push_back(one_forward_one_backward({schedule, r}, order, 1, schedule.num_ranks - 1 - r));
  }
}

/// Cuts the micro-batches into groups. If one of several groups had fewer than P micro-batches, a rank would wait for
/// the first of them to come round the loop. If a later group were larger than the first, the warm-up would be too
/// short.
void make_interleaved(PipelineSchedule& schedule) {
  const int num_chunks = schedule.stages_per_rank, num_micro_batches = schedule.num_micro_batches;
  const int num_groups = std::max(1, num_micro_batches / schedule.num_ranks);
  const int small_group = num_micro_batches / num_groups, num_larger = num_micro_batches % num_groups;
  std::vector<int> order;
  for (int group = 0; group < num_groups; ++group) {
    const int size = small_group + (group < num_larger ? 1 : 0);
    for (int chunk = 0; chunk < num_chunks; ++chunk) order.insert(order.end(), size, chunk);
  }
  const std::int64_t first_group = small_group + (num_larger > 0 ? 1 : 0);
  for (int r = 0; r < schedule.num_ranks; ++r) {
    const std::int64_t num_warmup = (num_chunks - 1) * first_group + 2 * (schedule.num_ranks - 1 - r);
    schedule.actions.push_back(one_forward_one_backward({schedule, r}, order, num_chunks, num_warmup));
  }
}

/// Returns a rank's actions in ZB-V, for at least 2P - 1 micro-batches.
std::vector<PipelineAction> zbv_actions(RankActions rank, int r, int num_ranks, int num_micro_batches) {
  const int ranks_below = num_ranks - r;  // how many ranks the way down the V has from here, this one included
  // Warm-up. Chunk 0 runs until the first micro-batch has been to the bottom of the V and is back. Then both chunks run
  // until its gradient, which turns round on rank 0, is back, too. Then chunk 1 runs forwards and backwards.
  for (int i = 0; i < 2 * ranks_below - 1; ++i) rank.forward(0);
  for (int i = 0; i < r; ++i) {
    rank.forward(1);
    rank.forward(0);
  }
  for (int i = 0; i < ranks_below; ++i) {
    rank.forward(1);
    rank.backward_input(1);
    rank.backward_weight(1);
  }
  // Steady state: on both chunks, one micro-batch goes in for each that comes out. On chunk 0 it comes out first. So
  // the chunk holds one micro-batch less than in the papers' order, and the schedule takes as long.
  while (rank.num_forwards(1) < num_micro_batches) {
    rank.backward_input(0);
    rank.backward_weight(0);
    if (rank.num_forwards(0) < num_micro_batches) rank.forward(0);
    rank.forward(1);
    rank.backward_input(1);
    rank.backward_weight(1);
  }
  // The end. Weight gradients wait, so that input gradients reach rank 0 early; they fill time that would be idle.
  for (int i = 0; i < r; ++i) {
    rank.backward_input(0);
    rank.backward_input(1);
  }
  for (int i = 0; i < ranks_below; ++i) {
    rank.backward_input(0);
    rank.backward_weight(0);
  }
  rank.all_backward_weights(1);
  rank.all_backward_weights(0);
  return rank.take();
}

int num_planned_by_zbv(std::int64_t num_ranks, std::int64_t num_micro_batches) {
  return static_cast<int>(std::max(num_micro_batches, 2 * num_ranks - 1));
}

/// With fewer than 2P - 1 micro-batches, it takes the schedule for 2P - 1 and removes the ones that do not exist. The
/// remaining actions still depend only on actions before them.
void make_zbv(PipelineSchedule& schedule) {
  const int num_planned = num_planned_by_zbv(schedule.num_ranks, schedule.num_micro_batches);
  for (int r = 0; r < schedule.num_ranks; ++r) {
    std::vector<PipelineAction> actions = zbv_actions({schedule, r}, r, schedule.num_ranks, num_planned);
    std::erase_if(actions,
                  [&](const PipelineAction& action) { return action.pass.micro_batch >= schedule.num_micro_batches; });
    schedule.actions.push_back(std::move(actions));
  }
}

/// Returns a rank's actions in DualPipeV, in DualPipe's eight phases.
std::vector<PipelineAction> dual_pipe_v_actions(RankActions rank, int r, int num_ranks, int num_micro_batches) {
  const int ranks_below = num_ranks - 1 - r;  // this rank not included
  // 1. Forwards of chunk 0 run until the first micro-batch is back from the bottom of the V.
  for (int i = 0; i < 2 * ranks_below; ++i) rank.forward(0);
  // 2. Forwards of both chunks run until the gradient of the first micro-batch is back.
  for (int i = 0; i <= r; ++i) {
    rank.forward(0);
    rank.forward(1);
  }
  // 3. Backwards of chunk 1 are split, so that the ranks below get their gradients early.
  for (int i = 0; i < ranks_below; ++i) {
    rank.backward_input(1);
    rank.backward_weight();
    rank.forward(1);
  }
  // 4. Steady state: every forward overlaps with a backward of the other chunk. On the bottom rank the first forward
  //    runs alone, while the gradient that it would be paired with is on its way.
  for (int i = 0; i < num_micro_batches - 2 * num_ranks + r + 1; ++i) {
    if (i == 0 && ranks_below == 0) {
      rank.forward(0);
      rank.backward(1);
    } else {
      rank.overlapped(0, 1);
    }
    rank.overlapped(1, 0);
  }
  // 5. The last forwards run.
  for (int i = 0; i < ranks_below; ++i) {
    rank.backward(1);
    rank.overlapped(1, 0);
  }
  // 6. Backwards of both chunks run; the second half of them is split.
  for (int i = 0; i < 2 * (r + 1); ++i) {
    const int chunk = 1 - i % 2;
    if (i <= r) {
      rank.backward(chunk);
    } else {
      rank.backward_input(chunk);
    }
  }
  // 7. The last gradients arrive one by one; weight gradients fill the time between them.
  for (int i = 0; i < ranks_below; ++i) {
    rank.backward_weight();
    rank.backward_input(0);
  }
  // 8. The remaining weight gradients run.
  while (rank.weights_wait()) rank.backward_weight();
  return rank.take();
}

void make_dual_pipe_v(PipelineSchedule& schedule) {
  for (int r = 0; r < schedule.num_ranks; ++r) {
    schedule.actions.push_back(dual_pipe_v_actions({schedule, r}, r, schedule.num_ranks, schedule.num_micro_batches));
  }
}

void require_possible(Kind kind, std::int64_t num_ranks, std::int64_t stages_per_rank, std::int64_t num_micro_batches) {
  require(num_ranks >= 1, "{}: the number of ranks is {}, expected 1 or more", name_of(kind), num_ranks);
  require(num_micro_batches >= 1, "{}: the number of micro-batches is {}, expected 1 or more", name_of(kind),
          num_micro_batches);
  switch (kind) {
    case Kind::k1F1B:
      require(stages_per_rank == 1, "{}: the number of stages per rank is {}, expected 1; {} has 2 or more",
              name_of(kind), stages_per_rank, name_of(Kind::kInterleaved1F1B));
      break;
    case Kind::kInterleaved1F1B:
      require(stages_per_rank >= 2, "{}: the number of stages per rank is {}, expected 2 or more; {} has 1",
              name_of(kind), stages_per_rank, name_of(Kind::k1F1B));
      break;
    case Kind::kZBV:
    case Kind::kDualPipeV:
      require(stages_per_rank == 2, "{}: the number of stages per rank is {}, expected 2", name_of(kind),
              stages_per_rank);
  }
  require(kind != Kind::kDualPipeV || num_micro_batches >= 2 * num_ranks,
          "{}: the number of micro-batches is {}, expected {} or more, 2 per rank; {} takes any number", name_of(kind),
          num_micro_batches, 2 * num_ranks, name_of(Kind::kZBV));
  const std::int64_t num_stages = num_ranks * stages_per_rank;
  require(
      num_stages <= kMaxForwards &&
          num_stages * (kind == Kind::kZBV ? num_planned_by_zbv(num_ranks, num_micro_batches) : num_micro_batches) <=
              kMaxForwards,
      "{}: {} ranks with {} stages each and {} micro-batches are too many, expected {} forwards or fewer",
      name_of(kind), num_ranks, stages_per_rank, num_micro_batches, kMaxForwards);
}

}  // namespace

std::string_view name_of(PipelineScheduleKind kind) {
  for (const auto& [value, text] : kNames) {
    if (value == kind) return text;
  }
  TESSERA_CHECK(false, "kind {}", static_cast<int>(kind));
  return {};
}

PipelineScheduleKind pipeline_schedule_kind(std::string_view name) {
  std::string names;
  for (const auto& [kind, text] : kNames) {
    if (equal_but_for_case(name, text)) return kind;
    names += (names.empty() ? "" : ", ") + std::string(text);
  }
  if (equal_but_for_case(name, kShortZbv)) return Kind::kZBV;
  fail("pipeline schedule '{}' does not exist; there are {}", name, names);
}

std::string describe(const PipelinePass& pass) {
  constexpr std::array kKinds = {"forward", "backward", "input gradient", "weight gradients"};
  return fmt::format("{} of micro-batch {} in stage {}", kKinds[static_cast<int>(pass.kind)], pass.micro_batch,
                     pass.stage);
}

int min_stages_per_rank(PipelineScheduleKind kind) { return kind == Kind::k1F1B ? 1 : 2; }

PipelineSchedule make_pipeline_schedule(PipelineScheduleKind kind, int num_ranks, int stages_per_rank,
                                        int num_micro_batches, int max_deferred) {
  require_possible(kind, num_ranks, stages_per_rank, num_micro_batches);
  require(max_deferred >= 1, "{}: at most {} weight gradients are deferred, expected 1 or more", name_of(kind),
          max_deferred);
  PipelineSchedule schedule{.kind = kind,
                            .num_ranks = num_ranks,
                            .stages_per_rank = stages_per_rank,
                            .num_micro_batches = num_micro_batches,
                            .max_deferred = max_deferred};
  schedule.rank_of_stage.resize(num_ranks * stages_per_rank);
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int chunk = 0; chunk < stages_per_rank; ++chunk) {
      schedule.rank_of_stage[stage_of(kind, num_ranks, rank, chunk)] = rank;
    }
  }
  switch (kind) {
    case Kind::k1F1B:
      make_1f1b(schedule);
      break;
    case Kind::kInterleaved1F1B:
      make_interleaved(schedule);
      break;
    case Kind::kZBV:
      make_zbv(schedule);
      break;
    case Kind::kDualPipeV:
      make_dual_pipe_v(schedule);
  }
  return schedule;
}

PipelineSchedule make_overlapped_schedule(int num_micro_batches) {
  PipelineSchedule schedule = make_pipeline_schedule(PipelineScheduleKind::k1F1B, 1, 1, num_micro_batches);
  RankActions rank(schedule, 0);
  rank.forward(0);
  while (rank.num_forwards(0) < num_micro_batches) rank.overlapped(0, 0);
  rank.backward(0);
  schedule.actions = {rank.take()};
  return schedule;
}

bool pairs_passes(const PipelineSchedule& schedule, int rank) {
  return std::ranges::any_of(schedule.actions[static_cast<std::size_t>(rank)],
                             [](const PipelineAction& action) { return action.overlapped.has_value(); });
}

std::vector<int> most_held(const PipelineSchedule& schedule) {
  std::vector<int> now(schedule.rank_of_stage.size()), most(schedule.rank_of_stage.size());
  for (const std::vector<PipelineAction>& of_rank : schedule.actions) {
    for (const PipelineAction& action : of_rank) {
      for_each_pass(action, [&](const PipelinePass& pass) {
        const auto stage = static_cast<std::size_t>(pass.stage);
        if (pass.kind == Pass::kForward) ++now[stage];
        most[stage] = std::max(most[stage], now[stage]);
        if (frees_activations(pass)) --now[stage];
      });
    }
  }
  return most;
}

int most_deferred(const PipelineSchedule& schedule, int rank) {
  int now = 0, most = 0;
  for (const PipelineAction& action : schedule.actions[rank]) {
    for_each_pass(action, [&](const PipelinePass& pass) {
      if (computes_input_gradient(pass)) ++now;
      most = std::max(most, now);
      if (frees_activations(pass)) --now;
    });
  }
  return most;
}

}  // namespace tessera
