#include "parallel/pipeline_timing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "base/error.h"

namespace tessera {
namespace {

using Pass = PipelinePass::Kind;

double of_stage(const std::vector<double>& costs, int stage) { return costs[costs.size() == 1 ? 0 : stage]; }

void require_costs(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  constexpr double kLeast = 1e-12, kMost = 1e12;
  const auto require_range = [&](double value, double least, const char* what) {
    require(value >= least && value <= kMost, "{}: the cost is {}, expected {} to {}", what, value, least, kMost);
  };
  const auto require_costs_of = [&](const std::vector<double>& values, const char* what) {
    require(values.size() == 1 || std::ssize(values) == schedule.num_stages(),
            "{}: {} costs, expected 1 or {}, one per stage", what, values.size(), schedule.num_stages());
    for (const double value : values) require_range(value, kLeast, what);
  };
  require_costs_of(costs.forward, "forward");
  require_costs_of(costs.backward_input, "backward-input");
  require_costs_of(costs.backward_weight, "backward-weight");
  require_range(costs.overlapped, kLeast, "overlapped");
  require_range(costs.communication, 0.0, "communication");
}

/// Throws Error unless every index in the schedule is within its range.
void require_shape(const PipelineSchedule& schedule) {
  const int num_stages = schedule.num_stages();
  require(schedule.num_micro_batches >= 1, "pipeline schedule: {} micro-batches, expected 1 or more",
          schedule.num_micro_batches);
  require(schedule.num_ranks >= 1 && std::ssize(schedule.actions) == schedule.num_ranks,
          "pipeline schedule: actions of {} ranks, expected {}", schedule.actions.size(), schedule.num_ranks);
  for (int stage = 0; stage < num_stages; ++stage) {
    const int rank = schedule.rank_of_stage[stage];
    require(rank >= 0 && rank < schedule.num_ranks, "pipeline schedule: stage {} is on rank {}, expected 0 to {}",
            stage, rank, schedule.num_ranks - 1);
  }
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    for (const PipelineAction& action : schedule.actions[rank]) {
      for_each_pass(action, [&](const PipelinePass& pass) {
        require(pass.stage >= 0 && pass.stage < num_stages && pass.micro_batch >= 0 &&
                    pass.micro_batch < schedule.num_micro_batches,
                "pipeline schedule: rank {} has the {}, expected stages 0 to {} and micro-batches 0 to {}", rank, pass,
                num_stages - 1, schedule.num_micro_batches - 1);
      });
    }
  }
}

/// Holds one value per stage and micro-batch.
template <typename T>
class Table {
 public:
  Table(const PipelineSchedule& schedule, T value)
      : num_micro_batches_(schedule.num_micro_batches),
        values_(static_cast<std::size_t>(schedule.num_stages()) * schedule.num_micro_batches, value) {}
  T& at(int stage, int micro_batch) {
    return values_[static_cast<std::size_t>(stage) * num_micro_batches_ + micro_batch];
  }

 private:
  std::size_t num_micro_batches_;
  std::vector<T> values_;
};

class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const PipelineCosts& costs)
      : schedule_(schedule), costs_(costs), forward_end_(schedule, kNever), gradient_end_(schedule, kNever) {
    timing_.spans.resize(schedule.num_ranks);
  }

  PipelineTiming run() {
    std::vector<int> to_try(schedule_.num_ranks);
    std::iota(to_try.rbegin(), to_try.rend(), 0);
    while (!to_try.empty()) {
      const int rank = to_try.back();
      to_try.pop_back();
      while (advance(rank)) {
        for_each_pass(schedule_.actions[rank][timing_.spans[rank].size() - 1], [&](const PipelinePass& pass) {
          if (pass.stage > 0) to_try.push_back(schedule_.rank_of_stage[pass.stage - 1]);
          if (pass.stage + 1 < schedule_.num_stages()) to_try.push_back(schedule_.rank_of_stage[pass.stage + 1]);
        });
      }
    }
    require_end();
    for (const auto& spans : timing_.spans) {
      if (!spans.empty()) timing_.makespan = std::max(timing_.makespan, spans.back().end);
    }
    for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
      measure_bubble(rank);
      measure_memory(rank);
    }
    return std::move(timing_);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  /// Calls visit(input, time) for each input of a pass, with the time when it arrives at the pass's rank.
  template <typename Visit>
  void for_each_input(const PipelinePass& pass, Visit&& visit) {
    const auto input = [&](Pass kind, int stage) {
      const double end = (kind == Pass::kForward ? forward_end_ : gradient_end_).at(stage, pass.micro_batch);
      const bool sent = schedule_.rank_of_stage[stage] != schedule_.rank_of_stage[pass.stage];
      visit(PipelinePass{kind, stage, pass.micro_batch}, sent ? end + costs_.communication : end);
    };
    if (pass.kind == Pass::kForward) {
      if (pass.stage > 0) input(Pass::kForward, pass.stage - 1);
    } else if (pass.kind == Pass::kBackwardWeight) {
      input(Pass::kBackwardInput, pass.stage);
    } else {
      input(Pass::kForward, pass.stage);
      if (pass.stage + 1 < schedule_.num_stages()) input(Pass::kBackward, pass.stage + 1);
    }
  }

  double cost(const PipelinePass& pass) const {
    const double input = of_stage(costs_.backward_input, pass.stage);
    const double weight = of_stage(costs_.backward_weight, pass.stage);
    switch (pass.kind) {
      case Pass::kForward:
        return of_stage(costs_.forward, pass.stage);
      case Pass::kBackward:
        return input + weight;
      case Pass::kBackwardInput:
        return input;
      case Pass::kBackwardWeight:
        break;
    }
    return weight;
  }

  /// Runs the rank's next action. Returns false if there is none, or if its inputs have not arrived yet.
  bool advance(int rank) {
    auto& spans = timing_.spans[rank];
    if (spans.size() == schedule_.actions[rank].size()) return false;
    const PipelineAction& action = schedule_.actions[rank][spans.size()];
    double start = spans.empty() ? 0.0 : spans.back().end, duration = 0.0;
    for_each_pass(action, [&](const PipelinePass& pass) {
      for_each_input(pass, [&](const PipelinePass&, double time) { start = std::max(start, time); });
      duration += cost(pass);
    });
    if (start == kNever) return false;
    if (action.overlapped) duration *= costs_.overlapped;
    spans.push_back({start, start + duration});
    for_each_pass(action, [&](const PipelinePass& pass) {
      if (pass.kind == Pass::kBackwardWeight) return;
      (pass.kind == Pass::kForward ? forward_end_ : gradient_end_).at(pass.stage, pass.micro_batch) = start + duration;
    });
    return true;
  }

  void require_end() {
    std::string blocked;
    for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
      const std::size_t idx = timing_.spans[rank].size();
      if (idx == schedule_.actions[rank].size()) continue;
      blocked += fmt::format("{}rank {} at its action {}", blocked.empty() ? "" : "; ", rank, idx);
      for_each_pass(schedule_.actions[rank][idx], [&](const PipelinePass& pass) {
        for_each_input(pass, [&](const PipelinePass& input, double time) {
          if (time == kNever) blocked += fmt::format(", {}, for the {}", describe(pass), describe(input));
        });
      });
    }
    require(blocked.empty(), "pipeline schedule: it cannot go on, because these wait: {}", blocked);
  }

  void measure_bubble(int rank) {
    double busy = 0.0;
    for (const PipelineTiming::Span& span : timing_.spans[rank]) busy += span.end - span.start;
    timing_.bubble_fraction.push_back(timing_.makespan > 0.0 ? std::max(0.0, 1.0 - busy / timing_.makespan) : 0.0);
  }

  void measure_memory(int rank) {
    int held = 0, peak = 0;
    for (const PipelineAction& action : schedule_.actions[rank]) {
      for_each_pass(action, [&](const PipelinePass& pass) { held += pass.kind == Pass::kForward; });
      peak = std::max(peak, held);
      for_each_pass(action, [&](const PipelinePass& pass) { held -= frees_activations(pass); });
    }
    timing_.peak_in_flight.push_back(peak);
  }

  const PipelineSchedule& schedule_;
  const PipelineCosts& costs_;
  Table<double> forward_end_, gradient_end_;  // per stage and micro-batch
  PipelineTiming timing_;
};

void require_places(const PipelineSchedule& schedule) {
  std::vector<int> num_stages(schedule.num_ranks, 0);
  for (const int rank : schedule.rank_of_stage) ++num_stages[rank];
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    require(num_stages[rank] == schedule.stages_per_rank, "pipeline schedule: rank {} has {} stages, expected {}", rank,
            num_stages[rank], schedule.stages_per_rank);
    for (const PipelineAction& action : schedule.actions[rank]) {
      for_each_pass(action, [&](const PipelinePass& pass) {
        const int owner = schedule.rank_of_stage[pass.stage];
        require(owner == rank, "pipeline schedule: rank {} has the {}, which belongs on rank {}", rank, pass, owner);
      });
      if (!action.overlapped) continue;
      require(action.pass.kind == Pass::kForward && action.overlapped->kind == Pass::kBackward,
              "pipeline schedule: rank {} overlaps the {} with the {}, expected a forward with a backward", rank,
              action.pass, *action.overlapped);
    }
  }
}

/// Says which passes of a stage and a micro-batch its rank has done so far.
struct Seen {
  bool forward = false, input = false, weight = false;
};

void require_complete(const PipelineSchedule& schedule) {
  Table<Seen> table(schedule, {});
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    for (const PipelineAction& action : schedule.actions[rank]) {
      for_each_pass(action, [&](const PipelinePass& pass) {
        Seen& seen = table.at(pass.stage, pass.micro_batch);
        const auto once = [&](bool& done) {
          require(!done, "pipeline schedule: rank {} has the {} although it is done", rank, pass);
          done = true;
        };
        require(pass.kind != Pass::kBackwardWeight || seen.input,
                "pipeline schedule: rank {} has the {} before its input gradient", rank, pass);
        if (pass.kind == Pass::kForward) once(seen.forward);
        if (computes_input_gradient(pass)) once(seen.input);
        if (frees_activations(pass)) once(seen.weight);
      });
    }
  }
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    for (int micro_batch = 0; micro_batch < schedule.num_micro_batches; ++micro_batch) {
      const Seen& seen = table.at(stage, micro_batch);
      const auto require_seen = [&](bool done, Pass kind) {
        require(done, "pipeline schedule: rank {} lacks the {}", schedule.rank_of_stage[stage],
                PipelinePass{kind, stage, micro_batch});
      };
      require_seen(seen.forward, Pass::kForward);
      require_seen(seen.input, Pass::kBackward);
      require_seen(seen.weight, Pass::kBackwardWeight);
    }
  }
}

}  // namespace

double PipelineTiming::mean_bubble_fraction() const {
  return std::accumulate(bubble_fraction.begin(), bubble_fraction.end(), 0.0) /
         static_cast<double>(bubble_fraction.size());
}

PipelineTiming simulate(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  require_shape(schedule);
  require_costs(schedule, costs);
  return Simulation(schedule, costs).run();
}

void check(const PipelineSchedule& schedule, std::optional<int> max_in_flight) {
  require_shape(schedule);
  require_places(schedule);
  require_complete(schedule);
  const PipelineTiming timing = simulate(schedule);
  if (!max_in_flight) return;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    require(timing.peak_in_flight[rank] <= *max_in_flight,
            "pipeline schedule: rank {} holds {} activations at once, expected {} or fewer", rank,
            timing.peak_in_flight[rank], *max_in_flight);
  }
}

}  // namespace tessera
