// Tests the program as several processes under mpirun: ranks that die or hang, ranks with different arguments, and
// ranks that are killed while they write checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <random>

#include "checkpoint/checkpoint.h"
#include "comm/observe/flight_analysis.h"
#include "tests/app/process.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::mpirun;
using app_test::Process;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class ManyRanks : public ::testing::Test {
 protected:
  ManyRanks() { data::make_dataset(scratch_, 400, 3000, 0.1); }

  std::vector<std::string> train_arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"--training.seq_len=16",          "--training.local_batch_size=1",
                                          "--training.global_batch_size=4", "--training.num_threads=1",
                                          "--checkpoint.interval=1",        "--checkpoint.keep_latest_k=3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return app_test::small_run(scratch_, arguments);
  }
  fs::path checkpoints() const { return scratch_ / "outputs" / "checkpoint"; }
  std::int64_t newest() const { return checkpoint_steps(checkpoints()).back(); }
  fs::path node_folder() const { return scratch_ / "node"; }
  /// Returns the states in the rank files of `num_ranks` ranks.
  std::vector<RankState> rank_states(int num_ranks, std::int64_t attempt) const {
    std::vector<RankState> states;
    for (int rank = 0; rank < num_ranks; ++rank) {
      states.push_back(read_rank_file(rank_file_path(node_folder(), attempt, rank)));
    }
    return states;
  }
  Finished run(const std::vector<std::string>& arguments, const std::vector<std::string>& launcher = {}) const {
    return Process(scratch_, arguments, RLIM_INFINITY, launcher).finish();
  }

  TemporaryFolder scratch_;
};

/// Returns the processes that mpirun has started, by rank.
std::map<int, pid_t> processes_by_rank(const Process& mpirun) {
  std::map<int, pid_t> processes;
  for (const pid_t pid : mpirun.children()) {
    std::ifstream environment(fmt::format("/proc/{}/environ", pid));
    const std::string name = "OMPI_COMM_WORLD_RANK=";
    for (std::string variable; std::getline(environment, variable, '\0');) {
      if (variable.starts_with(name)) processes[std::stoi(variable.substr(name.size()))] = pid;
    }
  }
  return processes;
}

bool has_ended(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Expects one line that reports an error. Returns the output from that error on.
std::string only_error(const std::string& output) {
  EXPECT_EQ(count(output, "] error "), 1u) << output;
  const std::size_t at = output.find("] error ");
  return at == std::string::npos ? output : output.substr(at);
}

struct FailureCase {
  const char* name;
  std::vector<std::string> mesh;

  friend void PrintTo(const FailureCase& failure_case, std::ostream* out) { *out << failure_case.name; }
};

class RankFailures : public ManyRanks, public ::testing::WithParamInterface<FailureCase> {
 protected:
  static constexpr int kTimeout = 3;  // seconds

  /// Sends a signal to a rank while it trains. Expects that no rank's process is left, and returns how the run ended.
  Finished finished_after(int signal, int rank) const {
    std::vector<std::string> more = {"--training.steps=1000000", "--checkpoint.enable=false",
                                     fmt::format("--comm.train_timeout_seconds={}", kTimeout),
                                     "--job.node_folder=" + node_folder().string()};
    more.insert(more.end(), GetParam().mesh.begin(), GetParam().mesh.end());
    const Process process(scratch_, train_arguments(more), RLIM_INFINITY, mpirun(4));
    process.wait_for_output("step      10");
    const std::map<int, pid_t> ranks = processes_by_rank(process);
    EXPECT_EQ(ranks.size(), 4u);
    if (ranks.contains(rank)) kill(ranks.at(rank), signal);
    const Finished finished = process.finish(std::chrono::seconds(kTimeout + 10));
    EXPECT_NE(finished.status, 0);
    for (const auto& [other, pid] : ranks) {
      for (int i = 0; i < 200 && !has_ended(pid); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      EXPECT_TRUE(has_ended(pid)) << "rank " << other << "\n" << finished.output;
      if (!has_ended(pid)) kill(pid, SIGKILL);
    }
    return finished;
  }
  /// Expects the files that the ranks have left to name this rank as the culprit.
  void expect_culprit(int rank) const {
    const std::vector<RankState> states = rank_states(4, 0);
    const Culprit found = find_culprit(states, 4);
    EXPECT_THAT(found.ranks, Contains(rank)) << found.reason;
    EXPECT_NE(found.sure, Certainty::kUnknown) << found.reason;
    const auto has_told = [](const RankState& state) {
      return state.end && state.end->exit_status == static_cast<int>(ExitStatus::kRankFailed);
    };
    EXPECT_TRUE(std::ranges::any_of(states, has_told));
  }
};

INSTANTIATE_TEST_SUITE_P(
    Meshes, RankFailures,
    ::testing::Values(
        FailureCase{"sharded_data", {}},
        FailureCase{"tensor_pipeline",
                    {"--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2",
                     "--parallelism.pipeline_parallel_schedule=1F1B"}},
        // The ranks share windows of memory, which no rank can free alone.
        FailureCase{"direct_experts",
                    {"--parallelism.expert_parallel_degree=4", "--parallelism.expert_parallel_comm_backend=direct"}},
        FailureCase{"experts_on_domains",
                    {"--parallelism.expert_parallel_degree=4", "--parallelism.expert_parallel_comm_backend=direct",
                     "--parallelism.expert_parallel_ranks_per_domain=2"}},
        // A failure in one of two passes ends the other.
        FailureCase{"experts_in_turns",
                    {"--parallelism.expert_parallel_degree=4", "--parallelism.expert_parallel_overlap",
                     "--training.global_batch_size=16"}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_P(RankFailures, ADeadRankEndsAllAndIsNamed) {
  const std::string error = only_error(finished_after(SIGKILL, 2).output);
  EXPECT_THAT(error, AllOf(HasSubstr(" cannot end: rank 2 has died"),
                           ContainsRegex("rank 2 \\(process [0-9]+, has died\\): step [0-9]+, for [0-9.]+ s in "),
                           ContainsRegex("rank 0 \\(process [0-9]+\\): step [0-9]+, for [0-9.]+ s in ")));
  EXPECT_FALSE(rank_states(4, 0)[2].end.has_value());
  expect_culprit(2);
}

TEST_P(RankFailures, AHangingRankEndsAllAndIsNamed) {
  const Finished finished = finished_after(SIGSTOP, 1);
  EXPECT_EQ(finished.status, static_cast<int>(ExitStatus::kRankFailed));
  const std::string error = only_error(finished.output);
  // After ";" the rank that reports the error may add which rank's stores it waits for.
  EXPECT_THAT(error, AllOf(ContainsRegex(fmt::format("did not end within {} s \\(comm.train_timeout_seconds\\); "
                                                     "waiting for rank 1[;\n]",
                                                     kTimeout)),
                           ContainsRegex("rank 1 \\(process [0-9]+, is stopped\\): step [0-9]+, for [0-9.]+ s in "),
                           ContainsRegex("rank 3 \\(process [0-9]+\\): step [0-9]+, for [0-9.]+ s in ")));
  // Sums go along a tree. So the rank whose message is missing may be one that waits for rank 1 itself.
  if (GetParam().mesh.empty()) {
    EXPECT_THAT(error, ContainsRegex("; no message (has come from|was taken by) ranks? [0-3]"));
  }
  expect_culprit(1);
}

/// A monitor reads these files after the end of a run.
TEST_F(ManyRanks, FilesOfRanksTellHowTheRunEnded) {
  const std::vector<std::string> in_folder = {"--job.node_folder=" + node_folder().string(), "--job.attempt=3"};
  const auto train = [&](const std::vector<std::string>& more, const std::vector<std::string>& launcher) {
    std::vector<std::string> arguments = in_folder;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(train_arguments(arguments), launcher);
  };
  const Finished trained = train({"--training.steps=4"}, mpirun(4));
  EXPECT_EQ(trained.status, 0) << trained.output;
  for (const RankState& state : rank_states(4, 3)) {
    EXPECT_EQ(state.world_size, 4);
    EXPECT_EQ(state.attempt, 3);
    EXPECT_EQ(state.step, 4);
    EXPECT_EQ(state.process, ProcessState::kEnded);
    ASSERT_TRUE(state.end.has_value());
    EXPECT_EQ(state.end->exit_status, 0);
    EXPECT_GT(state.idle_ns, 0);
    EXPECT_GT(state.events.size(), 100u);
  }
  // The files record errors, too, for a run of one process and for a run of many.
  for (const auto& launcher : {std::vector<std::string>(), mpirun(4)}) {
    EXPECT_EQ(train({"--training.seq_len=0"}, launcher).status, 2);
    const RankState state = rank_states(1, 3).front();
    ASSERT_TRUE(state.end.has_value());
    EXPECT_EQ(state.end->exit_status, 2);
    EXPECT_THAT(state.end->message, HasSubstr("training.seq_len is 0"));
    EXPECT_EQ(state.world_size, launcher.empty() ? 1 : 4);
  }
}

/// Ctrl-Z and `scontrol suspend` stop all ranks at once. Meanwhile no rank waits for another one.
TEST_F(ManyRanks, SuspendedForLongerThanTheTimeoutTheRunGoesOn) {
  const Process process(
      scratch_,
      train_arguments({"--training.steps=500", "--checkpoint.enable=false", "--comm.train_timeout_seconds=2"}),
      RLIM_INFINITY, mpirun(4));
  process.wait_for_output("step  10");
  const std::map<int, pid_t> ranks = processes_by_rank(process);
  ASSERT_EQ(ranks.size(), 4u);
  for (const auto& [rank, pid] : ranks) kill(pid, SIGSTOP);
  const std::string output = process.output();
  std::this_thread::sleep_for(std::chrono::seconds(4));
  EXPECT_EQ(process.output(), output);
  for (const auto& [rank, pid] : ranks) kill(pid, SIGCONT);
  const Finished finished = process.finish();
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("step 500"));
}

/// SIGUSR1 leaves time to save. After Ctrl-C mpirun kills its ranks, and the message says so.
TEST_F(ManyRanks, SignalsToMpirunAreAnswered) {
  const auto stopped_by = [&](int signal) {
    std::filesystem::remove_all(scratch_ / "outputs");
    const Process process(scratch_, train_arguments({"--training.steps=100000", "--metrics.log_freq=1"}), RLIM_INFINITY,
                          mpirun(2));
    process.wait_for_output("loss ");
    process.send(signal);
    return process.finish();
  };
  const Finished saved = stopped_by(SIGUSR1);
  EXPECT_THAT(saved.output, AllOf(HasSubstr(", then saving; again to stop now"), HasSubstr("saved ")));
  EXPECT_THAT(stopped_by(SIGINT).output, HasSubstr("before mpirun kills its ranks in 1 s. `pkill -USR1 mpirun`"));
}

/// A rank dies while every rank's writer waits for storage.
TEST_F(ManyRanks, ADeadRankIsToldOfWhileStorageHangs) {
  std::vector<std::string> launcher = mpirun(4);
  const char* options = std::getenv("ASAN_OPTIONS");  // its library need not be loaded first
  launcher.insert(launcher.end(), {"env", "LD_PRELOAD=" HANGING_DISK,
                                   fmt::format("ASAN_OPTIONS={}:verify_asan_link_order=0", options ? options : "")});
  const Process process(
      scratch_,
      train_arguments({"--training.steps=1000000", "--checkpoint.interval=200", "--checkpoint.async_mode=async"}),
      RLIM_INFINITY, launcher);
  process.wait_for_output("step     210");
  const std::map<int, pid_t> ranks = processes_by_rank(process);
  ASSERT_EQ(ranks.size(), 4u);
  EXPECT_THAT(steps_of_folders(checkpoints()), ::testing::IsEmpty());
  kill(ranks.at(2), SIGKILL);
  const Finished finished = process.finish(std::chrono::seconds(10));
  EXPECT_NE(finished.status, 0);
  EXPECT_THAT(only_error(finished.output), HasSubstr("rank 2 has died"));
}

/// One rank reports an error that all ranks find.
TEST_F(ManyRanks, AMeshThatDoesNotFitIsOneError) {
  const auto error = [&](const std::vector<std::string>& more) {
    const Finished finished = run(train_arguments(more), mpirun(4));
    EXPECT_EQ(finished.status, 2) << finished.output;
    return only_error(finished.output);
  };
  EXPECT_THAT(error({"--parallelism.tensor_parallel_degree=3"}),
              AllOf(HasSubstr("parallelism.tensor_parallel_degree is 3"), HasSubstr("the nearest possible: 2 and 4")));
  EXPECT_THAT(error({"--parallelism.pipeline_parallel_degree=4", "--model.args.n_layers=8",
                     "--parallelism.pipeline_parallel_schedule=DualPipeV"}),
              AllOf(HasSubstr("parallelism.pipeline_parallel_degree is 4"),
                    HasSubstr("the number of micro-batches is 4, expected 8 or more"),
                    HasSubstr("training.global_batch_size")));
  EXPECT_THAT(error({"--parallelism.expert_parallel_degree=4", "--model.args.num_experts=6"}),
              AllOf(HasSubstr("parallelism.expert_parallel_degree is 4"), HasSubstr("model.args.num_experts = 6"),
                    HasSubstr("the nearest possible: 2")));
  EXPECT_THAT(error({"--parallelism.tensor_degree=2"}), HasSubstr("parallelism.tensor_degree"));  // no such key
}

/// Returns an mpirun command with a separate command for rank 0. The words that follow it start ranks 1 to 3, to which
/// `options` apply.
std::vector<std::string> mpirun_first(const std::vector<std::string>& command_of_rank_0,
                                      const std::vector<std::string>& options = {}) {
  std::vector<std::string> launcher = mpirun(1);
  launcher.insert(launcher.end(), command_of_rank_0.begin(), command_of_rank_0.end());
  for (const char* argument : {":", "-np", "3"}) launcher.emplace_back(argument);
  launcher.insert(launcher.end(), options.begin(), options.end());
  return launcher;
}

// The model needs more memory than any machine has. The run allocates none of it.
TEST_F(ManyRanks, MoreThanTheMemoryIsRefusedWithWhatFits) {
  const std::string huge = "--model.args.moe_inter_dim=16777216";
  const auto error = [&](const std::vector<std::string>& more) {
    const Finished finished = run(train_arguments(more), mpirun(2));
    EXPECT_EQ(finished.status, 2) << finished.output;
    return only_error(finished.output);
  };
  EXPECT_THAT(error({huge}), AllOf(HasSubstr("the run needs"), HasSubstr("for each of its 2 ranks"),
                                   HasSubstr("GiB per rank\n"), HasSubstr("no mode fits")));
  EXPECT_THAT(error({huge, "--parallelism.pipeline_parallel_degree=2"}), HasSubstr("of the pipeline"));
}

/// /dev/shm often has 64 MiB in a container.
TEST_F(ManyRanks, WindowsThatDoNotFitSharedMemoryAreRefused) {
  std::vector<std::string> launcher = app_test::with_tmpfs("64m", "/dev/shm");
  if (launcher.empty()) GTEST_SKIP() << "this user may not mount a /dev/shm";
  for (const std::string& word : mpirun(4)) launcher.push_back(word);
  const auto run_direct = [&](const std::string& dim) {
    return run(train_arguments({"--training.steps=1", "--model.args.dim=" + dim, "--training.seq_len=256",
                                "--parallelism.expert_parallel_degree=4",
                                "--parallelism.expert_parallel_comm_backend=direct"}),
               launcher);
  };
  const Finished refused = run_direct("2048");
  EXPECT_EQ(refused.status, 2) << refused.output;
  EXPECT_THAT(only_error(refused.output),
              AllOf(HasSubstr("\"direct\" needs 0."), HasSubstr("'/dev/shm' has 0.06GiB"), HasSubstr("remount,size=1G"),
                    HasSubstr("--shm-size"), HasSubstr("expert_parallel_comm_backend=standard")));
  const Finished fits = run_direct("32");
  EXPECT_EQ(fits.status, 0) << fits.output;
}

TEST_F(ManyRanks, RanksThatAreNotGivenTheSameAreRefused) {
  const auto error = [&](const fs::path& program, const std::vector<std::string>& more) {
    const std::vector<std::string> arguments = train_arguments({"--training.steps=2"});
    std::vector<std::string> of_rank_0 = {program};
    of_rank_0.insert(of_rank_0.end(), arguments.begin(), arguments.end());
    of_rank_0.insert(of_rank_0.end(), more.begin(), more.end());
    const Finished finished = run(arguments, mpirun_first(of_rank_0));
    EXPECT_EQ(finished.status, 2) << finished.output;
    return only_error(finished.output);
  };
  EXPECT_THAT(error(TESSERA_BINARY, {"--optimizer.lr=1e-5"}),
              HasSubstr("rank 1 was started with another configuration than rank 0"));
  const fs::path copy = scratch_ / "tessera";
  fs::copy_file(TESSERA_BINARY, copy);
  std::ofstream(copy, std::ios::app) << '\n';
  EXPECT_THAT(error(copy, {}), HasSubstr("rank 1 was started with another program than rank 0"));
}

/// The ranks are on machines whose folders differ. Here they have different working folders instead.
TEST_F(ManyRanks, AFolderThatOneRankLacksEndsAll) {
  fs::create_directories(scratch_ / "empty");
  data::write_file(scratch_ / "file", "");
  const auto error = [&](const fs::path& of_rank_0, const fs::path& of_others, const std::string& dump_folder) {
    const std::vector<std::string> arguments =
        train_arguments({"--training.steps=2", "--training.dataset_path=dataset", "--job.dump_folder=" + dump_folder});
    std::vector<std::string> first = {"-wdir", of_rank_0, TESSERA_BINARY};
    first.insert(first.end(), arguments.begin(), arguments.end());
    const Finished finished = run(arguments, mpirun_first(first, {"-wdir", of_others}));
    EXPECT_EQ(finished.status, 2) << finished.output;
    return only_error(finished.output);
  };
  EXPECT_THAT(error(scratch_.path(), scratch_ / "empty", "outputs"),
              AllOf(ContainsRegex("\\[rank [123] on "), HasSubstr("dataset 'dataset': no such folder")));
  EXPECT_THAT(error(scratch_ / "empty", scratch_.path(), "outputs"),
              AllOf(Not(HasSubstr("[rank")), HasSubstr("dataset 'dataset': no such folder")));
  EXPECT_THAT(error(scratch_.path(), scratch_.path(), "file/outputs"),
              AllOf(Not(HasSubstr("[rank")), HasSubstr("'file/outputs'")));
}

/// The runs save after every step, so a kill at any moment hits a save.
TEST_F(ManyRanks, KillingARankWhileSavingLosesNoCommittedCheckpoint) {
  std::mt19937 random(1);
  std::int64_t last = 0;
  for (int kill = 0; kill < 4; ++kill) {
    const char* mode = kill % 2 == 0 ? "async" : "disabled";
    const Process process(scratch_,
                          train_arguments({"--training.steps=1000000", std::string("--checkpoint.async_mode=") + mode}),
                          RLIM_INFINITY, mpirun(4));
    if (last > 0)
      process.wait_for_output(fmt::format("resumed from {}", checkpoint_path(checkpoints(), last).string()));
    process.wait_for_output(fmt::format("saved {}", checkpoint_path(checkpoints(), last + 2).string()));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
    std::vector<pid_t> ranks = process.children();
    ASSERT_EQ(ranks.size(), 4u);
    std::sort(ranks.begin(), ranks.end());
    ::kill(ranks[random() % ranks.size()], SIGKILL);
    const Finished finished = process.finish();
    EXPECT_NE(finished.status, 0);
    const std::vector<std::int64_t> steps = checkpoint_steps(checkpoints());
    ASSERT_FALSE(steps.empty());
    for (const std::int64_t step : steps) {
      EXPECT_EQ(verify_checkpoint(checkpoint_path(checkpoints(), step)).step, step);
    }
    // Every save that the log reports has been committed.
    last = newest();
    const std::string saved = "saved " + (checkpoints() / "step-").string();
    const std::size_t at = finished.output.rfind(saved);
    ASSERT_NE(at, std::string::npos);
    EXPECT_GE(last, std::stoll(finished.output.substr(at + saved.size())));
  }
  // The run resumes on fewer ranks and trains to its end.
  const Finished finished = run(train_arguments({fmt::format("--training.steps={}", last + 2)}), mpirun(2));
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output,
              HasSubstr(fmt::format("resumed from {}", checkpoint_path(checkpoints(), last).string())));
  EXPECT_EQ(newest(), last + 2);
  for (const auto& entry : fs::directory_iterator(checkpoints())) {
    if (entry.path().filename() == "run.lock") continue;
    EXPECT_EQ(entry.path().extension(), "") << entry.path();
  }
}

/// Converts shards to Hugging Face files, these to a checkpoint of one file, and that to Hugging Face files again.
TEST_F(ManyRanks, ShardsConvertAsOneFileDoes) {
  const Finished trained = run(train_arguments({"--training.steps=2"}), mpirun(4));
  ASSERT_EQ(trained.status, 0) << trained.output;
  EXPECT_TRUE(fs::exists(checkpoints() / "step-2" / "model-00003-of-00004.safetensors"));
  const auto convert = [&](const std::string& to, const fs::path& input, const fs::path& output,
                           const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"convert", "--to", to, "--input", input, "--output", output};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = run(arguments);
    EXPECT_EQ(finished.status, 0) << finished.output;
  };
  convert("hf", scratch_ / "outputs", scratch_ / "hf", {"--dtype", "float32", "--form", "remote-code"});
  convert("tessera", scratch_ / "hf", scratch_ / "one");
  convert("hf", scratch_ / "one", scratch_ / "again", {"--dtype", "float32", "--form", "remote-code"});
  EXPECT_TRUE(fs::exists(scratch_ / "one" / "step-0" / "model.safetensors"));
  std::size_t num_files = 0;
  for (const auto& entry : fs::directory_iterator(scratch_ / "hf")) {
    const std::string name = entry.path().filename();
    EXPECT_TRUE(read_text_file(entry.path()) == read_text_file(scratch_ / "again" / name)) << name;
    ++num_files;
  }
  EXPECT_GE(num_files, 3u);
  const Finished text =
      run({"generate", "--checkpoint", scratch_ / "outputs", "--prompt", "a", "--max-new-tokens", "3"});
  EXPECT_EQ(text.status, 0) << text.output;
}

}  // namespace
}  // namespace tessera
