#include "plan/step_forecast.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "parallel/pipeline_timing.h"

namespace tessera {
namespace {

// Passes that a step has once.
constexpr std::string_view kReduction = "reduction", kOptimizer = "optimizer";

bool is_once(std::string_view pass) { return pass == kReduction || pass == kOptimizer; }

/// Returns the stage and the kind of "stage 0 forward", or -1 and the name of a pass that a step has once.
std::pair<int, std::string_view> parts_of(std::string_view pass) {
  constexpr std::string_view kStage = "stage ";
  if (!pass.starts_with(kStage)) return {-1, pass};
  const std::size_t end = pass.find(' ', kStage.size());
  return {std::stoi(std::string(pass.substr(kStage.size(), end - kStage.size()))), pass.substr(end + 1)};
}

bool is_weight_gradient(const RecordedOperator& call) {
  // A dense product of bfloat16 or float32 is a gemm, whose left operand is transposed in the gradient of a weight
  // only.
  return call.name.ends_with("_wgrad") || (call.name == "gemm" && call.transposes_a);
}

bool gathers_weights(const RecordedTransfer& transfer) {
  return transfer.kind == "all_gather" && (transfer.axis.starts_with("dp_shard") || transfer.axis == "ep_shard") &&
         !is_once(transfer.pass);
}

ForecastEvent::Lane lane_of(const RecordedOperator& call) {
  if (call.name.starts_with("mla_")) return ForecastEvent::Lane::kAttention;
  return is_product(call.name) ? ForecastEvent::Lane::kProducts : ForecastEvent::Lane::kMemory;
}

/// Returns the stream of a collective's group. Groups of a stream run one operation at a time (comm/gpu_group.h).
std::string_view stream_of(std::string_view axis) {
  if (axis == "tp" || axis == "cp" || axis == "cp_tp") return "activations";
  return axis == "ep" || axis == "ep_within" || axis == "ep_across" ? "experts" : "weights";
}

/// Adds up the times of one rank's step.
class RankFold {
 public:
  RankFold(const StepRecord& record, std::int64_t micro_batches, bool gathers_once, const StepTimes& times)
      : record_(record),
        micro_batches_(static_cast<double>(micro_batches)),
        gathers_once_(gathers_once),
        times_(times) {
    for (const RecordedOperator& call : record.operators()) add(call);
    if (micro_batches > 1 && times.overlaps_micro_batches) {
      added_part_of_calls_ = std::max(times.dispatch_overlap_cost, part_of_calls_without_operators());
    }
    for (const RecordedTransfer& transfer : record.transfers()) {
      if (transfer.kind != "receive") add(transfer);
    }
    result_.host_seconds = times.seconds_per_operator * num_calls_;
    for (const auto& [pass, calls] : calls_of_pass_) wait_for_host(pass, calls);
    if (times.keeps_events) keep_events();
  }

  RankForecast result() && { return std::move(result_); }

 private:
  ForecastLine& line(const std::string& pass, const std::string& name, bool is_transfer) {
    const auto [number, is_new] = line_of_pass_[pass].try_emplace(name, result_.lines.size());
    if (!is_new) return result_.lines[number->second];
    const auto [stage, kind] = parts_of(pass);
    return result_.lines.emplace_back(
        ForecastLine{.stage = stage, .pass = std::string(kind), .name = name, .is_transfer = is_transfer});
  }

  /// Adds seconds of a step to the pass.
  void add_to_pass(const std::string& pass, double seconds) {
    if (pass == kReduction) {
      result_.reduction_seconds += seconds;
    } else if (pass == kOptimizer) {
      result_.optimizer_seconds += seconds;
    } else {
      stage_seconds(pass) += seconds / micro_batches_;
    }
  }

  double& stage_seconds(std::string_view pass) {
    const auto [stage, kind] = parts_of(pass);
    TESSERA_CHECK(stage >= 0, "{}", pass);
    auto found = std::ranges::find(result_.stages, stage, &StageTimes::stage);
    if (found == result_.stages.end()) found = result_.stages.insert(found, {.stage = stage});
    return kind == "forward" ? found->forward : kind == "backward" ? found->backward : found->weight_gradients;
  }

  /// Describes what calls of an operator cost in a step's first micro-batch and in later ones.
  struct KnownCall {
    RecordedOperator call;
    OperatorTime first, later;
    double flop;
  };

  /// Layers repeat calls, and a look is faster than the search for a rate.
  const KnownCall& known(const RecordedOperator& call) {
    std::deque<KnownCall>& of_name = known_calls_[call.name];
    const auto found = std::ranges::find_if(of_name, [&](const KnownCall& one) { return one.call.is_same_call(call); });
    if (found != of_name.end()) return *found;
    const OperatorTime first = times_.of_operator(call);
    const bool repeats = !is_once(call.pass) && micro_batches_ > 1.0;
    const OperatorTime later = repeats ? times_.of_operator(in_later_micro_batch(call)) : first;
    return of_name.emplace_back(KnownCall{call, first, later, work_of(call)[OperatorWork::kFlop]});
  }

  void add(const RecordedOperator& call) {
    const double count = is_once(call.pass) ? 1.0 : micro_batches_;
    const double load = load_of(call.layer);
    const KnownCall& one = known(load == 1.0 ? call : with_load(call, load));
    const OperatorTime &first = one.first, &later = one.later;
    const double seconds = first.seconds + (count - 1.0) * later.seconds;
    begin_.push_back(begin_.back() + seconds / count);
    ForecastLine& of_name = line(call.pass, call.name, false);
    of_name.num_calls += static_cast<std::size_t>(count);
    of_name.seconds += seconds;
    of_name.flop += count * one.flop;
    of_name.error_seconds += first.error * first.seconds + (count - 1.0) * later.error * later.seconds;
    of_name.is_extrapolated |= first.is_extrapolated || later.is_extrapolated;
    add_to_pass(call.pass, seconds + count * times_.seconds_per_operator);
    num_calls_ += count;
    calls_of_pass_[call.pass] += count;
  }

  /// Makes a pass of a stage take as long as the host needs to start its operators.
  void wait_for_host(const std::string& pass, double calls) {
    if (parts_of(pass).first < 0) return;
    const double waits = calls * times_.least_per_operator - stage_seconds(pass) * micro_batches_;
    if (waits <= 0.0) return;
    line(pass, kWaitForHost, false).seconds += waits;
    add_to_pass(pass, waits);
  }

  /// Returns the seconds of the operators that run beside a dispatcher's call: those just before it.
  double seconds_beside(const RecordedTransfer& call) const {
    std::size_t first = call.begin;
    while (first > 0 && record_.operators()[first - 1].is_beside) --first;
    return begin_[call.begin] - begin_[first];
  }

  /// Returns the part of the dispatcher's calls of a micro-batch for which it has no operators to run beside them.
  double part_of_calls_without_operators() const {
    double calls = 0.0, operators = 0.0;
    for (const RecordedTransfer& transfer : record_.transfers()) {
      if (is_dispatch(transfer)) calls += seconds_of(transfer);
    }
    for (std::size_t i = 0; i < record_.operators().size(); ++i) {
      if (!is_once(record_.operators()[i].pass)) operators += begin_[i + 1] - begin_[i];
    }
    return calls > operators ? 1.0 - operators / calls : 0.0;
  }

  double seconds_of(const RecordedTransfer& transfer) const {
    return times_.of_transfer(with_load(transfer, load_of(transfer.layer)));
  }

  double load_of(const std::string& layer) const {
    return layer.empty() || !times_.load_of ? 1.0 : times_.load_of(layer);
  }

  void add(const RecordedTransfer& transfer) {
    const double seconds = seconds_of(transfer);
    if (seconds == 0.0) return;
    if (transfer.kind == "send") {
      result_.message_seconds = std::max(result_.message_seconds, seconds);
      return;
    }
    double added = seconds;
    if (is_dispatch(transfer)) {
      double& used = used_beside_[transfer.begin];  // by calls right before this one
      const double beside = seconds_beside(transfer) - used;
      if (beside > 0.0) added = std::max(seconds - beside, times_.dispatch_overlap_cost * seconds);
      used += std::clamp(beside, 0.0, seconds);
      if (added_part_of_calls_) added = *added_part_of_calls_ * seconds;
    } else if (transfer.end > transfer.begin) {
      double& free = stream_is_free_[stream_of(transfer.axis)];
      const double begin = std::max(begin_[transfer.begin], free);
      const double beside = std::max(begin_[transfer.end] - begin, 0.0);
      added = std::max(times_.overlap_cost * seconds, seconds - beside);
      free = begin + std::min(seconds, beside);
    }
    stalls_.push_back({&transfer, seconds, added});
    const bool once = is_once(transfer.pass) || (gathers_once_ && gathers_weights(transfer));
    const double count = once ? 1.0 : micro_batches_;
    ForecastLine& of_name = line(transfer.pass, transfer.kind + " " + transfer.axis, true);
    of_name.num_calls += static_cast<std::size_t>(count);
    of_name.seconds += count * added;
    of_name.error_seconds += kUnmeasuredError * count * added;
    of_name.hidden_seconds += count * (seconds - added);
    if (once && !is_once(transfer.pass)) {
      result_.gather_seconds += added;
    } else {
      add_to_pass(transfer.pass, count * added);
    }
  }

  /// Says when operators and transfers run. Operators wait where a transfer ends that does not hide.
  void keep_events() {
    const std::vector<RecordedOperator>& operators = record_.operators();
    std::ranges::stable_sort(stalls_, {}, [](const Stall& stall) { return stall.transfer->end; });
    const auto keep = [&](const std::string& pass, const std::string& name, ForecastEvent::Lane lane, double begin,
                          double seconds) {
      const auto [stage, kind] = parts_of(pass);
      result_.events.push_back(
          {.stage = stage, .pass = std::string(kind), .name = name, .lane = lane, .begin = begin, .seconds = seconds});
    };
    auto next = stalls_.begin();
    double stalled = 0.0;
    for (std::size_t i = 0; i <= operators.size(); ++i) {
      const double host = static_cast<double>(i) * times_.seconds_per_operator;
      for (; next != stalls_.end() && next->transfer->end <= i; ++next) {
        stalled += next->added;
        const RecordedTransfer& transfer = *next->transfer;
        const bool is_far = times_.is_far && times_.is_far(transfer);
        keep(transfer.pass, transfer.kind + " " + transfer.axis,
             is_far ? ForecastEvent::Lane::kNetwork : ForecastEvent::Lane::kDomain,
             begin_[i] + host + stalled - next->seconds, next->seconds);
      }
      if (i < operators.size()) {
        keep(operators[i].pass, operators[i].name, lane_of(operators[i]), begin_[i] + host + stalled,
             begin_[i + 1] - begin_[i]);
      }
    }
  }

  struct Stall {
    const RecordedTransfer* transfer;
    double seconds, added;
  };

  const StepRecord& record_;
  double micro_batches_;
  bool gathers_once_;
  const StepTimes& times_;
  RankForecast result_;
  std::unordered_map<std::string, std::unordered_map<std::string, std::size_t>> line_of_pass_;  // by name
  std::unordered_map<std::string, std::deque<KnownCall>> known_calls_;                          // by name
  std::vector<double> begin_ = {0.0};  // of each operator, and the end of the last one, with operators alone
  /// The seconds beside a dispatcher's calls that were counted already, by the operator that the calls precede.
  std::unordered_map<std::size_t, double> used_beside_;
  /// The time, as in begin_, from which a stream has nothing to do. A transfer that the operators wait for is done
  /// then.
  std::map<std::string_view, double> stream_is_free_;
  /// Calls of a dispatcher that run beside another micro-batch add this part of their time. It is not set if none do.
  std::optional<double> added_part_of_calls_;
  double num_calls_ = 0.0;
  std::map<std::string, double> calls_of_pass_;
  std::vector<Stall> stalls_;
};

}  // namespace

RecordedOperator with_load(RecordedOperator call, double load) {
  for (RecordedOperator::Operand& operand : call.operands) {
    if (operand.has_expert_rows) operand.used *= load;
  }
  return call;
}

RecordedTransfer with_load(RecordedTransfer transfer, double load) {
  transfer.bytes *= load;
  return transfer;
}

RecordedOperator in_later_micro_batch(RecordedOperator call) {
  call.accumulates = call.accumulates || is_weight_gradient(call);
  return call;
}

double RankForecast::seconds_of(std::string_view pass) const {
  double sum = 0.0;
  for (const ForecastLine& line : lines) sum += line.pass == pass ? line.seconds : 0.0;
  return sum;
}

void RankForecast::renumber(std::span<const int> numbers) {
  TESSERA_CHECK(numbers.size() == stages.size(), "{} {}", numbers.size(), stages.size());
  std::vector<int> before;
  for (const StageTimes& stage : stages) before.push_back(stage.stage);
  std::ranges::sort(before);
  const auto renumbered = [&](int stage) {
    return stage < 0 ? stage : numbers[static_cast<std::size_t>(std::ranges::find(before, stage) - before.begin())];
  };
  for (ForecastLine& line : lines) line.stage = renumbered(line.stage);
  for (ForecastEvent& event : events) event.stage = renumbered(event.stage);
  for (StageTimes& stage : stages) stage.stage = renumbered(stage.stage);
}

double StepForecast::error_seconds() const {
  double squares = 0.0;
  for (const ForecastLine& line : ranks[slowest].lines) squares += line.error_seconds * line.error_seconds;
  return std::sqrt(squares);
}

PipelineCosts pipeline_costs(std::span<const RankForecast> ranks, int num_stages) {
  const std::vector<double> none(static_cast<std::size_t>(num_stages));
  PipelineCosts costs{.forward = none, .backward_input = none, .backward_weight = none};
  for (const RankForecast& rank : ranks) {
    costs.communication = std::max(costs.communication, rank.message_seconds);
    for (const StageTimes& stage : rank.stages) {
      const auto s = static_cast<std::size_t>(stage.stage);
      // Where the schedule has whole backwards, only the sum of both halves matters.
      const double weight = stage.weight_gradients > 0.0 ? stage.weight_gradients : 0.5 * stage.backward;
      costs.forward[s] = stage.forward;
      costs.backward_input[s] = stage.backward + stage.weight_gradients - weight;
      costs.backward_weight[s] = weight;
    }
  }
  return costs;
}

RankForecast forecast_rank(const StepRecord& dry_run, int num_micro_batches, bool gathers_once,
                           const StepTimes& times) {
  return RankFold(dry_run, num_micro_batches, gathers_once, times).result();
}

StepForecast forecast_step(std::vector<RankForecast> ranks, const PipelineSchedule& schedule) {
  TESSERA_CHECK(std::ssize(ranks) == schedule.num_ranks, "{} {}", ranks.size(), schedule.num_ranks);
  StepForecast forecast{.ranks = std::move(ranks)};
  const PipelineTiming timing = simulate(schedule, pipeline_costs(forecast.ranks, schedule.num_stages()));
  forecast.passes_seconds = timing.makespan;
  double once = 0.0, most = 0.0;
  for (std::size_t i = 0; i < forecast.ranks.size(); ++i) {
    RankForecast& rank = forecast.ranks[i];
    rank.bubble_seconds = timing.bubble_fraction[i] * timing.makespan;
    once = std::max(once, rank.once_seconds());
    const double work = timing.makespan - rank.bubble_seconds + rank.once_seconds();
    if (work > most) forecast.slowest = i;
    most = std::max(most, work);
  }
  forecast.seconds = forecast.passes_seconds + once;
  return forecast;
}

}  // namespace tessera
