// Compares the record of a dry run with that of a step, and with formulas, and folds it with known rates.
#include "plan/step_forecast.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "config/job_config.h"
#include "plan/measure/calibrate.h"
#include "plan/measure/random_steps.h"
#include "step/training_step.h"
#include "tests/expect_error.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

const std::vector<std::string> kMxfp8 = {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx",
                                         "--quantize.linear.mx.unaligned=bf16"};
const std::vector<std::string> kRecomputed = {"--activation_checkpoint.mode=full"};
const std::vector<std::string> kFloat32 = {"--training.mixed_precision_param=float32"};

/// A step of two micro-batches of 2 sequences.
JobConfig small_config(const std::vector<std::string>& overrides) {
  static const std::string kToml = std::string(kSmallModel) + R"(
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 32
steps = 3
)";
  return parse_job_config(kToml, overrides);
}

/// Returns the operators of the step's passes, as a run records them in its second step.
std::vector<RecordedOperator> operators_of_run(const JobConfig& config) {
  TrainingStep step(config);
  step.allocate();
  RandomSteps steps(step, config, Mesh());
  steps.run();
  return steps.time_operators(1).operators;
}

/// Returns the operators of a step of two micro-batches, from the record of its dry run.
std::vector<RecordedOperator> operators_of_plan(const JobConfig& config, std::int64_t num_ranks = 1) {
  const MeshDegrees degrees = resolve(config.mesh_degrees(), num_ranks);
  const TrainingStep step(config, std::make_shared<Mesh>(Mesh::planned(degrees, 0)));
  const std::vector<RecordedOperator>& recorded = step.dry_run().operators();
  std::vector<RecordedOperator> result;
  for (int i = 0; i < 2; ++i) {
    for (const RecordedOperator& call : recorded) {
      if (call.pass != "optimizer") result.push_back(i == 0 ? call : in_later_micro_batch(call));
    }
  }
  std::ranges::copy_if(recorded, std::back_inserter(result),
                       [](const RecordedOperator& call) { return call.pass == "optimizer"; });
  return result;
}

/// Predicts the step of two micro-batches.
StepForecast forecast_with(const JobConfig& config, const Calibration& calibration) {
  const TrainingStep step(config);
  const StepTimes times{.of_operator = [&](const RecordedOperator& call) { return calibration.time_of(call); },
                        .of_transfer = {},
                        .seconds_per_operator = calibration.seconds_per_operator};
  const PipelineSchedule schedule = config.pipeline_schedule({.dp_shard = 1});
  return forecast_step({forecast_rank(step.dry_run(), schedule.num_micro_batches, false, times)}, schedule);
}

// One rank has the longer passes, and the other one has the longer update. In 1F1B the first rank never waits if it is
// the slower one. The last one waits for a forward at the begin, and is waited for by a backward at the end.
TEST(StepForecast, AStepEndsWithTheLongestUpdateAfterItsPasses) {
  const PipelineSchedule schedule = make_pipeline_schedule(PipelineScheduleKind::k1F1B, 2, 1, 4);
  const auto rank = [](int stage, double pass, double update) {
    RankForecast result;
    result.stages = {{.stage = stage, .forward = pass, .backward = pass}};
    result.optimizer_seconds = update;
    return result;
  };
  const StepForecast first_is_slow = forecast_step({rank(0, 4.0, 1.0), rank(1, 2.0, 3.0)}, schedule),
                     last_is_slow = forecast_step({rank(0, 2.0, 3.0), rank(1, 4.0, 1.0)}, schedule);
  EXPECT_EQ(first_is_slow.passes_seconds, 4 * (4.0 + 4.0));
  EXPECT_EQ(last_is_slow.passes_seconds, 4 * (4.0 + 4.0) + 2.0 + 2.0);
  for (const StepForecast& step : {first_is_slow, last_is_slow}) EXPECT_EQ(step.seconds, step.passes_seconds + 3.0);
  EXPECT_EQ(first_is_slow.slowest, 0u);
  EXPECT_EQ(last_is_slow.slowest, 1u);
}

std::string described(const RecordedOperator& call) {
  std::string text = call.pass + ": " + class_of(call);
  for (const RecordedOperator::Operand& operand : call.operands) text += " " + operand.shape.to_string();
  return text;
}

TEST(StepForecast, ADryRunHasTheOperatorsOfARun) {
  for (const auto& overrides : {std::vector<std::string>{}, kFloat32, kMxfp8, kRecomputed}) {
    SCOPED_TRACE(overrides.empty() ? "bfloat16" : overrides.front());
    const JobConfig config = small_config(overrides);
    std::vector<RecordedOperator> run = operators_of_run(config);
    std::erase_if(run, [](const RecordedOperator& call) { return call.pass.empty() || call.name == "set_zero"; });
    std::vector<RecordedOperator> planned = operators_of_plan(config);
    std::erase_if(planned, [](const RecordedOperator& call) { return call.name == "set_zero"; });
    for (std::size_t i = 0; i < std::min(run.size(), planned.size()); ++i) {
      ASSERT_TRUE(run[i].is_same_call(planned[i])) << described(run[i]) << "\n" << described(planned[i]);
    }
    ASSERT_EQ(run.size(), planned.size());
    for (const RecordedOperator& call : run) EXPECT_GT(call.seconds, 0.0) << call.name;
    for (const RecordedOperator& call : planned) EXPECT_EQ(call.seconds, 0.0) << call.name;
  }
}

// Every weight that a token meets makes 2 flop in the forward, and 4 in the backward.
TEST(StepForecast, DenseProductsHaveTheFlopOfTheirWeights) {
  const JobConfig config = small_config(kFloat32);
  const TrainingStep step(config);
  double weights = 0.0;
  const Parameters& parameters = step.model().parameters();
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const auto& spec = parameters.spec(id);
    if (spec.shape.num_dims() == 2 && spec.name != "tok_embeddings.weight") {
      weights += static_cast<double>(spec.shape.num_elements());
    }
  }
  const double tokens = 2 * 32;
  std::map<std::string, double> flop;
  for (const RecordedOperator& call : step.dry_run().operators()) {
    if (call.name == "gemm") flop[call.pass] += work_of(call)[OperatorWork::kFlop];
  }
  EXPECT_DOUBLE_EQ(flop["stage 0 forward"] + flop["stage 0 backward"], 6.0 * weights * tokens);
}

Calibration all_classes_at(const std::vector<RecordedOperator>& operators, double seconds_per_call) {
  Calibration calibration;
  for (const RecordedOperator& call : operators) {
    calibration.operators[class_of(call)] = {.seconds_per = {seconds_per_call}, .most_bytes = 1e12};
  }
  return calibration;
}

TEST(StepForecast, AStepIsTheSumOfItsOperators) {
  const JobConfig config = small_config({});
  const std::vector<RecordedOperator> operators = operators_of_plan(config);
  Calibration calibration = all_classes_at(operators, 1e-3);
  calibration.seconds_per_operator = 1e-4;
  const StepForecast forecast = forecast_with(config, calibration);
  const RankForecast& rank = forecast.ranks.front();
  const auto count = static_cast<double>(operators.size());
  EXPECT_NEAR(forecast.seconds, 1.1e-3 * count, 1e-9);
  double sum = rank.host_seconds;
  for (const ForecastLine& line : rank.lines) sum += line.seconds;
  EXPECT_NEAR(sum, forecast.seconds, 1e-9);
  EXPECT_NEAR(rank.seconds_of("forward") + rank.seconds_of("backward") + rank.seconds_of("optimizer"), 1e-3 * count,
              1e-9);
}

/// Returns the seconds that transfers add to the step.
double seconds_of_transfers(const RankForecast& forecast) {
  double added = 0.0;
  for (const ForecastLine& line : forecast.lines) added += line.is_transfer ? line.seconds : 0.0;
  return added;
}

// The shared experts run beside two calls that follow each other. They hide five seconds of them, not of each.
TEST(StepForecast, WhatRunsBesideCallsHidesThemOnce) {
  StepRecord record;
  record.set_pass("stage 0 backward");
  record.begin("shared experts")->is_beside = true;
  record.end(false);
  for (const char* kind : {"combine_backward", "dispatch_again"}) {
    record.begin_transfer({.kind = kind, .axis = "ep", .choices = {.num_experts = 8, .top_k = 2}, .pass = {}});
  }
  const StepTimes times{.of_operator = [](const RecordedOperator&) { return OperatorTime{.seconds = 5.0}; },
                        .of_transfer = [](const RecordedTransfer&) { return 4.0; }};
  const RankForecast forecast = forecast_rank(record, 1, /*gathers_once=*/false, times);
  double hidden = 0.0;
  for (const ForecastLine& line : forecast.lines) hidden += line.hidden_seconds;
  EXPECT_DOUBLE_EQ(seconds_of_transfers(forecast), 3.0);
  EXPECT_DOUBLE_EQ(hidden, 5.0);
}

// Two collectives begin before the same operator of 5 s, and take 4 s each. On one stream the second one starts when
// the first one has ended.
TEST(StepForecast, CollectivesOfAStreamRunOneAtATime) {
  const StepTimes times{.of_operator = [](const RecordedOperator&) { return OperatorTime{.seconds = 5.0}; },
                        .of_transfer = [](const RecordedTransfer&) { return 4.0; }};
  for (const auto& [other_axis, added] : {std::pair("ep_shard", 3.0), {"tp", 0.0}}) {
    StepRecord record;
    record.set_pass("stage 0 forward");
    std::vector<std::size_t> transfers;
    for (const char* axis : {"dp_shard_cp", other_axis}) {
      transfers.push_back(record.begin_transfer({.kind = "all_gather", .axis = axis, .choices = {}, .pass = {}}));
    }
    record.begin("rope");
    record.end(false);
    for (const std::size_t transfer : transfers) record.end_transfer(transfer);
    EXPECT_DOUBLE_EQ(seconds_of_transfers(forecast_rank(record, 1, /*gathers_once=*/false, times)), added)
        << other_axis;
  }
}

// A dispatch of 4 s costs a quarter of its time beside another micro-batch, if that has 4 s of operators.
TEST(StepForecast, CallsHideBesideAnotherMicroBatch) {
  struct Case {
    double operator_seconds;
    int micro_batches;
    double added;
  };
  for (const Case& one : {Case{8.0, 1, 4.0}, {8.0, 2, 2.0}, {1.0, 2, 6.0}}) {
    StepRecord record;
    record.set_pass("stage 0 forward");
    record.begin_transfer({.kind = "dispatch", .axis = "ep", .choices = {.num_experts = 8, .top_k = 2}, .pass = {}});
    record.begin("rope");
    record.end(false);
    const StepTimes times{
        .of_operator = [&](const RecordedOperator&) { return OperatorTime{.seconds = one.operator_seconds}; },
        .of_transfer = [](const RecordedTransfer&) { return 4.0; },
        .dispatch_overlap_cost = 0.25,
        .overlaps_micro_batches = true};
    const RankForecast forecast = forecast_rank(record, one.micro_batches, /*gathers_once=*/false, times);
    EXPECT_DOUBLE_EQ(seconds_of_transfers(forecast), one.added) << one.operator_seconds << ", " << one.micro_batches;
  }
}

TEST(StepForecast, AFasterOperatorNeverMakesAStepLonger) {
  const JobConfig config = small_config(kMxfp8);
  const std::vector<RecordedOperator> operators = operators_of_plan(config);
  const Calibration calibration = all_classes_at(operators, 1e-3);
  const double before = forecast_with(config, calibration).seconds;
  for (const auto& [name, rate] : calibration.operators) {
    Calibration faster = calibration;
    faster.operators[name].seconds_per[OperatorWork::kCalls] = 0.5e-3;
    EXPECT_LT(forecast_with(config, faster).seconds, before) << name;
  }
}

// A class that no model of the calibration has could not be predicted.
TEST(StepForecast, TheCalibrationHasTheOperatorsOfAllWaysToTrain) {
  std::set<std::string> measured;
  for (const JobConfig& config : calibration_models(Device::kCpu)) {
    for (const RecordedOperator& call : operators_of_plan(config)) {
      measured.insert(class_of(call));
    }
  }
  const std::vector<std::vector<std::string>> precisions = {
      {},
      kFloat32,
      kMxfp8,
      {kMxfp8[0], kMxfp8[1], "--quantize.linear.mx.recipe_name=fp8_blockwise",
       "--quantize.grouped_mm.mx.recipe_name=fp8_blockwise"},
      {"--model.converters=quantize.linear.mx", kMxfp8[1]},
      {"--model.converters=quantize.grouped_mm.mx"}};
  const std::vector<std::vector<std::string>> models = {
      {},
      kRecomputed,
      {"--activation_checkpoint.mode=selective"},
      {"--model.args.q_lora_rank=32"},
      {"--model.args.num_shared_experts=0"},
      {"--model.args.num_mtp_modules=1"},
      {"--model.args.score_func=sigmoid", "--model.args.route_norm", "--model.args.n_expert_groups=4",
       "--model.args.n_limited_groups=2"},
      {"--model.args.seq_balance_loss_coeff=0.001"},
      {"--model.args.load_balance_coeff=0"},
      {"--model.args.n_dense_layers=3"}};
  for (const auto& precision : precisions) {
    for (const auto& model : models) {
      std::vector<std::string> overrides = precision;
      overrides.insert(overrides.end(), model.begin(), model.end());
      const JobConfig config = small_config(overrides);
      for (const RecordedOperator& call : operators_of_plan(config)) {
        EXPECT_TRUE(measured.contains(class_of(call)))
            << (model.empty() ? "" : model.front()) << " " << (precision.empty() ? "" : precision.back()) << ": "
            << class_of(call);
      }
    }
  }
}

TEST(StepForecast, TheCalibrationOfRanksHasTheOperatorsOfMeshes) {
  Calibration calibration;
  const auto measure = [&](const JobConfig& config, std::int64_t num_ranks) {
    for (const RecordedOperator& call : operators_of_plan(config, num_ranks)) {
      calibration.operators[class_of(call)] = {.most_bytes = 1e12};
    }
  };
  for (const JobConfig& config : calibration_models(Device::kCpu)) measure(config, 1);
  for (const JobConfig& config : calibration_models_of_ranks(2)) measure(config, 2);
  const std::string of_mesh = "--parallelism.";
  const std::vector<std::vector<std::string>> meshes = {
      {},
      {of_mesh + "data_parallel_replicate_degree=2"},
      {of_mesh + "tensor_parallel_degree=2"},
      {of_mesh + "context_parallel_degree=2"},
      {of_mesh + "pipeline_parallel_degree=2"},
      {of_mesh + "pipeline_parallel_degree=2", of_mesh + "pipeline_parallel_schedule=ZBVZeroBubble"},
      {of_mesh + "expert_parallel_degree=2", of_mesh + "expert_parallel_comm_backend=direct"},
      {of_mesh + "expert_parallel_degree=2", of_mesh + "expert_parallel_comm_backend=standard"}};
  for (const auto& precision : {std::vector<std::string>{}, kFloat32, kMxfp8}) {
    for (const auto& mesh : meshes) {
      std::vector<std::string> overrides = precision;
      overrides.insert(overrides.end(), mesh.begin(), mesh.end());
      overrides.emplace_back("--training.global_batch_size=8");
      for (const RecordedOperator& call : operators_of_plan(small_config(overrides), 2)) {
        EXPECT_TRUE(calibration.find_time(call).has_value())
            << (mesh.empty() ? "" : mesh.back()) << " " << (precision.empty() ? "" : precision.back()) << ": "
            << class_of(call);
      }
    }
  }
}

// The calibration's models have experts that three ranks cannot share. Their pipelines are measured all the same.
TEST(StepForecast, TheCalibrationOfThreeRanksHasTheOperatorsOfAPipeline) {
  std::set<std::string> measured;
  const auto measure = [&](const JobConfig& config, std::int64_t num_ranks) {
    for (const RecordedOperator& call : operators_of_plan(config, num_ranks)) measured.insert(class_of(call));
  };
  for (const JobConfig& config : calibration_models(Device::kCpu)) measure(config, 1);
  for (const JobConfig& config : calibration_models_of_ranks(3)) measure(config, 3);
  const JobConfig pipeline = small_config(
      {"--parallelism.pipeline_parallel_degree=3", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
       "--model.args.n_layers=6", "--training.local_batch_size=6", "--training.global_batch_size=6"});
  for (const RecordedOperator& call : operators_of_plan(pipeline, 3)) {
    EXPECT_TRUE(measured.contains(class_of(call))) << class_of(call);
  }
}

TEST(StepForecast, AClassThatWasNotMeasuredIsNamed) {
  const JobConfig config = small_config({});
  const std::vector<RecordedOperator> operators = operators_of_plan(config);
  Calibration calibration = all_classes_at(operators, 1e-3);
  calibration.path = "here.json";
  const std::string missing = class_of(operators.back());
  calibration.operators.erase(missing);
  expect_error([&] { forecast_with(config, calibration); }, {"here.json", missing});
}

TEST(StepForecast, WorkOfAttentionExpertsAndSums) {
  for (const auto& overrides : {kFloat32, kMxfp8}) {
    const JobConfig config = small_config(overrides);
    const TrainingStep step(config);
    const ModelConfig& model = config.model.args;
    std::map<std::string, double> flop;
    double num_layers = 0.0, qk = 0.0, v = 0.0;
    for (const RecordedOperator& call : step.dry_run().operators()) {
      const double of_call = work_of(call)[OperatorWork::kFlop];
      flop[call.name] += of_call;
      if (call.name.starts_with("grouped_")) flop["experts"] += of_call;
      if (call.name == "gemm" || call.name.starts_with("linear_")) flop["dense"] += of_call;
      if (call.name == "mla_attention_forward") {
        num_layers += 1.0;
        qk = static_cast<double>(call.operands[0].shape[1]);
        v = static_cast<double>(call.operands[4].shape[1]);
      }
      if (!call.accumulates) continue;  // such a call also reads its output
      RecordedOperator plain = call;
      plain.accumulates = false;
      const auto& output = call.operands.back();
      const auto num_bytes = output.shape.num_elements() * static_cast<std::int64_t>(size_of(output.dtype));
      EXPECT_DOUBLE_EQ(work_of(call).bytes() - work_of(plain).bytes(), output.used * static_cast<double>(num_bytes))
          << call.name;
    }
    ASSERT_GT(num_layers, 0.0);
    constexpr double kTokens = 2 * 32, kSeq = 32;  // of small_config(); a query sees half of the keys on average
    EXPECT_DOUBLE_EQ(flop["mla_attention_forward"], num_layers * kTokens * kSeq * (qk + v));
    EXPECT_DOUBLE_EQ(flop["mla_attention_backward"], num_layers * kTokens * kSeq * (3 * qk + 2 * v));
    double weights = 0.0, experts = 0.0;
    const Parameters& parameters = step.model().parameters();
    for (ParamId id = 0; id < parameters.size(); ++id) {
      const auto& spec = parameters.spec(id);
      const auto size = static_cast<double>(spec.shape.num_elements());
      if (spec.shape.num_dims() == 3) experts += size;
      if (spec.shape.num_dims() == 2 && spec.name != "tok_embeddings.weight") weights += size;
    }
    EXPECT_DOUBLE_EQ(flop["dense"], 6.0 * weights * kTokens);
    for (const char* product : {"grouped_linear_wgrad", "grouped_linear_dgrad"}) {
      EXPECT_DOUBLE_EQ(flop[product], flop["grouped_linear_forward"]) << product;
    }
    const double per_token = experts / static_cast<double>(model.num_experts) * static_cast<double>(model.top_k);
    if (overrides == kFloat32) {
      EXPECT_DOUBLE_EQ(flop["experts"], 6.0 * per_token * kTokens);
    }
  }
}

}  // namespace
}  // namespace tessera
