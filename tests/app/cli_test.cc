// Tests the program as a child process: exit statuses, messages, signals, and the memory that it announces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "device/cuda.h"
#include "ops/runtime/inventory.h"
#include "system/file_lock.h"
#include "tensor/parallel.h"
#include "tests/app/process.h"
#include "tests/data/support.h"
#include "tests/data/tokenizer_json_support.h"

namespace tessera {
namespace {

using app_test::Finished;
using app_test::Process;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Removes the log lines, which leaves the text that the command prints to standard output.
std::string without_log_lines(const std::string& output) {
  std::string kept;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("] info ") == std::string::npos && line.find("] warning ") == std::string::npos) kept += line + "\n";
  }
  return kept;
}

class Cli : public ::testing::Test {
 protected:
  Finished run(const std::vector<std::string>& arguments, const std::vector<std::string>& launcher = {}) {
    return Process(scratch_, arguments, RLIM_INFINITY, launcher).finish();
  }

  /// Returns the arguments of a small run on a dataset of bytes. The first call writes the dataset.
  std::vector<std::string> train_arguments(const std::vector<std::string>& more = {}) {
    if (!std::filesystem::exists(scratch_ / "dataset")) data::make_dataset(scratch_, 400, 3000, 0.1);
    std::vector<std::string> arguments = {"--training.seq_len=32", "--training.local_batch_size=2",
                                          "--training.steps=4", "--metrics.log_freq=1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return app_test::small_run(scratch_, arguments);
  }
  std::filesystem::path checkpoints() const { return scratch_ / "outputs" / "checkpoint"; }

  TemporaryFolder scratch_;
};

TEST_F(Cli, HelpOfEverySubcommand) {
  EXPECT_THAT(run({"--help"}).output, AllOf(HasSubstr("train"), HasSubstr("data"), HasSubstr("bench")));
  for (const std::vector<std::string>& command : {std::vector<std::string>{"train"},
                                                  {"bench"},
                                                  {"bench", "step"},
                                                  {"bench", "gemm"},
                                                  {"bench", "grouped"},
                                                  {"bench", "attention"},
                                                  {"bench", "quantize"},
                                                  {"bench", "operators"},
                                                  {"compare"},
                                                  {"quickstart"},
                                                  {"completion"},
                                                  {"launch"},
                                                  {"status"},
                                                  {"watch"},
                                                  {"report"},
                                                  {"convert"},
                                                  {"generate"},
                                                  {"data"},
                                                  {"data", "prepare"},
                                                  {"data", "tokenizer"},
                                                  {"data", "inspect"},
                                                  {"plan"},
                                                  {"plan", "schedule"},
                                                  {"plan", "memory"}}) {
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--help");
    const Finished finished = run(arguments);
    EXPECT_EQ(finished.status, 0);
    EXPECT_THAT(finished.output, AllOf(HasSubstr("--help"), HasSubstr(command.back())));
  }
  EXPECT_EQ(run({}).status, 2);
  EXPECT_EQ(run({"trian"}).status, 2);
}

TEST_F(Cli, BenchTimesSteps) {
  const auto step = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench",
                                          "step",
                                          "--steps=2",
                                          "--warmup=1",
                                          "--training.device=cpu",
                                          "--training.seq_len=32",
                                          "--training.local_batch_size=2",
                                          "--model.args.vocab_size=258",
                                          "--model.args.dim=32",
                                          "--model.args.n_layers=2",
                                          "--model.args.n_heads=2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const Finished timed = step({});
  ASSERT_EQ(timed.status, 0) << timed.output;
  const auto line = nlohmann::json::parse(timed.output);
  EXPECT_NEAR(line["tokens_per_s"].get<double>(), 64 / (1e-3 * line["step_ms"].get<double>()), 1e-3);
  EXPECT_GT(line["loss_first"].get<double>(), 4.0);
  EXPECT_GT(line["first_step_s"].get<double>(), 1e-3 * line["step_ms"].get<double>());
  EXPECT_TRUE(line["mfu"].is_null());
  EXPECT_FALSE(line.contains("gpu_idle_share"));
  data::write_file(scratch_ / "peak.toml", "[metrics]\npeak_tflops = 2.0\n");
  const auto of_peak = nlohmann::json::parse(step({(scratch_ / "peak.toml").string()}).output);
  EXPECT_DOUBLE_EQ(of_peak["mfu"].get<double>(), of_peak["tflops"].get<double>() / 2.0);

  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& part) {
    const Finished finished = run(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    EXPECT_THAT(finished.output, HasSubstr(part));
  };
  const std::string subcommands = "step, calibrate, world, gemm, grouped, attention, quantize, operators";
  refused({"bench"}, subcommands);
  refused({"bench", "configs/debugmodel.toml"}, subcommands);
  refused({"bench", "step", "--training.stepz=3"}, "training.steps");
  refused({"bench", "gemm", "grouped"}, "grouped");
  refused({"bench", "step", "--training.device=cpu", "--kernels"}, "on a CPU");
  refused({"bench", "step", "--routing=uniform"}, "--routing needs --cluster");
  // Files are looked at before the work. These steps would take minutes.
  const std::string folder = scratch_.path();
  refused({"bench", "step", "--steps=1000000", "--trace", folder}, "is a folder");
  refused({"bench", "step", "--steps=1000000", "--training.device=cpu", "--calibration=none.json"}, "none.json");
  refused({"bench", "calibrate", "--out", folder}, "is a folder");
  refused({"bench", "world", "--json", folder}, "is a folder");
}

TEST_F(Cli, BenchTablesNeedAGpu) {
  if (cuda::available()) GTEST_SKIP() << "there is a GPU";
  for (const char* table : {"gemm", "grouped", "attention", "quantize", "operators"}) {
    const Finished finished = run({"bench", table, "--json", (scratch_ / "rows.jsonl").string()});
    EXPECT_EQ(finished.status, 2) << finished.output;
    EXPECT_THAT(finished.output, HasSubstr(cuda::why_unavailable()));
    EXPECT_EQ(std::ranges::count(finished.output, '\n'), 1) << finished.output;
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "rows.jsonl"));
  }
}

#ifdef OLD_LIBRARIES  // a build with CUDA
TEST_F(Cli, ADriverThatIsTooOldIsToldOf) {
  const std::string old_driver = std::string("LD_LIBRARY_PATH=") + OLD_LIBRARIES + "/old_driver";
  const auto with_it = [&](const std::vector<std::string>& arguments) {
    return Process(scratch_, arguments, RLIM_INFINITY, {"/usr/bin/env", old_driver}).finish();
  };
  const std::string message = "the NVIDIA driver supports CUDA up to 12.4, this build needs ";
  const Finished doctor = with_it({"doctor"});
  EXPECT_EQ(doctor.status, 0);
  EXPECT_THAT(doctor.output, AllOf(HasSubstr("no GPU:    " + message), HasSubstr(": install a newer driver\n")));
  const Finished train = with_it(train_arguments({"--training.device=cuda"}));
  EXPECT_EQ(train.status, 2);
  EXPECT_THAT(train.output, HasSubstr(message));
  EXPECT_EQ(std::ranges::count(train.output, '\n'), 1) << train.output;
}

TEST_F(Cli, ACudnnThatIsTooOldIsToldOf) {
  if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  const char* path = std::getenv("LD_LIBRARY_PATH");
  const std::string old_cudnn =
      std::string("LD_LIBRARY_PATH=") + OLD_LIBRARIES + "/old_cudnn:" + (path == nullptr ? "" : path);
  const Finished finished =
      Process(scratch_, {"bench", "attention"}, RLIM_INFINITY, {"/usr/bin/env", old_cudnn}).finish();
  EXPECT_EQ(finished.status, 2) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("is too old: 9.18 or newer is needed"));
}
#endif

TEST(PeakTflops, AreThoseOfDataSheets) {
  EXPECT_EQ(cuda::peak_tflops("NVIDIA H100 80GB HBM3"), 989.5);
  EXPECT_EQ(cuda::peak_tflops("NVIDIA H200"), 989.5);
  EXPECT_EQ(cuda::peak_tflops("NVIDIA B200"), 2250.0);
  EXPECT_EQ(cuda::peak_tflops("NVIDIA H100 PCIe"), 0.0);  // it is slower than the SXM module
  EXPECT_EQ(cuda::peak_tflops(""), 0.0);
}

TEST_F(Cli, PlanSaysWhereMemoryGoes) {
  const std::vector<std::string> arguments = {"plan", "memory", "--training.seq_len=64", "--model.args.n_layers=2"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  };
  const Finished plain = with({});
  EXPECT_EQ(plain.status, 0) << plain.output;
  EXPECT_THAT(plain.output, AllOf(HasSubstr("none"), HasSubstr("selective"), HasSubstr("full"), Not(HasSubstr("fit"))));
  EXPECT_THAT(with({"--available=100"}).output, HasSubstr("fits 100.00GiB"));
  EXPECT_THAT(with({"--available=0.001"}).output, AllOf(HasSubstr("does not fit 0.00GiB"), HasSubstr("no mode fits")));
  EXPECT_EQ(with({"--device=tpu"}).status, 2);
  EXPECT_THAT(plain.output, Not(HasSubstr("windows")));
  EXPECT_THAT(plain.output, Not(HasSubstr("opies in memory")));
  const std::vector<std::string> copies = {"--checkpoint.enable", "--checkpoint.memory_interval=20"};
  EXPECT_THAT(with(copies).output, AllOf(HasSubstr("Copies in memory (checkpoint.memory_interval) take"),
                                         Not(HasSubstr("The copy that a checkpoint is written from"))));
  EXPECT_THAT(
      with({"--checkpoint.enable", "--checkpoint.async_mode=async"}).output,
      AllOf(HasSubstr("The copy that a checkpoint is written from takes up to"), Not(HasSubstr("opies in memory"))));
}

TEST_F(Cli, PlanTimeNeedsRates) {
  const auto time = [&](std::vector<std::string> more, int status = 2) {
    more.insert(more.begin(), {"plan", "time", "--model.args.n_layers=4"});
    const Finished finished = run(more);
    EXPECT_EQ(finished.status, status) << finished.output;
    return finished.output;
  };
  const std::string none = "--calibration=none.json", cluster = std::string("--cluster=") + CLUSTERS + "/h200.toml";
  EXPECT_THAT(time({none}), HasSubstr("there is no 'none.json'; `tessera bench calibrate --out none.json`"));
  EXPECT_THAT(time({none, "--device=cuda"}), HasSubstr("--calibration is for steps on a CPU"));
  EXPECT_THAT(time({none, "--parallelism.expert_parallel_degree=8"}),
              HasSubstr("--ranks is 1, but the mesh needs 8 ranks or a multiple of that; expected --ranks 8"));
  EXPECT_THAT(time({}), HasSubstr("give one of --calibration"));
  EXPECT_THAT(time({none, cluster}), HasSubstr("give one of --calibration"));
  if (!cuda::is_built()) {
    EXPECT_THAT(time({cluster}), HasSubstr("--cluster plans for GPUs. It needs none, but a build with CUDA"));
    return;
  }
  EXPECT_THAT(time({"--cluster=none.toml"}), HasSubstr("none.toml"));
  EXPECT_THAT(time({cluster, "--routing=random"}), HasSubstr("no routing 'random'"));
  EXPECT_THAT(time({cluster, "--loads=none.json"}), HasSubstr("there is no 'none.json'"));
  const std::string planned =
      time({cluster, "--ranks=16", "--parallelism.expert_parallel_degree=8", "--tokens=1e12",
            "--hours-between-failures=2", "--minutes-between-checkpoints=20", "--restart-minutes=14"},
           0);
  // Between checkpoints are t = 1/6 of the hours between failures. So a part t / (e^t - 1) / (1 + 14/120) trains.
  for (const char* part : {"16 x H200", "all_gather ep_shard", "combine ep", "tokens/s per GPU, by the errors", "days",
                           "with a failure every 2 hours and a checkpoint every 20.0 minutes, 82.3 % of that time"}) {
    EXPECT_THAT(planned, HasSubstr(part));
  }
  EXPECT_THAT(time({cluster, "--engine=none.toml"}), HasSubstr("none.toml"));
  EXPECT_THAT(time({none, "--engine=none.toml"}), HasSubstr("--tokens need --cluster"));
  EXPECT_THAT(time({none, "--routing=uniform"}), HasSubstr("--tokens need --cluster"));
  EXPECT_THAT(time({cluster, "--hours-between-failures=2"}), HasSubstr("--tokens"));
  const std::vector<std::string> failures = {cluster, "--tokens=1e12", "--hours-between-failures=2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), failures.begin(), failures.end());
    return more;
  };
  EXPECT_THAT(time(with({"--checkpoint.enable=false"})), HasSubstr("needs checkpoint.enable"));
  EXPECT_THAT(time(with({"--checkpoint.enable", "--checkpoint.interval=100000000"})), HasSubstr("never ends"));
  EXPECT_THAT(time(with({"--checkpoint.enable", "--checkpoint.interval=1000000", "--checkpoint.memory_interval=1"}), 0),
              HasSubstr("98.4 % of that time"));  // 2 minutes of restart for 2 hours
  EXPECT_THAT(time({cluster, "--device=cpu"}), HasSubstr("training.device is cpu"));
  EXPECT_THAT(
      time({cluster, "--parallelism.expert_parallel_degree=8", "--parallelism.expert_parallel_comm_backend=direct"}),
      HasSubstr("expected --ranks 8"));
  EXPECT_THAT(time({cluster, "--validation=none.json"}), HasSubstr("--html"));
  EXPECT_THAT(time({cluster, "--json"}, 0), HasSubstr("\"dollars_per_1e9_tokens\""));
}

TEST_F(Cli, PlanSearchWritesTheFastestLayout) {
  const std::string toml = (scratch_ / "fastest.toml").string();
  const Finished found = run({"plan", "search", std::string("--cluster=") + CLUSTERS + "/h200.toml", "--ranks=4",
                              "--training.seq_len=64", "--training.global_batch_size=8", "--out", toml});
  if (!cuda::is_built()) {
    EXPECT_EQ(found.status, 2);
    EXPECT_THAT(found.output, HasSubstr("needs none, but a build with CUDA: `make install PRESET=release`"));
    return;
  }
  EXPECT_EQ(found.status, 0) << found.output;
  EXPECT_THAT(found.output, AllOf(HasSubstr("layouts fit"), HasSubstr("ZBVZeroBubble"),
                                  HasSubstr("all GPUs equally fast"), HasSubstr("The fastest is in")));
  EXPECT_EQ(run({"plan", "memory", toml, "--ranks=4"}).status, 0);
  const Finished again =
      run({"plan", "search", toml, std::string("--cluster=") + CLUSTERS + "/h200.toml", "--ranks=4", "--out", toml});
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.output, HasSubstr("exists; --force replaces it"));
}

TEST_F(Cli, PlanSaysWhereMemoryOfManyRanksGoes) {
  const auto plan = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"plan", "memory", "--training.seq_len=64", "--model.args.n_layers=4"};
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  };
  const std::string experts = "--parallelism.expert_parallel_degree=8";
  const Finished direct =
      plan({"--ranks=8", experts, "--parallelism.expert_parallel_comm_backend=direct", "--available=0.001"});
  EXPECT_EQ(direct.status, 0) << direct.output;
  EXPECT_THAT(direct.output, AllOf(HasSubstr("a rank of 8: pipeline 1 x replicate 1 x shard 8"), HasSubstr("windows"),
                                   HasSubstr("does not fit"), HasSubstr("per rank")));
  EXPECT_THAT(plan({"--ranks=8", experts, "--parallelism.expert_parallel_comm_backend=direct",
                    "--parallelism.expert_parallel_ranks_per_domain=4"})
                  .output,
              HasSubstr("expert 8 in domains of 4"));
  const std::vector<std::string> copies = {"--ranks=2", "--checkpoint.enable", "--checkpoint.memory_interval=20"};
  EXPECT_THAT(plan(copies).output, HasSubstr("and two of the state of a rank on another node"));
  const Finished pipeline =
      plan({"--ranks=4", "--parallelism.pipeline_parallel_degree=4", "--training.global_batch_size=32"});
  EXPECT_EQ(pipeline.status, 0) << pipeline.output;
  EXPECT_THAT(pipeline.output, HasSubstr("pipeline rank"));
  // `plan memory` refuses bad values, and degrees that a run with these ranks would refuse.
  for (const std::string ranks : {"0", "-1", "many"}) EXPECT_EQ(plan({"--ranks=" + ranks}).status, 2) << ranks;
  for (const std::string gib : {"nan", "inf", "0"}) EXPECT_EQ(plan({"--available=" + gib}).status, 2) << gib;
  const std::map<std::string, std::string> refusals = {
      {"1", "--ranks is 1, but the mesh needs 8 ranks or a multiple of that; expected --ranks 8"},
      {"6", "--ranks is 6, but the mesh needs 8 ranks"},
      {"12", "parallelism.expert_parallel_degree is 8, which does not divide"}};
  for (const auto& [ranks, message] : refusals) {
    const Finished refused = plan({"--ranks=" + ranks, experts});
    EXPECT_EQ(refused.status, 2) << refused.output;
    EXPECT_THAT(refused.output, HasSubstr(message));
  }
  const Finished for_gpus =
      plan({"--ranks=8", "--device=cuda", experts, "--parallelism.expert_parallel_comm_backend=direct"});
  EXPECT_THAT(for_gpus.output, HasSubstr(cuda::is_built() ? "NCCL" : cuda::why_unavailable()));
}

TEST_F(Cli, PlanDrawsASchedule) {
  const std::vector<std::string> arguments = {"plan", "schedule", "--ranks", "2", "--micro-batches=4", "--schedule"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  };
  const Finished drawn = with({"1f1b", "--forward=1,1", "--svg", (scratch_ / "schedule.svg").string()});
  EXPECT_EQ(drawn.status, 0);
  EXPECT_EQ(drawn.output,
            "1F1B, 2 ranks, stages per rank: 1, 4 micro-batches\n"
            "\n"
            "rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---\n"
            "rank 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .\n"
            "\n"
            "makespan 15, bubble 20.0 %\n"
            "\n"
            "rank      bubble     activations at most\n"
            "0         20.0 %                       2\n"
            "1         20.0 %                       1\n");
  EXPECT_THAT(read_text_file(scratch_ / "schedule.svg"), HasSubstr("bubble 20.0 %, at most 2 stage activations"));
  EXPECT_THAT(with({"interleaved1f1b", "--stages-per-rank=3"}).output, HasSubstr("stages per rank: 3"));
  // The work is 4 micro-batches * 12, less 0.6 for each of 3 overlapped pairs. The idle time is (P - 1)(F&B + B - 3W) =
  // 5.4 + 4 - 6.
  EXPECT_THAT(
      with({"dualpipev", "--forward=2", "--backward-input=2", "--backward-weight=2", "--overlapped=0.9"}).output,
      HasSubstr("makespan 49.6,"));
  EXPECT_THAT(with({"ZBV", "--communication=0.5"}).output, HasSubstr("makespan 26.5,"));

  const auto refused = [&](const std::vector<std::string>& more, const std::string& part) {
    const Finished finished = with(more);
    EXPECT_EQ(finished.status, 2) << finished.output;
    EXPECT_THAT(finished.output, HasSubstr(part));
  };
  refused({"GPipe"}, "1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV");
  refused({"DualPipeV", "--stages-per-rank=3"}, "expected 2");
  refused({"ZBV", "--forward=1,2,3"}, "forward: 3 costs, expected 1 or 4");
  refused({"ZBV", "--forward=0"}, "--forward");
  refused({"ZBV", "--communication=-1"}, "--communication");
  data::write_file(scratch_ / "run.json", "{}");
  refused({"1F1B", "--svg=" + (scratch_ / "run.json").string()}, "run.json' belongs to a run");
  EXPECT_EQ(read_text_file(scratch_ / "run.json"), "{}");
  EXPECT_EQ(run({"plan", "schedule", "--schedule=1F1B", "--ranks=2"}).status, 2);
  EXPECT_EQ(run({"plan"}).status, 2);
}

TEST_F(Cli, PrintsAConfigThatItReads) {
  const Finished printed = run({"train", "--print-config", "--model.flavor=16B", "--training.steps", "12"});
  EXPECT_EQ(printed.status, 0);
  EXPECT_THAT(printed.output, AllOf(HasSubstr("steps = 12"), HasSubstr("dim = 2048")));
  data::write_file(scratch_ / "printed.toml", printed.output);
  EXPECT_EQ(run({"train", (scratch_ / "printed.toml").string(), "--print-config"}).output, printed.output);
}

TEST_F(Cli, BadInputExitsWithTwoAndLeavesNothing) {
  const auto refused = [&](const std::vector<std::string>& more, const std::vector<std::string>& parts) {
    const Finished finished = run(train_arguments(more));
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "outputs" / "metrics.jsonl"));
  };
  refused({"--training.stepz=3"}, {"training.stepz", "training.steps"});
  refused({"--model.args.top_k=9"}, {"top_k is 9", "num_experts = 8"});
  refused({"--training.steps=0"}, {"training.steps is 0"});
  refused({"--training.dataset_path=/nonexistent"}, {"/nonexistent"});
  refused({"--model.args.vocab_size=100"}, {"100"});
  refused({"--checkpoint.load_step=7"}, {"load_step is 7", "holds no checkpoint"});
  refused({"stray"}, {"stray"});
  EXPECT_EQ(run({"train", "/nonexistent.toml"}).status, 2);
}

TEST_F(Cli, TooFewRanksAreToldWithTheLineThatStartsEnough) {
  const auto message = [&](const std::vector<std::string>& more) {
    const Finished finished = run(train_arguments(more));
    EXPECT_EQ(finished.status, 2) << finished.output;
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "outputs"));
    return finished.output;
  };
  const std::string tp = message({"--parallelism.tensor_parallel_degree=2", "--job.description=two words"});
  EXPECT_THAT(tp, HasSubstr("1 rank was started, but the mesh needs 2 ranks or a multiple of that "
                            "(parallelism.tensor_parallel_degree = 2)"));
  EXPECT_EQ(tp.find("--allow-run-as-root") != std::string::npos, geteuid() == 0);
  EXPECT_THAT(tp, AllOf(HasSubstr("-np 2 " + std::string(TESSERA_BINARY) + " train "),
                        HasSubstr("'--job.description=two words'"), HasSubstr("srun --mpi=pmix -n 2 ")));
  EXPECT_THAT(message({"--parallelism.pipeline_parallel_degree=2", "--training.global_batch_size=8",
                       "--parallelism.pipeline_parallel_schedule=1F1B"}),
              HasSubstr("needs 2 ranks"));
  EXPECT_THAT(message({"--parallelism.context_parallel_degree=2"}), HasSubstr("needs 2 ranks"));
  EXPECT_THAT(message({"--parallelism.expert_parallel_degree=4"}), HasSubstr("needs 4 ranks"));
  EXPECT_THAT(message({"--parallelism.data_parallel_replicate_degree=2"}), HasSubstr("needs 2 ranks"));
  EXPECT_THAT(message({"--parallelism.data_parallel_shard_degree=4000"}),
              AllOf(HasSubstr("needs 4000 ranks ("), HasSubstr("--oversubscribe")));
  // More ranks would not help here, so the message has no mpirun line.
  EXPECT_THAT(message({"--parallelism.tensor_parallel_degree=3"}),
              AllOf(HasSubstr("model.args.n_heads = 2"), Not(HasSubstr("mpirun"))));
  EXPECT_THAT(message({"--parallelism.tensor_parallel_degree=0"}), HasSubstr("tensor_parallel_degree is 0"));
  // The printed mpirun line works unchanged.
  std::istringstream lines(tp);
  std::string command;
  while (std::getline(lines, command) && command.find("mpirun") == std::string::npos) continue;
  // NOLINTNEXTLINE(bugprone-command-processor)
  EXPECT_EQ(std::system(fmt::format("{} > '{}' 2>&1", command, (scratch_ / "mpirun.txt").string()).c_str()), 0)
      << read_text_file(scratch_ / "mpirun.txt");
}

TEST_F(Cli, DamagedShardsExitWithTwo) {
  const std::vector<std::string> arguments = train_arguments({"--training.steps=60"});  // the run reads every shard
  const auto shard = scratch_ / "dataset" / "train-00000.tokens";
  const auto size = std::filesystem::file_size(shard);
  for (std::size_t byte = 200; byte < 3000; byte += 64) data::flip_bit(shard, byte, 2);
  Finished finished = run(arguments);
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output, HasSubstr("train-00000.tokens"));
  std::filesystem::resize_file(shard, size / 2);
  finished = run(arguments);
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output, HasSubstr("train-00000.tokens"));
  std::filesystem::remove(shard);
  finished = run(arguments);
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output, HasSubstr("train-00000.tokens"));
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "step-60"));
}

TEST_F(Cli, SignalsFinishTheStepAndSave) {
  for (const auto& [signal, status] : {std::pair{SIGINT, 130}, {SIGTERM, 143}, {SIGHUP, 129}, {SIGUSR1, 138}}) {
    std::filesystem::remove_all(scratch_ / "outputs");
    const Process process(scratch_, train_arguments({"--training.steps=1000000"}));
    process.wait_for_output("step       3");
    process.send(signal);
    const Finished finished = process.finish();
    EXPECT_EQ(finished.status, status) << finished.output;
    const std::vector<std::int64_t> steps = checkpoint_steps(checkpoints());
    ASSERT_EQ(steps.size(), 1u) << finished.output;
    EXPECT_GE(steps[0], 3);
    EXPECT_NO_THROW(verify_checkpoint(checkpoint_path(checkpoints(), steps[0])));
    EXPECT_THAT(finished.output, HasSubstr(", then saving; again to stop now\n"));
    EXPECT_THAT(finished.output, Not(HasSubstr("checkpoint.enable is false")));
    EXPECT_THAT(finished.output, HasSubstr("stopped by signal"));
    // Without a terminal there is no progress bar, only plain lines.
    EXPECT_THAT(finished.output, Not(HasSubstr("\r")));
  }
}

// The signals arrive in the middle of a step that takes seconds.
TEST_F(Cli, TheFirstSignalIsAnsweredAtOnceAndTheSecondEndsTheRun) {
  // A step is long enough for both signals, also where this process has to wait for a processor.
  const Process process(scratch_, train_arguments({"--training.steps=1000000", "--training.global_batch_size=2000",
                                                   "--checkpoint.enable=false"}));
  process.wait_for_output("memory in use");                     // follows the first step's line
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the second step should have begun
  process.send(SIGINT);
  // the message announces no save: checkpoints are disabled
  process.wait_for_output("finishing step 2; again to stop now\n");
  process.send(SIGINT);
  const Finished finished = process.finish();
  EXPECT_EQ(finished.status, 130) << finished.output;
  EXPECT_THAT(finished.output, Not(HasSubstr("stopped by signal")));
  EXPECT_THAT(finished.output, HasSubstr("checkpoint.enable is false: this run saves nothing"));
}

/// The loss does not depend on the number of threads or on OpenMP's settings. This holds for the baseline kernels and
/// for the machine's best ones.
TEST_F(Cli, TheLossIsTheSameWhateverOpenMpIsTold) {
  const auto losses = [&](const std::vector<std::string>& more, const std::vector<std::string>& settings = {}) {
    std::vector<std::string> arguments = {"bench",
                                          "step",
                                          "--steps=1",
                                          "--warmup=1",
                                          "--training.device=cpu",
                                          "--model.args.n_layers=2",
                                          "--training.seq_len=128",
                                          "--training.local_batch_size=1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::vector<std::string> launcher = {"/usr/bin/env"};
    launcher.insert(launcher.end(), settings.begin(), settings.end());
    const Finished finished = run(arguments, launcher);
    EXPECT_EQ(finished.status, 0) << finished.output;
    const auto line = nlohmann::json::parse(finished.output.substr(finished.output.find('{')));
    return std::pair(line["loss_first"].get<double>(), line["loss_last"].get<double>());
  };
  for (const std::string dtype : {"float32", "bfloat16"}) {
    for (const std::vector<std::string>& kernels : {std::vector<std::string>{"--cpu-kernels=baseline"}, {}}) {
      SCOPED_TRACE(dtype + (kernels.empty() ? "" : ", baseline"));
      std::vector<std::string> more = {"--training.mixed_precision_param=" + dtype, "--training.num_threads=1"};
      more.insert(more.end(), kernels.begin(), kernels.end());
      const auto expected = losses(more);
      for (const int threads : {2, 3, 4, 8}) {
        more[1] = fmt::format("--training.num_threads={}", threads);
        EXPECT_EQ(losses(more), expected) << threads << " threads";
      }
      more[1] = "--training.num_threads=0";
      EXPECT_EQ(losses(more, {"OMP_NUM_THREADS=8", "OMP_DYNAMIC=true"}), expected);
      EXPECT_EQ(losses(more, {"OMP_NUM_THREADS=8", "OMP_THREAD_LIMIT=3"}), expected);
      EXPECT_EQ(losses(more, {"OMP_NUM_THREADS=8", "OMP_MAX_ACTIVE_LEVELS=0"}), expected);
    }
  }
}

TEST_F(Cli, MoreThreadsThanCoresAreWarnedOf) {
  const auto too_many = fmt::format("--training.num_threads={}", num_cores() + 1);
  const Finished finished = run(train_arguments({too_many}));
  EXPECT_EQ(finished.status, 0);
  EXPECT_THAT(finished.output, HasSubstr(fmt::format("= {} is more than the {} core", num_cores() + 1, num_cores())));
  EXPECT_THAT(run(train_arguments({"--training.num_threads=1", "--checkpoint.enable=false", "--job.overwrite"})).output,
              Not(HasSubstr("is more than the")));
  const Finished by_openmp =
      run(train_arguments({"--training.num_threads=0", "--checkpoint.enable=false", "--job.overwrite"}),
          {"/usr/bin/env", fmt::format("OMP_NUM_THREADS={}", num_cores() + 1)});
  EXPECT_EQ(by_openmp.status, 0);
  EXPECT_THAT(by_openmp.output,
              HasSubstr(fmt::format("OMP_NUM_THREADS = {} is more than the {} core", num_cores() + 1, num_cores())));
}

TEST_F(Cli, MessagesDoNotGoIntoFilesWhereStandardOnesAreClosed) {
  const Finished finished = run(train_arguments({"--checkpoint.interval=1", "--checkpoint.async_mode=async"}),
                                {"/bin/sh", "-c", R"(exec "$0" "$@" <&- >&- 2>&-)"});
  EXPECT_EQ(finished.status, 0);
  std::ifstream metrics(scratch_ / "outputs" / "metrics.jsonl");
  int num_lines = 0;
  for (std::string line; std::getline(metrics, line); ++num_lines) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  EXPECT_GE(num_lines, 4);
  for (const std::int64_t step : checkpoint_steps(checkpoints())) {
    EXPECT_NO_THROW(verify_checkpoint(checkpoint_path(checkpoints(), step)));
  }
}

TEST_F(Cli, TrainsOnWhereNobodyReadsItsMessages) {
  const Finished finished = run(train_arguments({"--training.steps=30"}),
                                {"/bin/bash", "-c", R"(exec "$0" "$@" 2> >(head -n 1 >/dev/null))"});
  EXPECT_EQ(finished.status, 0);
  EXPECT_EQ(checkpoint_steps(checkpoints()), std::vector<std::int64_t>{30});
}

TEST_F(Cli, RanksOfALauncherThatThisMpiDoesNotKnowDoNotTrainAlone) {
  const Finished finished = run(train_arguments({}), {"/usr/bin/env", "PMI_RANK=1", "PMI_SIZE=4"});
  EXPECT_EQ(finished.status, 2) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("the launcher has started 4 ranks, but MPI sees 1"));
}

TEST_F(Cli, LaunchSeesItsRanksEndAlsoIfItsCallerIgnoresChildren) {
  std::vector<std::string> arguments = {"launch", "--engine", "local", "--ranks-per-node", "1", "--"};
  for (const std::string& word : train_arguments({})) arguments.push_back(word);
  const Finished finished = run(arguments, {"/usr/bin/env", "--ignore-signal=CHLD"});
  EXPECT_EQ(finished.status, 0) << finished.output;
}

TEST_F(Cli, AFirstRunThatWasInterruptedGoesOnToTheStepsThatItPlanned) {
  ASSERT_EQ(run(train_arguments({"--training.steps=4", "--checkpoint.interval=2"})).status, 0);
  const std::string config = scratch_ / "first.toml";
  const Finished printed = run(train_arguments({"--training.steps=9", "--print-config"}));
  data::write_file(config, without_log_lines(printed.output));
  const auto first_run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"/bin/bash", std::string(TESSERA_TEST_DATA) + "/../scripts/first_run.sh"};
    std::vector<std::string> arguments = {config};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments, words);
  };
  const auto steps = [&] { return checkpoint_steps(checkpoints()).back(); };
  const std::filesystem::path info = scratch_ / "outputs/run.json";  // as a first run of 6 steps had written it
  std::string text = read_text_file(info);
  const std::string before = "\"training.steps\": \"4\"";
  ASSERT_NE(text.find(before), std::string::npos);
  data::write_file(info, text.replace(text.find(before), before.size(), "\"training.steps\": \"6\""));
  const Finished planned = first_run({});
  EXPECT_EQ(planned.status, 0) << planned.output;
  EXPECT_THAT(planned.output, AllOf(HasSubstr("goes on to step 6"), Not(HasSubstr("timing a step"))));
  EXPECT_EQ(steps(), 6);
  EXPECT_THAT(first_run({}).output, HasSubstr("3 steps take about"));  // what was planned is done
  EXPECT_EQ(steps(), 9);
}

TEST_F(Cli, PathsMayHaveAnyBytes) {
  const std::filesystem::path outputs = scratch_ / "\xff";
  const Finished finished = run(train_arguments({"--job.dump_folder=" + outputs.string()}));
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_TRUE(std::filesystem::exists(outputs / "metrics.jsonl"));
}

TEST_F(Cli, OutputThatCannotBeWrittenIsAFailureOfStorage) {
  const std::filesystem::path said = scratch_ / "said";
  // The second one prints more than a buffer holds.
  for (const char* command : {"train --list-keys", "plan schedule --schedule=1F1B --ranks 32 --micro-batches 64"}) {
    const int status =  // NOLINTNEXTLINE(bugprone-command-processor)
        std::system(fmt::format("{} {} >/dev/full 2>{}", TESSERA_BINARY, command, said.string()).c_str());
    EXPECT_EQ(WEXITSTATUS(status), 74) << command;
    EXPECT_THAT(read_text_file(said), AllOf(HasSubstr("error"), Not(HasSubstr("critical")))) << command;
  }
}

/// A reader that has ended, as `head` does, is no full disk, and the work is done.
TEST_F(Cli, OutputThatNobodyReadsIsNoFailure) {
  data::write_file(scratch_ / "text.txt", "A text.\n");
  const std::string dataset = (scratch_ / "piped").string();
  const std::string prepare = fmt::format("{} data prepare --input {} --tokenizer bytes --output {}", TESSERA_BINARY,
                                          (scratch_ / "text.txt").string(), dataset);
  const int status =  // NOLINTNEXTLINE(bugprone-command-processor)
      std::system(fmt::format("bash -c '{} 2>/dev/null | true; exit ${{PIPESTATUS[0]}}'", prepare).c_str());
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(std::filesystem::exists(dataset));
}

TEST_F(Cli, TheConfigurationsPageIsCurrent) {
  EXPECT_TRUE(read_text_file(std::string(TESSERA_TEST_DATA) + "/../docs/config.md")
                  .ends_with(run({"train", "--list-keys"}).output))
      << "docs/config.md: everything from '## [job]' on is the output of `tessera train --list-keys`";
}

// A dataset contains its tokenizer. The program refuses a configuration that names another tokenizer.
TEST_F(Cli, TheTokenizerOfAssetsIsTheDatasets) {
  const std::filesystem::path assets = scratch_ / "assets";
  const std::string key = "--model.hf_assets_path=" + assets.string();
  EXPECT_EQ(run(train_arguments({key})).status, 0);  // TorchTitan's files name a folder that may be missing here
  std::filesystem::create_directory(assets);
  std::ofstream(assets / "tokenizer.json") << data::small_tokenizer().dump();
  const Finished other = run(train_arguments({key}));
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.output, AllOf(HasSubstr("model.hf_assets_path"), HasSubstr("another tokenizer"),
                                  HasSubstr("training.dataset_path")));
}

// A second run in the same folder would overwrite the first one's metrics, so the program refuses it.
TEST_F(Cli, AnotherRunIsNotOverwritten) {
  const std::vector<std::string> without_checkpoints = train_arguments({"--checkpoint.enable=false"});
  ASSERT_EQ(run(without_checkpoints).status, 0);
  const std::filesystem::path metrics = scratch_ / "outputs" / "metrics.jsonl";
  const std::string first = read_text_file(metrics);
  const Finished second = run(without_checkpoints);
  EXPECT_EQ(second.status, 2);
  EXPECT_THAT(second.output, AllOf(HasSubstr("outputs"), HasSubstr("another run"), HasSubstr("--job.dump_folder"),
                                   HasSubstr("--job.overwrite")));
  EXPECT_EQ(read_text_file(metrics), first);
  EXPECT_EQ(run(train_arguments({"--checkpoint.enable=false", "--job.overwrite", "--training.steps=2"})).status, 0);
  EXPECT_EQ(std::ranges::count(read_text_file(metrics), '\n'), 2);
}

TEST_F(Cli, FoldersOfCheckpointsAreLockedWhereverTheyAre) {
  const std::string elsewhere = "--checkpoint.folder=" + (scratch_ / "elsewhere").string();
  ASSERT_EQ(run(train_arguments({elsewhere})).status, 0);
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "elsewhere" / "run.lock"));
  std::filesystem::remove(checkpoint_path(scratch_ / "elsewhere", 4) / "manifest.json");
  EXPECT_THAT(run(train_arguments({elsewhere})).output, AllOf(HasSubstr("step-4"), HasSubstr("no manifest")));
}

TEST_F(Cli, ACheckpointOfAnotherFoldersRunIsToldOf) {
  const std::string shared = "--checkpoint.folder=" + (scratch_ / "shared").string();
  ASSERT_EQ(run(train_arguments({shared})).status, 0);
  const std::string other = "--job.dump_folder=" + (scratch_ / "other").string();
  const Finished first = run(train_arguments({shared, other, "--training.steps=6"}));
  EXPECT_EQ(first.status, 0) << first.output;
  EXPECT_THAT(first.output, AllOf(HasSubstr("THIS RUN GOES ON FROM A CHECKPOINT OF THE RUN IN '" +
                                            (scratch_ / "outputs").string() + "'"),
                                  HasSubstr("of which the newest 10 stay")));
  EXPECT_THAT(run(train_arguments({shared, other, "--training.steps=8"})).output,
              Not(HasSubstr("THIS RUN GOES ON FROM")));
}

TEST_F(Cli, OverwritingDoesNotGoOnFromACheckpoint) {
  ASSERT_EQ(run(train_arguments()).status, 0);
  const Finished finished = run(train_arguments({"--job.overwrite", "--training.steps=6"}));
  EXPECT_EQ(finished.status, 2) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("job.overwrite begins at step 1"), HasSubstr("checkpoint of step 4"),
                                     HasSubstr("--checkpoint.folder")));
  EXPECT_EQ(run(train_arguments({"--job.overwrite", "--checkpoint.folder=again"})).status, 0);
}

// A resumed run reports every key that has changed. Jumps are in capital letters so that nobody misses them.
TEST_F(Cli, ChangesOfAResumedRunAreTold) {
  ASSERT_EQ(
      run(train_arguments({"--optimizer.lr=1e-3", "--lr_scheduler.decay_ratio=0", "--lr_scheduler.warmup_steps=1"}))
          .status,
      0);
  const Finished resumed =
      run(train_arguments({"--optimizer.lr=5e-4", "--lr_scheduler.decay_ratio=0", "--lr_scheduler.warmup_steps=1",
                           "--training.steps=6", "--validation.freq=7"}));
  EXPECT_EQ(resumed.status, 0) << resumed.output;
  EXPECT_THAT(resumed.output, AllOf(HasSubstr("from step 5 on optimizer.lr is 0.0005, before 0.001"),
                                    HasSubstr("training.steps is 6, before 4"),
                                    HasSubstr("validation.freq is 7, before 10"), Not(HasSubstr("JUMPS"))));
  const auto info = nlohmann::json::parse(read_text_file(scratch_ / "outputs" / "run.json"));
  EXPECT_EQ(info["changed"]["optimizer.lr"], nlohmann::json({"0.001", "0.0005 at step 5"}));
  const Finished jump =
      run(train_arguments({"--optimizer.lr=5e-3", "--lr_scheduler.decay_ratio=0", "--lr_scheduler.warmup_steps=1",
                           "--training.steps=8", "--training.global_batch_size=8"}));
  EXPECT_THAT(jump.output, AllOf(HasSubstr("THE LEARNING RATE JUMPS AT STEP 7: 0.0005 BEFORE, 0.005 FROM HERE ON"),
                                 HasSubstr("THE NUMBER OF TOKENS PER STEP JUMPS AT STEP 7: 64 BEFORE, 256 FROM")));
  const Finished same =
      run(train_arguments({"--optimizer.lr=5e-3", "--lr_scheduler.decay_ratio=0", "--lr_scheduler.warmup_steps=1",
                           "--training.steps=8", "--training.global_batch_size=8"}));
  EXPECT_THAT(same.output, AllOf(HasSubstr("nothing to do"), Not(HasSubstr("before"))));
}

TEST_F(Cli, AFolderWithoutPermissionIsNoticedAtTheStart) {
  std::string folder = "/proc/self";  // root may write into any ordinary folder, but this one cannot hold files
  if (geteuid() != 0) {
    folder = (scratch_ / "locked").string();
    std::filesystem::create_directory(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_read);
  }
  for (const std::string key : {"checkpoint.folder", "job.dump_folder"}) {
    const Finished finished = run(train_arguments({fmt::format("--{}={}", key, folder)}));
    EXPECT_EQ(finished.status, 2) << finished.output;
    EXPECT_THAT(finished.output, AllOf(HasSubstr("'" + folder + "'"), HasSubstr(key), Not(HasSubstr("tokens/s"))));
  }
}

TEST_F(Cli, AStorageWithoutRoomForACheckpointIsNoticedAtTheStart) {
  const std::filesystem::path folder = scratch_ / "small";
  std::filesystem::create_directory(folder);
  const std::vector<std::string> with_small_folder = app_test::with_tmpfs("64k", folder);
  if (with_small_folder.empty()) GTEST_SKIP() << "this user may not mount a file system";
  const Finished finished = run(train_arguments({"--checkpoint.folder=" + folder.string()}), with_small_folder);
  EXPECT_EQ(finished.status, 2) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("a checkpoint of this run takes "), HasSubstr("checkpoint.folder"),
                                     HasSubstr(" kB free"), Not(HasSubstr("tokens/s"))));
}

TEST_F(Cli, AFullDiskKeepsThePreviousCheckpoint) {
  ASSERT_EQ(run(train_arguments()).status, 0);
  // A limit on file sizes stands in for the full disk: the write fails half-way with a system error.
  const Finished finished = Process(scratch_, train_arguments({"--training.steps=8"}), 100'000).finish();
  EXPECT_EQ(finished.status, static_cast<int>(ExitStatus::kStorageFailed)) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("cannot write"));
  EXPECT_THAT(checkpoint_steps(checkpoints()), ::testing::ElementsAre(4));
  EXPECT_NO_THROW(verify_checkpoint(checkpoints() / "step-4"));
}

// The debug model is large enough for this test: the program's own memory is small compared with the plan.
TEST_F(Cli, AnnouncedPeakMemoryIsWithinFivePercent) {
  data::make_dataset(scratch_, 4000, 1 << 20, 0.0);
  for (const std::string mode : {"disabled", "async"}) {
    std::filesystem::remove_all(scratch_ / "outputs");
    const Finished finished =
        run({"train", "--training.dataset_path=" + (scratch_ / "dataset").string(),
             "--job.dump_folder=" + (scratch_ / "outputs").string(), "--training.seq_len=128",
             "--training.local_batch_size=2", "--training.steps=2", "--checkpoint.enable=true",
             "--checkpoint.interval=1", "--checkpoint.async_mode=" + mode, "--metrics.log_freq=1"});
    ASSERT_EQ(finished.status, 0) << finished.output;
    const std::size_t at = finished.output.find("peak ");
    ASSERT_NE(at, std::string::npos);
    const double announced = std::stod(finished.output.substr(at + 5)) * static_cast<double>(1 << 30);
    std::ifstream metrics(scratch_ / "outputs" / "metrics.jsonl");
    double used = 0.0;
    for (std::string line; std::getline(metrics, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("memory_bytes")) used = json["memory_bytes"].get<double>();
    }
    EXPECT_NEAR(used, announced, 0.05 * announced) << mode;
  }
}

/// Returns the contents of all files in a folder, by file name.
std::map<std::string, std::string> contents_of(const std::filesystem::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    contents[entry.path().filename().string()] = read_text_file(entry.path());
  }
  return contents;
}

/// Converts the golden files of each form, which transformers has read, to a checkpoint and back.
TEST_F(Cli, ConvertingGoldenFilesThereAndBackChangesNoBit) {
  const std::filesystem::path tests = TESSERA_TEST_DATA;
  for (const std::string name : {"v2", "v2_yarn", "remote_code"}) {
    const std::string golden = tests / "golden/hf" / name, tessera = scratch_ / (name + "-tessera"),
                      back = scratch_ / (name + "-back");
    EXPECT_EQ(run({"convert", "--to", "tessera", "--input", golden, "--output", tessera}).status, 0);
    const Finished there = run({"convert", "--to", "hf", "--input", tessera, "--output", back, "--dtype", "float32",
                                "--max-shard-gb", "0.0002", "--form", name == "remote_code" ? "remote-code" : "auto"});
    EXPECT_EQ(there.status, 0) << there.output;
    auto expected = contents_of(golden);
    expected.erase("golden.safetensors");
    if (name == "remote_code") expected.merge(contents_of(tests.parent_path() / "src/checkpoint/transformers"));
    EXPECT_GE(expected.size(), 4u);
    EXPECT_TRUE(contents_of(back) == expected) << name;
  }
}

TEST_F(Cli, ConvertingDeletesNoCheckpointThatIsDamaged) {
  const std::string golden = std::filesystem::path(TESSERA_TEST_DATA) / "golden/hf/v2";
  for (const char* damaged : {"step-0", "step-7"}) {
    const std::filesystem::path output = scratch_ / ("of-" + std::string(damaged));
    std::filesystem::create_directories(output / damaged);
    data::write_file(output / damaged / "model-0-of-1.safetensors", "weights");
    const Finished refused = run({"convert", "--to", "tessera", "--input", golden, "--output", output});
    EXPECT_EQ(refused.status, 2) << refused.output;
    EXPECT_EQ(read_text_file(output / damaged / "model-0-of-1.safetensors"), "weights");
  }
}

TEST_F(Cli, ConvertingRefusesAFormThatIsNotExact) {
  const auto train = [&](std::vector<std::string> more) {
    std::filesystem::remove_all(scratch_ / "outputs");
    more.emplace_back("--training.steps=2");
    const Finished finished = run(train_arguments(more));
    EXPECT_EQ(finished.status, 0) << finished.output;
  };
  const auto convert = [&](const std::string& form) {
    return run({"convert", "--to", "hf", "--form", form, "--input", scratch_ / "outputs", "--output", scratch_ / "hf"});
  };
  const auto refused = [&](const std::string& form, const std::vector<std::string>& parts) {
    const Finished finished = convert(form);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
    EXPECT_THAT(finished.output, HasSubstr("--form remote-code"));
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "hf"));
  };
  train({});
  refused("auto",
          {"DeepseekV2ForCausalLM", "expert bias", "on 256 tokens of a sample text, ", "selections of layers.1.moe"});
  refused("v3", {"DeepseekV3ForCausalLM", "sigmoid"});
  train({"--model.args.load_balance_coeff=0", "--model.args.n_expert_groups=4", "--model.args.n_limited_groups=2"});
  refused("auto", {"sum of the two best", "selections of layers.1.moe"});

  const std::vector<std::string> plain = {"--model.args.load_balance_coeff=0", "--model.args.n_expert_groups=1",
                                          "--model.args.n_limited_groups=1"};
  train(plain);
  const Finished exact = convert("auto");
  EXPECT_EQ(exact.status, 0) << exact.output;
  EXPECT_THAT(exact.output, AllOf(HasSubstr("for DeepseekV2ForCausalLM"), HasSubstr("epsilon"),
                                  HasSubstr("the tokenizer 'bytes' has no files")));
  // The exported folder does not distinguish one expert group from no groups. A run with one group can start from it.
  std::vector<std::string> start = plain;
  start.insert(start.end(), {"--checkpoint.initial_load_path=" + (scratch_ / "hf").string(),
                             "--checkpoint.initial_load_in_hf", "--job.dump_folder=" + (scratch_ / "more").string()});
  const Finished started = run(train_arguments(start));
  EXPECT_EQ(started.status, 0) << started.output;
}

TEST_F(Cli, ConvertingThereAndBackChangesNoBit) {
  const auto convert = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"convert"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Finished finished = run(all);
    EXPECT_EQ(finished.status, 0) << finished.output;
  };
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/golden/hf/groups", tessera = scratch_ / "tessera",
                    back = scratch_ / "back", rounded = scratch_ / "rounded", again = scratch_ / "again";
  convert({"--to", "tessera", "--input", golden, "--output", tessera});
  convert({"--to", "hf", "--input", tessera, "--output", back, "--dtype", "float32", "--max-shard-gb", "0.0002"});
  auto expected = contents_of(golden);
  expected.erase("golden.safetensors");
  EXPECT_GT(expected.size(), 4u);
  EXPECT_TRUE(contents_of(back) == expected);

  convert({"--to", "hf", "--input", tessera, "--output", rounded});
  convert({"--to", "tessera", "--input", rounded, "--output", tessera + "2"});
  convert({"--to", "hf", "--input", tessera + "2", "--output", again});
  EXPECT_TRUE(contents_of(again) == contents_of(rounded));

  const Finished exists = run({"convert", "--to", "hf", "--input", tessera, "--output", back});
  EXPECT_EQ(exists.status, 2);
  EXPECT_THAT(exists.output, HasSubstr("--force"));
  EXPECT_TRUE(contents_of(back) == expected);
  convert({"--to", "hf", "--input", tessera, "--output", back, "--force"});
  EXPECT_TRUE(contents_of(back) == contents_of(rounded));
  // --force replaces only a folder that a conversion to the same format has made.
  const Finished own = run({"convert", "--to", "hf", "--input", tessera, "--output", tessera, "--force"});
  EXPECT_EQ(own.status, 2);
  EXPECT_THAT(own.output, HasSubstr("not replaced"));
  EXPECT_TRUE(std::filesystem::exists(tessera + "/step-0/model.safetensors"));
  EXPECT_EQ(run({"convert", "--to", "tessera", "--input", golden, "--output", tessera}).status, 2);
  EXPECT_EQ(run({"convert", "--to", "tessera", "--input", golden, "--output", tessera, "--dtype", "float32"}).status,
            2);
  {
    const FileLock other(tessera + "/run.lock", "a run");
    const Finished refused = run({"convert", "--to", "tessera", "--input", golden, "--output", tessera, "--force"});
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.output, HasSubstr("is in use"));
  }
  convert({"--to", "tessera", "--input", golden, "--output", tessera, "--force"});
  EXPECT_THAT(run({"convert", "--to", "hf", "--input", "/nonexistent", "--output", back + "3"}).output,
              HasSubstr("/nonexistent"));
  EXPECT_FALSE(std::filesystem::exists(back + "3"));
  // A conversion that fails, as on a full disk, leaves nothing.
  const Finished full =
      Process(scratch_, {"convert", "--to", "tessera", "--input", golden, "--output", back + "4"}, 20'000).finish();
  EXPECT_EQ(full.status, 74);
  EXPECT_FALSE(std::filesystem::exists(back + "4"));
}

TEST_F(Cli, ConvertingKeepsMultiTokenPredictionAndTheTokenizer) {
  ASSERT_EQ(run(train_arguments({"--model.args.num_mtp_modules=1", "--training.steps=2"})).status, 0);
  const std::string hf = scratch_ / "hf", back = scratch_ / "back";
  const Finished there = run({"convert", "--to", "hf", "--form", "remote-code", "--input", scratch_ / "outputs",
                              "--output", hf, "--dtype", "float32"});
  EXPECT_EQ(there.status, 0) << there.output;
  EXPECT_THAT(read_text_file(hf + "/model.safetensors.index.json"),
              AllOf(HasSubstr("model.layers.2.eh_proj.weight"), HasSubstr("model.layers.2.shared_head.head.weight"),
                    HasSubstr("model.layers.2.embed_tokens.weight")));
  EXPECT_EQ(run({"convert", "--to", "tessera", "--input", hf, "--output", back}).status, 0);
  const SafetensorsFile original(checkpoints() / "step-2" / "model.safetensors"),
      converted(back + "/step-0/model.safetensors");
  EXPECT_EQ(converted.entries().size(), original.entries().size());
  for (const auto& [name, entry] : original.entries()) {
    EXPECT_TRUE(std::ranges::equal(converted.at(name).bytes, entry.bytes)) << name;
  }
  // A run starts from the Hugging Face files and from the converted checkpoint.
  for (const auto& [path, in_hf] : {std::pair{hf, "true"}, std::pair{back, "false"}}) {
    const Finished trained =
        run(train_arguments({"--model.args.num_mtp_modules=1", "--checkpoint.initial_load_path=" + path,
                             std::string("--checkpoint.initial_load_in_hf=") + in_hf,
                             "--job.dump_folder=" + (scratch_ / "more").string() + in_hf}));
    EXPECT_EQ(trained.status, 0);
    EXPECT_THAT(trained.output, HasSubstr("initial weights from " + path));
  }
  const auto first_loss = [&](const char* in_hf) {
    std::ifstream file((scratch_ / "more").string() + in_hf + "/metrics.jsonl");
    std::string line;
    std::getline(file, line);
    return nlohmann::json::parse(line)["loss"].get<double>();
  };
  EXPECT_EQ(first_loss("true"), first_loss("false"));
  const Finished wrong =
      run(train_arguments({"--checkpoint.initial_load_path=" + hf, "--job.dump_folder=" + back + "4"}));
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.output, HasSubstr("initial_load_in_hf"));
  // These weights have the right shapes but belong to another model: its route_scale differs.
  const Finished other =
      run(train_arguments({"--model.args.num_mtp_modules=1", "--model.args.route_scale=2",
                           "--checkpoint.initial_load_path=" + back, "--job.dump_folder=" + back + "5"}));
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.output, AllOf(HasSubstr("model.args.route_scale"), HasSubstr("1.0"), HasSubstr("2.0")));
}

TEST_F(Cli, ConvertingNeedsLittleMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory is beyond the limit";
#endif
  // The model has 18 million parameters (74 MB of weights). Most of them are in two layers.
  ASSERT_EQ(run(train_arguments({"--model.args.dim=128", "--model.args.inter_dim=24000", "--model.args.n_layers=2",
                                 "--model.args.n_dense_layers=2", "--training.steps=1", "--training.seq_len=8"}))
                .status,
            0);
  const rlim_t limit = 32 << 20;
  const struct rlimit few { .rlim_cur = limit, .rlim_max = RLIM_INFINITY };
  const struct rlimit all { .rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY };
  EXPECT_GT(std::filesystem::file_size(checkpoints() / "step-1" / "model.safetensors"), 2 * limit);
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &few), 0);  // the child process inherits the limit
  const Finished there = run({"convert", "--to", "hf", "--input", scratch_ / "outputs", "--output", scratch_ / "hf"});
  const Finished back = run({"convert", "--to", "tessera", "--input", scratch_ / "hf", "--output", scratch_ / "back"});
  setrlimit(RLIMIT_DATA, &all);
  EXPECT_EQ(there.status, 0) << there.output;
  EXPECT_EQ(back.status, 0) << back.output;
}

TEST_F(Cli, GeneratesFromACheckpoint) {
  ASSERT_EQ(run(train_arguments({"--training.steps=30", "--optimizer.lr=0.01"})).status, 0);
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate",         "--checkpoint", scratch_ / "outputs",
                                          "--max-new-tokens", "20",           "--dtype",
                                          "float32",          "--device",     "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = run(arguments);
    EXPECT_EQ(finished.status, 0) << finished.output;
    return without_log_lines(finished.output);
  };
  const std::string greedy = generate({"--prompt", "a b", "--temperature", "0"});
  EXPECT_TRUE(greedy.starts_with("a b")) << greedy;
  EXPECT_EQ(generate({"--prompt", "a b", "--temperature", "0", "--seed", "9"}), greedy);
  EXPECT_EQ(generate({"--prompt", "a b", "--top-k", "1"}), greedy);
  EXPECT_EQ(generate({"--prompt", "a b", "--top-p", "1e-6"}), greedy);
  const std::string first = generate({"--prompt", "a b", "--seed", "1"});
  EXPECT_EQ(generate({"--prompt", "a b", "--seed", "1"}), first);
  EXPECT_NE(generate({"--prompt", "a b", "--seed", "2"}), first);
  EXPECT_GT(first.size(), 10u);
  const std::string noise = generate({"--prompt", "a b", "--temperature", "1000"});  // bytes at random
  EXPECT_THAT(noise, HasSubstr("\xEF\xBF\xBD"));
  EXPECT_TRUE(is_utf8(noise)) << noise;
  const Finished one =
      run({"generate", "--checkpoint", scratch_ / "outputs", "--max-new-tokens", "1", "--prompt", "a"});
  EXPECT_THAT(one.output, HasSubstr("generated: 1 tokens"));

  // A file of prompts gives the same texts with every batch size.
  data::write_file(scratch_ / "prompts.txt", "a b\n\nsome longer prompt\n\xff\"\n");
  const auto lines_of = [&](const std::string& batch_size) {
    std::map<std::size_t, nlohmann::json> lines;
    std::istringstream output(
        generate({"--prompts", scratch_ / "prompts.txt", "--seed", "1", "--batch-size", batch_size}));
    for (std::string line; std::getline(output, line);) {
      const auto json = nlohmann::json::parse(line);
      lines[json["index"].get<std::size_t>()] = json;
    }
    return lines;
  };
  const auto lines = lines_of("3");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines_of("1"), lines);
  EXPECT_EQ(lines.at(0)["prompt"], "a b");
  EXPECT_EQ(lines.at(3)["prompt"], "\xEF\xBF\xBD\"");
  for (const auto& [index, line] : lines) {
    EXPECT_TRUE(line["finish"] == "length" ? line["tokens"] == 20 : line["finish"] == "eos") << line;
  }
}

TEST_F(Cli, GeneratesFromHuggingFaceFiles) {
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/golden/hf/groups";
  const Finished text = run(
      {"generate", "--checkpoint", golden, "--tokenizer", "bytes", "--prompt", "the quick ", "--max-new-tokens", "9"});
  EXPECT_EQ(text.status, 0) << text.output;
  EXPECT_THAT(text.output, AllOf(HasSubstr("the quick "), HasSubstr("tokens/s")));
  // The EOS of this tokenizer has the id of the space. The model writes a space after every word.
  nlohmann::json tokenizer = data::small_tokenizer();
  tokenizer["model"]["merges"] = nlohmann::json::array();
  nlohmann::json& vocab = tokenizer["model"]["vocab"];
  for (const char* token : {"\u0120", "ab", "bc", "abc", "\u0120a"}) vocab.erase(token);
  vocab["<s>"] = 256;
  vocab["</s>"] = 32;
  tokenizer["added_tokens"] = {data::added_token(256, "<s>", true), data::added_token(32, "</s>", true)};
  data::write_file(scratch_ / "tokenizer.json", tokenizer.dump());
  data::write_file(scratch_ / "prompts.txt", "\uFEFFthe1\r\n");
  const Finished ended = run({"generate", "--checkpoint", golden, "--tokenizer", scratch_ / "tokenizer.json",
                              "--prompts", scratch_ / "prompts.txt", "--temperature", "0"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_THAT(ended.output, AllOf(HasSubstr("\"finish\":\"eos\""), HasSubstr("\"prompt\":\"the1\"")));
  const Finished no_tokenizer = run({"generate", "--checkpoint", golden, "--prompt", "x"});
  EXPECT_EQ(no_tokenizer.status, 2);
  EXPECT_THAT(no_tokenizer.output, HasSubstr("tokenizer"));
  EXPECT_EQ(run({"generate", "--checkpoint", golden}).status, 2);
  EXPECT_EQ(run({"generate", "--checkpoint", "/nonexistent", "--prompt", "x"}).status, 2);
  EXPECT_EQ(run({"generate", "--checkpoint", golden, "--prompt", "x", "--temperature", "-1"}).status, 2);
}

}  // namespace
}  // namespace tessera
