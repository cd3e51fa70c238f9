// Tests the training loop: resuming, stopping, failing, and what it writes.
#include "run/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pty.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "base/json.h"
#include "base/log.h"
#include "run/memory_advice.h"
#include "run/record/expert_loads.h"
#include "run/record/run_info.h"
#include "tensor/parallel.h"
#include "tests/comm/ranks.h"
#include "tests/data/support.h"
#include "tests/data/tokenizer_json_support.h"
#include "tests/full_disk.h"
#include "tests/log_of.h"
#include "tests/run/run_config.h"

namespace tessera {
namespace {

using comm_test::on_ranks;
using data::TemporaryFolder;

const volatile std::sig_atomic_t kNoSignal = 0;

/// Returns the configuration of a model with every feature. It is small enough for dozens of runs.
JobConfig small_config(const TemporaryFolder& scratch, const std::vector<std::string>& overrides = {}) {
  static const char* const kToml = R"(
[model.args]
vocab_size = 258
dim = 32
inter_dim = 48
moe_inter_dim = 16
n_layers = 3
n_dense_layers = 1
n_heads = 2
num_experts = 8
num_shared_experts = 1
top_k = 2
score_func = "sigmoid"
route_norm = true
n_expert_groups = 4
n_limited_groups = 2
seq_balance_loss_coeff = 0.001
q_lora_rank = 20
kv_lora_rank = 24
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
attn_mask_type = "block_causal"
num_mtp_modules = 1
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 32
steps = 8
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 4
[metrics]
log_freq = 1
)";
  return run_config(scratch, kToml, overrides);
}

struct Outcome {
  std::vector<double> losses;  // total_loss and grad_norm in turn
  std::vector<float> weights;  // masters, moments and buffers
};

Outcome train(const JobConfig& config) {
  Trainer trainer(config);
  Outcome run;
  trainer.set_step_callback([&](std::int64_t, const StepResult& result) {
    run.losses.insert(run.losses.end(), {result.total_loss, result.grad_norm});
  });
  EXPECT_EQ(trainer.run(kNoSignal), 0);
  const Parameters& parameters = trainer.model().parameters();
  for (const Tensor& tensor :
       {parameters.all_masters(), parameters.optimizer_tensor(0), parameters.optimizer_tensor(1)}) {
    run.weights.insert(run.weights.end(), tensor.data<float>(), tensor.data<float>() + tensor.num_elements());
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    const Tensor tensor = parameters.buffer(id);
    run.weights.insert(run.weights.end(), tensor.data<float>(), tensor.data<float>() + tensor.num_elements());
  }
  return run;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// The precision in which layers compute.
struct ComputedIn {
  const char* name;
  std::vector<std::string> overrides;

  friend void PrintTo(const ComputedIn& precision, std::ostream* out) { *out << precision.name; }
};

/// Returns keys that quantize everything possible, in a model whose sizes are multiples of blocks.
std::vector<std::string> quantized(const std::string& recipe) {
  return {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx",
          "--quantize.linear.mx.recipe_name=" + recipe,
          "--quantize.grouped_mm.mx.recipe_name=" + recipe,
          "--model.args.inter_dim=96",
          "--model.args.moe_inter_dim=32",
          "--model.args.q_lora_rank=32",
          "--model.args.kv_lora_rank=32",
          "--model.args.qk_rope_head_dim=32"};
}

/// Makes the next step of a run infinite.
void spoil(Model& model) {
  Parameters& parameters = model.parameters();
  for (ParamId id = 0; id < parameters.size(); ++id) {
    if (parameters.spec(id).name != "layers.1.moe.experts.w2") continue;
    Tensor master = parameters.master(id);
    std::fill_n(master.data<float>(), master.num_elements(), std::numeric_limits<float>::infinity());
  }
  Arena no_scratch(0);
  model.refresh_weights({.arena = &no_scratch});
}

class TrainerTest : public ::testing::TestWithParam<ComputedIn> {
 protected:
  TrainerTest() { data::make_dataset(scratch_, 400, 3000, 0.1); }
  JobConfig config(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all = GetParam().overrides;
    all.insert(all.end(), overrides.begin(), overrides.end());
    return small_config(scratch_, all);
  }
  std::filesystem::path outputs() const { return scratch_ / "outputs"; }
  void clear_outputs() const { std::filesystem::remove_all(outputs()); }

  TemporaryFolder scratch_;
};

TEST_P(TrainerTest, ResumedRunEqualsStraightRun) {
  const Outcome straight = train(config());
  ASSERT_EQ(straight.losses.size(), 16u);
  EXPECT_LT(straight.losses[14], straight.losses[0]);

  clear_outputs();
  // A signal ends this run after step 4. Its learning rates are those of 8 steps.
  volatile std::sig_atomic_t signal = 0;
  Outcome first;
  {
    Trainer trainer(config());
    trainer.set_step_callback([&](std::int64_t step, const StepResult& result) {
      first.losses.insert(first.losses.end(), {result.total_loss, result.grad_norm});
      if (step == 4) signal = SIGTERM;
    });
    EXPECT_EQ(trainer.run(signal), SIGTERM);
  }
  const Outcome second = train(config());
  std::vector<double> joined = first.losses;
  joined.insert(joined.end(), second.losses.begin(), second.losses.end());
  EXPECT_EQ(joined, straight.losses);
  EXPECT_TRUE(same_bits(second.weights, straight.weights));
}

TEST_P(TrainerTest, RunsRepeatBitForBitInEveryRecomputeMode) {
  const Outcome one = train(config());
  for (const char* mode : {"none", "selective", "full"}) {
    clear_outputs();
    const Outcome other = train(config({fmt::format("--activation_checkpoint.mode={}", mode)}));
    EXPECT_EQ(one.losses, other.losses) << mode;
    EXPECT_TRUE(same_bits(one.weights, other.weights)) << mode;
  }
}

TEST_P(TrainerTest, StepsAllocateNothing) {
  JobConfig job = config({"--checkpoint.enable=false"});
  job.model.args.eos_id = 257;
  TrainingStep step(job);
  step.allocate();
  std::vector<Batch> batches;
  while (batches.size() < 2) batches.push_back(step.make_batch());
  std::vector<std::int32_t> tokens(2 * 33);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * 37 % 256);
  for (Batch& batch : batches) batch.fill(tokens);
  step.run(1, batches);
  const std::size_t before = mallinfo2().uordblks;
  // Step 4 measures quantization errors, which costs most.
  for (std::int64_t s = 2; s < 6; ++s) step.run(s, batches, s == 4);
  // The GEMM library's call objects, some hundred bytes, move between the threads' caches of the heap. The smallest
  // activation of these four steps takes 4096 bytes.
  EXPECT_LT(mallinfo2().uordblks, before + 4096);
  EXPECT_EQ(step.context().arena->used(), 0u);
  EXPECT_LE(step.context().arena->peak(), step.memory_plan().activations);
  EXPECT_GE(step.context().arena->peak(), step.memory_plan().activations * 99 / 100);
  EXPECT_EQ(step.memory_plan().batches, batches[0].num_bytes() + batches[1].num_bytes());
}

TEST_P(TrainerTest, NonFiniteNumbersStopTheRunAndAreNamed) {
  // The save of step 4 may be in flight. The run still completes it.
  Trainer trainer(config({"--metrics.log_freq=100", "--checkpoint.async_mode=async"}));
  trainer.set_step_callback([&](std::int64_t step, const StepResult&) {
    if (step == 5) spoil(trainer.model());
  });
  expect_error([&] { trainer.run(kNoSignal); }, {"step 6", "layers.1"});
  EXPECT_EQ(checkpoint_steps(outputs() / "checkpoint"), std::vector<std::int64_t>{4});
  // The failed step is logged, although it is not due.
  std::ifstream metrics(outputs() / "metrics.jsonl");
  nlohmann::json last;
  for (std::string line; std::getline(metrics, line);) {
    auto json = nlohmann::json::parse(line);
    if (json.contains("loss")) last = std::move(json);
  }
  EXPECT_EQ(last["step"], 6);
  EXPECT_TRUE(last["loss"].is_null());
  EXPECT_TRUE(last["grad_norm"].is_null());
  EXPECT_NO_THROW(verify_checkpoint(outputs() / "checkpoint" / "step-4"));
}

INSTANTIATE_TEST_SUITE_P(Types, TrainerTest,
                         ::testing::Values(ComputedIn{"float32", {"--training.mixed_precision_param=float32"}},
                                           ComputedIn{"bfloat16", {}}, ComputedIn{"mxfp8", quantized("mxfp8")},
                                           ComputedIn{"mxfp8_wgrad_with_hp", quantized("mxfp8_wgrad_with_hp")},
                                           ComputedIn{"mxfp8_emulated", quantized("mxfp8_emulated")},
                                           ComputedIn{"fp8_blockwise", quantized("fp8_blockwise")}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

class Trained : public ::testing::Test {
 protected:
  Trained() { data::make_dataset(scratch_, 400, 3000, 0.1); }
  std::filesystem::path checkpoints() const { return scratch_ / "outputs" / "checkpoint"; }
  /// Returns the values of `key` in metrics.jsonl, line by line.
  std::vector<double> logged(const std::string& key) const {
    std::vector<double> values;
    std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains(key)) values.push_back(json[key]);
    }
    return values;
  }

  TemporaryFolder scratch_;
};

TEST_F(Trained, WritesMetricsValidationAndTraces) {
  train(small_config(scratch_, {"--validation.enable", "--validation.freq=3", "--validation.steps=2",
                                "--profiling.enable_profiling", "--profiling.profile_freq=4"}));
  std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
  std::vector<std::int64_t> steps, validated, saved;
  std::vector<double> last_loads;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("validation_loss")) {
      EXPECT_GT(json["validation_loss"].get<double>(), 0.0);
      validated.push_back(json["step"]);
      continue;
    }
    if (json.contains("checkpoint_seconds")) {
      EXPECT_GT(json["checkpoint_stall_seconds"].get<double>(), 0.0);
      EXPECT_LE(json["checkpoint_stall_seconds"], json["checkpoint_seconds"]);
      saved.push_back(json["step"]);
      continue;
    }
    steps.push_back(json["step"]);
    EXPECT_GT(json["loss"].get<double>(), 0.0);
    EXPECT_GE(json["expert_load_max_over_mean"].get<double>(), 1.0);
    EXPECT_EQ(json["expert_load_per_layer"].size(), 3u);
    last_loads = json["expert_load_per_layer"].get<std::vector<double>>();
    EXPECT_GT(json["tokens_per_second"].get<double>(), 0.0);
    const auto& seconds = json["seconds"];
    EXPECT_GE(json["step_seconds"].get<double>(), seconds["forward"].get<double>() + seconds["backward"].get<double>() +
                                                      seconds["optimizer"].get<double>());
    EXPECT_GT(json["mtp_loss"].get<double>(), 0.0);
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(validated, ::testing::ElementsAre(3, 6, 8));
  EXPECT_THAT(saved, ::testing::ElementsAre(4, 8));

  const ExpertLoads loads = read_expert_loads(scratch_ / "outputs");
  EXPECT_EQ(loads.step, 8);
  EXPECT_EQ(loads.tokens.size(), 3u);
  std::vector<double> max_over_mean;
  for (const auto& [layer, tokens] : loads.tokens) {
    const double mean = std::accumulate(tokens.begin(), tokens.end(), 0.0) / static_cast<double>(tokens.size());
    max_over_mean.push_back(std::ranges::max(tokens) / mean);
  }
  EXPECT_THAT(max_over_mean, ::testing::UnorderedPointwise(::testing::DoubleNear(1e-9), last_loads));
  for (const auto& [layer, tokens] : loads.tokens) EXPECT_GE(loads.busiest_rank(layer, std::ssize(tokens), 2), 1.0);

  const auto trace = nlohmann::json::parse(read_text_file(scratch_ / "outputs" / "profile_traces" / "step-8.json"));
  std::set<std::string> names;
  for (const auto& event : trace["traceEvents"]) names.insert(event["name"]);
  EXPECT_THAT(names, ::testing::IsSupersetOf({"step", "data", "attention.forward", "moe.backward", "gemm", "adamw"}));
}

/// The loss is the mean over the first global batches of the validation split, the same ones each time. Weights do not
/// change here.
TEST_F(Trained, ValidationIsOfTheFirstSequencesOfItsSplit) {
  JobConfig config =
      small_config(scratch_, {"--validation.enable", "--validation.freq=3", "--validation.steps=3", "--optimizer.lr=0",
                              "--model.args.load_balance_coeff=0", "--checkpoint.enable=false"});
  train(config);
  set_document_end(config);
  TrainingStep step(config);
  step.allocate();
  data::Loader loader({.dataset = scratch_ / "dataset",
                       .split = "val",
                       .seq_len = 32,
                       .local_batch_size = 2,
                       .vocab_size = 258,
                       .shuffle = false});
  Batch batch = step.make_batch();
  std::vector<std::int32_t> tokens(2 * 33);
  double expected = 0.0;
  for (int i = 0; i < 6; ++i) {  // 3 batches of 2 micro-batches each
    loader.next(tokens);
    batch.fill(tokens);
    expected += step.evaluate(batch) / 6;
  }
  const std::vector<double> losses = logged("validation_loss");
  ASSERT_EQ(losses.size(), 3u);
  for (const double loss : losses) EXPECT_NEAR(loss, expected, 1e-12 * expected);
}

TEST_F(Trained, AValidationOfMoreThanItsSplitIsToldOf) {
  const auto log = [&](std::uint64_t num_steps) {
    const JobConfig config =
        small_config(scratch_, {"--validation.enable", fmt::format("--validation.steps={}", num_steps)});
    return log_of([&] { const Trainer trainer(config); });
  };
  const data::Loader loader({.dataset = scratch_ / "dataset",
                             .split = "val",
                             .seq_len = 32,
                             .local_batch_size = 2,
                             .vocab_size = 258,
                             .shuffle = false});
  const std::uint64_t num_whole = loader.num_samples() / 4;  // batches of training.global_batch_size
  EXPECT_THAT(log(num_whole), ::testing::Not(::testing::HasSubstr("validation split has")));
  EXPECT_THAT(log(num_whole + 1),
              ::testing::HasSubstr(fmt::format("but the validation split has {}", loader.num_samples())));
}

TEST_F(Trained, ValidationIsOfTheSameSequencesOnEveryMesh) {
  const auto losses = [&](int num_ranks, const std::vector<std::string>& mesh) {
    std::filesystem::remove_all(scratch_ / "outputs");
    std::vector<std::string> all = {"--validation.enable",      "--validation.freq=2",
                                    "--validation.steps=3",     "--training.mixed_precision_param=float32",
                                    "--training.steps=4",       "--checkpoint.enable=false",
                                    "--training.num_threads=1", "--model.args.num_mtp_modules=0"};
    all.insert(all.end(), mesh.begin(), mesh.end());
    const JobConfig config = small_config(scratch_, all);
    on_ranks(num_ranks, [&](Ranks& ranks) { Trainer(config, &ranks).run(kNoSignal); });
    return logged("validation_loss");
  };
  const std::vector<double> one = losses(1, {});
  ASSERT_EQ(one.size(), 2u);
  using Mesh = std::pair<int, std::vector<std::string>>;
  for (const auto& [num_ranks, mesh] :
       {Mesh{1, {"--training.local_batch_size=4"}}, Mesh{2, {"--parallelism.expert_parallel_degree=2"}},
        Mesh{4, {"--training.local_batch_size=1", "--parallelism.tensor_parallel_degree=2"}},
        Mesh{2, {"--parallelism.pipeline_parallel_degree=2"}}}) {
    const std::vector<double> many = losses(num_ranks, mesh);
    ASSERT_EQ(many.size(), one.size());
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(many[i], one[i], 1e-5 * one[i]) << mesh.back();
  }
}

// The logged rate is that of one rank.
TEST_F(Trained, TokensPerSecondAreOfOneOfTheRanks) {
  const JobConfig config =
      small_config(scratch_, {"--training.steps=2", "--checkpoint.enable=false", "--training.num_threads=1"});
  on_ranks(2, [&](Ranks& ranks) { Trainer(config, &ranks).run(kNoSignal); });
  const std::vector<double> rates = logged("tokens_per_second"), seconds = logged("step_seconds");
  ASSERT_EQ(rates.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(rates[i] * seconds[i], 4 * 32 / 2.0, 1e-6);
}

TEST_F(Trained, ThePlanOfAPipelineIsOfTheRankThatTakesMost) {
  const JobConfig config = small_config(
      scratch_,
      {"--parallelism.pipeline_parallel_degree=2", "--model.args.num_mtp_modules=0", "--training.num_threads=1",
       "--parallelism.module_fqns_per_model_part=tok_embeddings;layers.0,layers.1,layers.2,norm,output"});
  const PlannedRun run{config, Device::kCpu, resolve(config.mesh_degrees(), 4)};
  const std::vector<MemoryPlan> plans = memory_plans(run, Recompute::kNone, 2);
  ASSERT_GT(plans.at(1).total(), plans.at(0).total());
  ::testing::internal::CaptureStdout();
  on_ranks(4, [&](Ranks& ranks) { Trainer trainer(config, &ranks); });
  spdlog::default_logger()->flush();
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              ::testing::HasSubstr("memory of rank 2 (rank 1 of the pipeline), which takes most:"));
}

/// On a terminal a line of the log does not begin behind the progress bar.
TEST_F(Trained, TheProgressBarMakesRoomForTheLog) {
  int screen = -1, terminal = -1;
  ASSERT_EQ(openpty(&screen, &terminal, nullptr, nullptr, nullptr), 0);
  const int before = dup(STDERR_FILENO);
  const auto logger = spdlog::default_logger();
  dup2(terminal, STDERR_FILENO);
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("terminal", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  {
    Trainer trainer(small_config(scratch_, {"--metrics.log_freq=100", "--checkpoint.async_mode=disabled"}));
    trainer.set_step_callback([](std::int64_t step, const StepResult&) {
      if (step == 3) std::this_thread::sleep_for(std::chrono::milliseconds(150));  // the next step draws the bar
    });
    trainer.run(kNoSignal);
  }
  spdlog::set_default_logger(logger);
  dup2(before, STDERR_FILENO);
  close(before);
  close(terminal);
  std::string shown;  // a read fails after the last one
  for (char character = 0; read(screen, &character, 1) == 1;) shown += character;
  close(screen);
  const std::size_t saved = shown.find("saved "), bar = shown.rfind("training: 50%", saved);
  ASSERT_NE(bar, std::string::npos) << shown;
  EXPECT_THAT(shown.substr(bar, saved - bar), ::testing::HasSubstr("\r\033[K"));
}

/// Rank 0 has some layers only.
TEST_F(Trained, PrecisionsOfAPipelineAreOfTheStagesThatTheyName) {
  const JobConfig config =
      small_config(scratch_, {"--parallelism.pipeline_parallel_degree=2", "--model.args.num_mtp_modules=0",
                              "--training.num_threads=1", "--model.print_after_conversion"});
  const std::string log = log_of([&] { on_ranks(2, [&](Ranks& ranks) { Trainer trainer(config, &ranks); }); });
  EXPECT_THAT(log, ::testing::HasSubstr("precisions of the GEMMs of rank 0's stages of the pipeline"));
}

/// The metrics of the failed step cannot be written. The launcher still learns why the run ended.
TEST_F(Trained, AFullDiskDoesNotHideWhyAStepFailed) {
  Trainer trainer(small_config(scratch_, {"--checkpoint.enable=false"}));
  std::optional<FullDisk> full;
  trainer.set_step_callback([&](std::int64_t step, const StepResult&) {
    if (step != 2) return;
    spoil(trainer.model());
    full.emplace(1);
  });
  try {
    trainer.run(kNoSignal);
    ADD_FAILURE() << "no error";
  } catch (const NonFiniteStep& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("step 3"));
  }
}

/// A run that resumes does not load its initial weights again.
TEST_F(Trained, InitialWeightsAreOfTheFirstStartOnly) {
  train(small_config(scratch_));
  std::filesystem::rename(scratch_ / "outputs", scratch_ / "initial");
  const std::string initial = fmt::format("--checkpoint.initial_load_path={}", (scratch_ / "initial").string());
  const Outcome straight = train(small_config(scratch_, {initial}));
  const Outcome resumed = train(small_config(scratch_, {initial, "--checkpoint.load_step=4"}));
  EXPECT_TRUE(same_bits(resumed.weights, straight.weights));
}

/// run.json says which weights a run began with, whatever later starts are told.
TEST_F(Trained, ARunKeepsTheInitialWeightsThatItBeganWith) {
  const auto began_with = [&] {
    return nlohmann::json::parse(
               read_text_file(scratch_ / "outputs/run.json"))["config"]["checkpoint.initial_load_path"]
        .get<std::string>();
  };
  const std::string other = "--checkpoint.initial_load_path=/elsewhere", back = "--checkpoint.load_step=4";
  train(small_config(scratch_));
  train(small_config(scratch_, {other, back}));
  EXPECT_EQ(began_with(), "\"\"");
  std::filesystem::rename(scratch_ / "outputs", scratch_ / "initial");
  const std::string initial = (scratch_ / "initial").string();
  train(small_config(scratch_, {"--checkpoint.initial_load_path=" + initial}));
  for (int start = 0; start < 2; ++start) {  // the second one reads what the first one has saved
    train(small_config(scratch_, {back}));
    EXPECT_EQ(began_with(), '"' + initial + '"');
  }
}

/// Every key of the optimizer changes the result of a run.
TEST_F(Trained, KeysOfTheOptimizerTakeEffect) {
  const auto weights = [&](const std::string& key) {
    std::filesystem::remove_all(scratch_ / "outputs");
    return train(small_config(scratch_, {"--training.steps=4", key})).weights;
  };
  const std::vector<float> plain = weights("--training.max_norm=1.0");
  for (const char* key : {"--optimizer.lr=1e-5", "--optimizer.beta1=0.5", "--optimizer.beta2=0.5",
                          "--optimizer.eps=0.01", "--optimizer.weight_decay=0", "--training.max_norm=0.001"}) {
    EXPECT_FALSE(same_bits(weights(key), plain)) << key;
  }
}

TEST_F(Trained, ResumingDropsMetricsOfStepsThatRunAgain) {
  const std::vector<std::string> validates = {"--validation.enable", "--validation.freq=2", "--validation.steps=1"};
  train(small_config(scratch_, validates));
  std::vector<std::string> resumes = validates;
  resumes.emplace_back("--checkpoint.load_step=4");
  train(small_config(scratch_, resumes));
  std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
  std::map<std::string, std::vector<std::int64_t>> steps;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    for (const char* kind : {"loss", "validation_loss", "checkpoint_seconds"}) {
      if (json.contains(kind)) steps[kind].push_back(json["step"]);
    }
  }
  EXPECT_THAT(steps["loss"], ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(steps["validation_loss"], ::testing::ElementsAre(2, 4, 6, 8));
  EXPECT_THAT(steps["checkpoint_seconds"], ::testing::ElementsAre(4, 8));
}

TEST_F(Trained, KeepsTheLatestCheckpoints) {
  train(small_config(scratch_, {"--checkpoint.interval=1", "--checkpoint.keep_latest_k=3"}));
  EXPECT_THAT(checkpoint_steps(checkpoints()), ::testing::ElementsAre(6, 7, 8));
}

/// The run went back, so its last save is not the one of the highest step.
TEST_F(Trained, TheCheckpointJustSavedStays) {
  train(small_config(scratch_));
  train(small_config(scratch_, {"--checkpoint.load_step=4", "--training.steps=5", "--checkpoint.keep_latest_k=1"}));
  EXPECT_THAT(checkpoint_steps(checkpoints()), ::testing::ElementsAre(5, 8));
}

/// Checkpoints of later steps take no place from those that the run saves after it went back. The one that it went back
/// to is deleted like any other.
TEST_F(Trained, ARunThatWentBackKeepsItsOwnCheckpoints) {
  train(small_config(scratch_, {"--checkpoint.interval=1"}));
  const auto go_back = [&](const char* steps) {
    train(small_config(scratch_,
                       {"--checkpoint.load_step=2", steps, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=3"}));
    return checkpoint_steps(checkpoints());
  };
  EXPECT_THAT(go_back("--training.steps=4"), ::testing::ElementsAre(2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(go_back("--training.steps=5"), ::testing::ElementsAre(3, 4, 5, 6, 7, 8));
}

/// Old checkpoints that cannot be deleted are no reason to lose the run: here, another program has made a link in the
/// way of a folder that prune_checkpoints() must rename.
TEST_F(Trained, ASaveSucceedsEvenIfOldCheckpointsStay) {
  const std::string log = log_of([&] {
    Trainer trainer(small_config(scratch_));
    std::filesystem::create_directories(checkpoints() / "step-3.replaced");
    std::filesystem::create_symlink("step-3", checkpoints() / "step-3");
    EXPECT_EQ(trainer.run(kNoSignal), 0);
    spdlog::default_logger()->flush();
  });
  EXPECT_THAT(log, ::testing::ContainsRegex("step-3': Too many levels of symbolic links; step 8 is saved"));
  EXPECT_EQ(verify_checkpoint(checkpoints() / "step-8").step, 8);
}

TEST_F(Trained, RefusesACheckpointOfAnotherRun) {
  train(small_config(scratch_));
  const auto refused = [&](const std::string& override_text, const std::vector<std::string>& parts) {
    expect_error([&] { Trainer trainer(small_config(scratch_, {override_text})); }, parts);
  };
  refused("--model.args.dim=48", {"model.args.dim = 32", "this run has 48"});
  refused("--model.args.route_scale=2.0", {"model.args.route_scale"});
  refused("--training.mixed_precision_param=float32", {"mixed_precision_param"});
  refused("--debug.seed=1", {"debug.seed"});
  refused("--training.seq_len=16", {"sequences of 32 tokens", "training.seq_len is 16"});
  refused("--checkpoint.load_step=5", {"step-5", "4, 8"});
}

/// The other dataset may have another tokenizer, too. Then model.args.eos_id also differs, which nobody has set.
TEST_F(Trained, RefusesToGoOnWithAnotherDataset) {
  train(small_config(scratch_));
  const std::filesystem::path first = scratch_ / "first", dataset = scratch_ / "dataset";
  std::filesystem::rename(dataset, first);
  const auto refused = [&](const std::vector<std::string>& parts) {
    const std::string message = expect_error([&] { Trainer trainer(small_config(scratch_)); }, parts);
    EXPECT_EQ(message.find("eos_id"), std::string::npos) << message;
  };
  const auto checksum = [](const std::filesystem::path& folder) {
    return to_hex(data::split_checksum(data::read_manifest(folder), "train"));
  };
  data::make_dataset(scratch_, 401, 3000, 0.1);
  refused({"step-8", "another dataset", "training.dataset_path is '" + dataset.string(), checksum(first),
           checksum(dataset), "another job.dump_folder"});

  nlohmann::json tokenizer = data::small_tokenizer();
  nlohmann::json& vocab = tokenizer["model"]["vocab"];
  for (const char* token : {"\u0120", "ab", "bc", "abc", "\u0120a"}) vocab.erase(token);
  vocab["<s>"] = 256;
  vocab["</s>"] = 32;
  tokenizer["model"]["merges"] = nlohmann::json::array();
  tokenizer["added_tokens"] = {data::added_token(256, "<s>", true), data::added_token(32, "</s>", true)};
  data::prepare_dataset({.inputs = {scratch_ / "in.jsonl"},
                         .tokenizer = data::write_file(scratch_ / "tokenizer.json", tokenizer.dump()),
                         .output = dataset,
                         .val_fraction = 0.1,
                         .overwrite = true});
  refused({"another dataset", "tokenizer bytes, EOS 257", "tokenizer huggingface, EOS 32"});
}

/// The router's bias stands still, and tokens after the next have a smaller weight, as in DeepSeek-V3's last phase.
TEST_F(Trained, WhatChangesInTheCourseOfARunMayChangeWhereItGoesOn) {
  train(small_config(scratch_));
  const Outcome on =
      train(small_config(scratch_, {"--training.steps=10", "--model.args.load_balance_coeff=0",
                                    "--model.args.mtp_loss_weight=0", "--model.args.seq_balance_loss_coeff=0"}));
  EXPECT_EQ(on.losses.size(), 4u);
  const auto changed = nlohmann::json::parse(read_text_file(scratch_ / "outputs" / "run.json"))["changed"];
  EXPECT_EQ(changed["model.args.mtp_loss_weight"], (nlohmann::json{"0.3", "0.0 at step 9"}));
}

/// The length of the sequences decides whether RoPE is scaled. It may differ from that of the weights.
TEST_F(Trained, WeightsWithYarnInARunWithoutAreWarnedOf) {
  train(small_config(scratch_, {"--model.args.original_seq_len=16"}));
  std::filesystem::rename(scratch_ / "outputs", scratch_ / "initial");
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {fmt::format("--checkpoint.initial_load_path={}", (scratch_ / "initial").string())};
    all.insert(all.end(), more.begin(), more.end());
    return small_config(scratch_, all);
  };
  const auto output = [&](const std::string& original_seq_len) {
    ::testing::internal::CaptureStdout();
    { Trainer trainer(with({"--model.args.original_seq_len=" + original_seq_len})); }
    spdlog::default_logger()->flush();
    return ::testing::internal::GetCapturedStdout();
  };
  EXPECT_THAT(output("32"), ::testing::HasSubstr("are for 32 tokens with YaRN; training.seq_len = 32"));
  EXPECT_THAT(output("31"), ::testing::HasSubstr("this run has original_seq_len = 31"));
  EXPECT_THAT(output("16"), ::testing::Not(::testing::HasSubstr("the weights in")));
}

TEST_F(Trained, ValidationDataOfAnotherTokenizerAreRefused) {
  const std::filesystem::path other = scratch_ / "other";
  std::filesystem::copy(scratch_ / "dataset", other);
  const auto validated_on_other = [&] {
    Trainer trainer(small_config(scratch_, {"--validation.enable", "--validation.dataset_path=" + other.string()}));
  };
  EXPECT_NO_THROW(validated_on_other());
  data::Manifest manifest = data::read_manifest(other);
  ++manifest.tokenizer_checksum;
  data::write_manifest(other, manifest);
  expect_error(validated_on_other, {other.string(), "another tokenizer"});
}

/// A signal that arrives when all is done does not turn a run that ended well into a failed one.
TEST_F(Trained, ASignalInTheLastStepIsTooLate) {
  const volatile std::sig_atomic_t signal = SIGTERM;
  EXPECT_EQ(Trainer(small_config(scratch_)).run(signal), SIGTERM);  // after step 1
  EXPECT_EQ(Trainer(small_config(scratch_, {"--training.steps=2"})).run(signal), 0);
}

TEST_F(Trained, TheLastValidationIsMadeUpFor) {
  const JobConfig config =
      small_config(scratch_, {"--validation.enable", "--validation.steps=2", "--training.steps=1"});
  train(config);
  const std::vector<double> expected = logged("validation_loss");
  ASSERT_EQ(expected.size(), 1u);
  std::filesystem::remove_all(scratch_ / "outputs");
  const volatile std::sig_atomic_t signal = SIGTERM;
  EXPECT_EQ(Trainer(config).run(signal), SIGTERM);  // after step 1, in its validation
  EXPECT_TRUE(logged("validation_loss").empty());
  for (const int num_ranks : {1, 2}) {  // the second start finds the loss
    on_ranks(num_ranks, [&](Ranks& ranks) { EXPECT_EQ(Trainer(config, &ranks).run(kNoSignal), 0); });
    EXPECT_EQ(logged("validation_loss"), expected);
    EXPECT_EQ(logged("loss").size(), 1u);
  }
}

/// This validation would take hours.
TEST_F(Trained, ASignalOnOneRankEndsTheValidationAndSaves) {
  for (const char* num_steps : {"1", "8"}) {  // step 1 is the last step, or not
    std::filesystem::remove_all(scratch_ / "outputs");
    const JobConfig config =
        small_config(scratch_, {"--validation.enable", "--validation.freq=1", "--validation.steps=10000000",
                                "--training.num_threads=1", fmt::format("--training.steps={}", num_steps)});
    volatile std::sig_atomic_t signal = 0;
    const auto run = [&](Ranks& ranks) {
      Trainer trainer(config, &ranks);
      std::atomic<std::int64_t> step = 0;
      std::optional<std::jthread> sender;
      if (ranks.rank() == 1) {
        sender.emplace([&] {
          while (step == 0) std::this_thread::yield();
          std::this_thread::sleep_for(std::chrono::milliseconds(200));
          signal = SIGTERM;
        });
      }
      const int stopped_by = trainer.run(ranks.rank() == 1 ? signal : kNoSignal, &step);
      EXPECT_EQ(stopped_by, ranks.rank() == 1 ? SIGTERM : 0);
      EXPECT_EQ(step, 1);
    };
    const std::string log = log_of([&] { on_ranks(2, run); }), told = "stopped by signal 15 after step 1 of ";
    ASSERT_THAT(log, ::testing::HasSubstr(told));
    EXPECT_EQ(log.find(told), log.rfind(told)) << "one rank tells it";
    EXPECT_EQ(checkpoint_steps(checkpoints()), std::vector<std::int64_t>{1});
    EXPECT_TRUE(logged("validation_loss").empty());
  }
}

TEST_F(Trained, DamagedCheckpointsAreErrors) {
  train(small_config(scratch_));
  const auto path = checkpoints() / "step-8" / "model.safetensors";
  const auto size = std::filesystem::file_size(path);
  data::flip_bit(path, size / 2, 3);
  expect_error([&] { Trainer trainer(small_config(scratch_)); }, {"model.safetensors", "checksum", "load_step"});
  std::filesystem::resize_file(path, size - 1);
  expect_error([&] { Trainer trainer(small_config(scratch_)); }, {"model.safetensors", "truncated"});
  std::filesystem::remove(path);
  expect_error([&] { Trainer trainer(small_config(scratch_)); }, {"model.safetensors"});
  data::flip_bit(checkpoints() / "step-8" / "manifest.json", 0, 1);
  expect_error([&] { Trainer trainer(small_config(scratch_)); }, {"manifest.json"});
  EXPECT_NO_THROW(Trainer(small_config(scratch_, {"--checkpoint.load_step=4"})));
}

/// The last checkpoints are damaged, each in another way.
TEST_F(Trained, TheNewestWholeCheckpointIsNamedAndFallenBackTo) {
  const std::vector<float> straight = train(small_config(scratch_, {"--checkpoint.interval=2"})).weights;
  const auto file = checkpoints() / "step-8" / "optimizer.safetensors";
  data::flip_bit(file, std::filesystem::file_size(file) / 2, 3);
  std::filesystem::remove(checkpoints() / "step-6" / "manifest.json");
  const auto start = [&](int num_ranks, const std::vector<std::string>& more) {
    on_ranks(num_ranks, [&](Ranks& ranks) { Trainer trainer(small_config(scratch_, more), &ranks); });
  };
  for (const int num_ranks : {1, 2}) {
    expect_error([&] { start(num_ranks, {}); }, {"step-8/optimizer.safetensors", "has the checksum",
                                                 "--checkpoint.load_step=4", "--checkpoint.fallback"});
    expect_error(
        [&] {
          start(num_ranks, {"--checkpoint.load_step=6", "--checkpoint.fallback"});
        },
        {"step-6", "no manifest.json", "--checkpoint.load_step=4"});
  }
  ::testing::internal::CaptureStdout();
  start(2, {"--checkpoint.fallback"});
  const std::vector<float> resumed = train(small_config(scratch_, {"--checkpoint.fallback"})).weights;
  spdlog::default_logger()->flush();
  const std::string log = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(log, ::testing::HasSubstr("THE RUN GOES BACK TO STEP 4: THE CHECKPOINT OF STEP 8 IS DAMAGED"));
  EXPECT_THAT(log, ::testing::ContainsRegex("step 8: .*has the checksum .*\n.*step 6: .*step-6' has no manifest.json"));
  EXPECT_TRUE(same_bits(resumed, straight));
  EXPECT_EQ(verify_checkpoint(checkpoints() / "step-8").step, 8);  // saved again
  for (const char* step : {"step-2", "step-4", "step-8"})
    std::filesystem::remove(checkpoints() / step / "manifest.json");
  expect_error([&] { start(1, {}); }, {"no other one is whole"});
  expect_error([&] { start(1, {"--checkpoint.fallback"}); }, {"no checkpoint in", "is whole", "step-2"});
}

TEST_F(Trained, TheLastCheckpointMayHoldTheWeightsAlone) {
  const auto config = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides = {"--checkpoint.last_save_model_only", "--training.steps=6"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return small_config(scratch_, overrides);
  };
  // Outcome::weights begins with the masters. Moments, which are twice as many, follow.
  const auto masters = [](std::vector<float> all) {
    all.resize(all.size() / 4);
    return all;
  };
  const std::vector<float> straight = masters(train(config({})).weights);
  EXPECT_TRUE(std::filesystem::exists(checkpoints() / "step-4" / "optimizer.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "step-6" / "optimizer.safetensors"));
  EXPECT_FALSE(verify_checkpoint(checkpoints() / "step-6").files.contains("optimizer.safetensors"));
  EXPECT_TRUE(same_bits(masters(train(config({})).weights), straight));  // there is nothing to do
  const auto longer = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides = {"--training.steps=8"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return config(overrides);
  };
  expect_error([&] { Trainer trainer(longer({})); },
               {"step-6", "holds the weights alone", "checkpoint.load_step", "initial_load_path"});
  EXPECT_NO_THROW(train(longer({"--checkpoint.load_step=4"})));
  std::filesystem::rename(scratch_ / "outputs", scratch_ / "before");
  on_ranks(2, [&](Ranks& ranks) {
    Trainer trainer(config({}), &ranks);
    const volatile std::sig_atomic_t no_signal = 0;
    trainer.run(no_signal);
  });
  EXPECT_EQ(verify_checkpoint(checkpoints() / "step-6").files.size(),
            verify_checkpoint(checkpoints() / "step-4").files.size() - 2);
}

/// A damaged checkpoint does not push a whole one out of checkpoint.keep_latest_k.
TEST_F(Trained, FallingBackKeepsWholeCheckpoints) {
  train(small_config(scratch_, {"--checkpoint.interval=2"}));
  data::flip_bit(checkpoints() / "step-8" / "model.safetensors", 5000, 3);
  train(small_config(scratch_, {"--checkpoint.interval=3", "--checkpoint.fallback", "--checkpoint.keep_latest_k=2",
                                "--training.steps=7"}));
  EXPECT_THAT(checkpoint_steps(checkpoints()), ::testing::ElementsAre(6, 7, 8));
}

/// A file that cannot be read may be whole. A run that falls back would replace it in the end.
TEST_F(Trained, DoesNotFallBackFromACheckpointThatCannotBeRead) {
  train(small_config(scratch_));
  const auto start = [&](int num_ranks) {
    on_ranks(num_ranks,
             [&](Ranks& ranks) { Trainer trainer(small_config(scratch_, {"--checkpoint.fallback"}), &ranks); });
  };
  for (const char* name : {"model.safetensors", "manifest.json"}) {
    const auto file = checkpoints() / "step-8" / name, whole = scratch_ / "whole";
    std::filesystem::rename(file, whole);
    std::filesystem::create_symlink(name, file);  // a link to itself
    for (const int num_ranks : {1, 2}) {
      const std::string message = expect_error([&] { start(num_ranks); }, {file.string(), "Too many levels"});
      EXPECT_EQ(message.find("damaged"), std::string::npos) << message;
    }
    std::filesystem::rename(whole, file);
  }
  EXPECT_NO_THROW(start(1));
}

/// A run does not fall back from a checkpoint that belongs to another run.
TEST_F(Trained, FallsBackFromDamageOnly) {
  train(small_config(scratch_));
  expect_error(
      [&] {
        Trainer trainer(small_config(scratch_, {"--checkpoint.fallback", "--debug.seed=1"}));
      },
      {"step-8", "debug.seed"});
}

TEST_F(Trained, TokensBeyondTheVocabularyAreErrors) {
  expect_error(
      [&] {
        Trainer trainer(small_config(scratch_, {"--model.args.vocab_size=200", "--model.args.eos_id=3"}));
      },
      {"200"});
}

TEST_F(Trained, TwoTrainersInOneFolderAreRefused) {
  const Trainer first(small_config(scratch_));
  expect_error([&] { Trainer second(small_config(scratch_)); }, {"outputs", "in use", "job.dump_folder"});
}

/// run.json says what a run was trained with, not what it was last started with.
TEST_F(Trained, ARunKeepsTheRecordOfWhatItWasTrainedWith) {
  const auto info = [&] { return read_text_file(scratch_ / "outputs" / "run.json"); };
  train(small_config(scratch_));
  const std::string written = info();
  train(small_config(scratch_, {"--optimizer.lr=0.5"}));  // no step is left to make
  EXPECT_EQ(info(), written);
  train(small_config(scratch_, {"--optimizer.lr=0.0001", "--checkpoint.load_step=4"}));
  const auto changed = nlohmann::json::parse(info())["changed"];
  EXPECT_EQ(changed, (nlohmann::json{{"optimizer.lr", {"0.0008", "0.0001 at step 5"}}}));
}

}  // namespace
}  // namespace tessera
