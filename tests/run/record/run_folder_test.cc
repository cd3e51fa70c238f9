#include "run/record/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "run/record/run_info.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

/// Sets environment variables as long as it lives.
class EnvironmentVariables {
 public:
  explicit EnvironmentVariables(std::map<std::string, std::string> variables) : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~EnvironmentVariables() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
  }
  EnvironmentVariables(const EnvironmentVariables&) = delete;
  EnvironmentVariables& operator=(const EnvironmentVariables&) = delete;

 private:
  std::map<std::string, std::string> variables_;
};

class RunFolders : public ::testing::Test {
 protected:
  /// Returns the configuration of a run in the scratch folder, with checkpoints on.
  JobConfig config(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> overrides = {"--checkpoint.enable", "--job.dump_folder=" + folder().string()};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return parse_job_config("", overrides);
  }
  std::filesystem::path folder() const { return scratch_ / "outputs"; }
  std::filesystem::path checkpoints() const { return folder() / "checkpoint"; }

  /// Leaves the files of a run that has logged a step.
  void leave_run(const RunIdentity& run) const {
    data::write_file(folder() / "metrics.jsonl", "{\"step\": 1}\n");
    data::write_file(folder() / "run.json",
                     fmt::format("{{\"run\": {{\"id\": \"{}\", \"attempt\": {}}}}}", run.id, run.attempt));
  }
  void leave_checkpoint() const { save_checkpoint(checkpoints(), {}, {.step = 4, .num_shards = 0}); }

  TemporaryFolder scratch_;
};

template <typename Action>
ExitStatus status_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.status();
  }
  return ExitStatus::kDone;
}

TEST_F(RunFolders, AnotherRunsMetricsAreNotOverwritten) {
  { const RunFolder empty(config(), checkpoints()); }
  leave_run({.id = "first"});
  const auto start = [&](const std::vector<std::string>& more) { const RunFolder run(config(more), checkpoints()); };
  expect_error([&] { start({}); }, {"outputs", "another run", "job.dump_folder", "job.overwrite"});
  expect_error([&] { start({"--job.run_id=second"}); }, {"another run"});
  EXPECT_NO_THROW(start({"--job.overwrite"}));
  // Another attempt of the same run may begin at step 1 again, with a checkpoint or without.
  EXPECT_NO_THROW(start({"--job.run_id=first"}));
  EXPECT_NO_THROW(start({"--job.run_id=first", "--job.attempt=2"}));
  expect_error([&] { start({"--job.run_id=first", "--job.attempt=1"}); }, {"another run"});
  // A late process of an earlier attempt does not take a later attempt's place, even if no process holds the folder.
  leave_run({.id = "first", .attempt = 3});
  expect_error(
      [&] {
        start({"--job.run_id=first", "--job.attempt=2"});
      },
      {"run first, attempt 2", "later attempt, 3,"});
  leave_run({.id = "first"});
  // A run that resumes from a checkpoint overwrites nothing.
  leave_checkpoint();
  EXPECT_NO_THROW(start({}));
  expect_error([&] { start({"--checkpoint.enable=false"}); },
               {"another run", "checkpoint.enable to go on from step 4"});
}

/// A launcher restarts a run whose storage fails. Here, a socket stands for that: to open one fails with ENXIO.
TEST_F(RunFolders, StorageThatFailsHasItsStatus) {
  std::filesystem::create_directories(folder());
  ASSERT_EQ(mknod((folder() / "run.lock").c_str(), S_IFSOCK | 0600, 0), 0);
  EXPECT_EQ(status_of([&] { RunFolder(config(), checkpoints()); }), ExitStatus::kStorageFailed);
}

TEST_F(RunFolders, OneProgramAtATime) {
  const RunFolder first(config({"--job.run_id=first"}), checkpoints());
  expect_error([&] { const RunFolder second(config(), checkpoints()); },
               {"job.dump_folder", "in use", "run first, attempt 1", "process"});
  // The folder of checkpoints is locked wherever it is.
  const JobConfig elsewhere =
      parse_job_config("", {"--checkpoint.enable", fmt::format("--job.dump_folder={}", (scratch_ / "other").string())});
  expect_error([&] { const RunFolder other(elsewhere, checkpoints()); }, {"checkpoint.folder", "in use"});
  // Both folders may be the same.
  const JobConfig both =
      parse_job_config("", {"--checkpoint.enable", "--job.dump_folder=" + (scratch_ / "c").string()});
  EXPECT_NO_THROW(const RunFolder same(both, scratch_ / "c"));
}

// The process of an earlier attempt hangs. It writes nothing when it wakes up.
TEST_F(RunFolders, TheNextAttemptTakesOver) {
  const RunFolder first(config({"--job.run_id=run", "--job.attempt=1"}), checkpoints());
  EXPECT_NO_THROW(first.require_held());
  expect_error(
      [&] {
        const RunFolder same(config({"--job.run_id=run", "--job.attempt=1"}), checkpoints());
      },
      {"in use"});
  expect_error(
      [&] {
        const RunFolder other(config({"--job.run_id=other", "--job.attempt=2"}), checkpoints());
      },
      {"in use"});
  // This process has no attempt number: it may be the same command, started twice.
  expect_error([&] { const RunFolder uncounted(config({"--job.run_id=run"}), checkpoints()); }, {"in use"});
  const RunFolder second(config({"--job.run_id=run", "--job.attempt=2"}), checkpoints());
  EXPECT_NO_THROW(second.require_held());
  expect_error([&] { first.require_held(); }, {"run run, attempt 1", "taken over"});
  EXPECT_EQ(status_of([&] { first.require_held(); }), ExitStatus::kTakenOver);
  EXPECT_EQ(status_of([&] {
              const RunFolder late(config({"--job.run_id=run", "--job.attempt=1"}), checkpoints());
            }),
            ExitStatus::kTakenOver);
  expect_error([&] { const RunFolder third(config(), checkpoints()); }, {"in use", "run run, attempt 2"});
}

TEST_F(RunFolders, WhichRunAProcessBelongsTo) {
  const RunIdentity one = identify_run(config(), {}), two = identify_run(config(), {});
  EXPECT_NE(one.id, two.id);
  EXPECT_EQ(one.attempt, 1);
  EXPECT_FALSE(one.is_counted);
  const RunIdentity next = identify_run(config({"--job.run_id=x"}), RunIdentity{.id = "x", .attempt = 4});
  EXPECT_EQ(next.attempt, 5);
  EXPECT_FALSE(next.is_counted);
  EXPECT_EQ(identify_run(config({"--job.run_id=x"}), RunIdentity{.id = "y", .attempt = 4}).attempt, 1);

  const EnvironmentVariables job({{"SLURM_JOB_ID", "4711"}, {"SLURM_STEP_ID", "0"}, {"SLURM_RESTART_COUNT", "2"}});
  const std::string of_job = identify_run(config(), {}).id;
  EXPECT_THAT(of_job, ::testing::MatchesRegex("slurm-4711\\.0-[0-9a-f]{8}"));
  EXPECT_NE(identify_run(config({"--job.dump_folder=other"}), {}).id, of_job);  // two runs of one job
  const RunIdentity requeued = identify_run(config(), RunIdentity{.id = of_job, .attempt = 2});
  EXPECT_EQ(requeued.id, of_job);
  EXPECT_EQ(requeued.attempt, 3);
  EXPECT_TRUE(requeued.follows({.id = of_job, .attempt = 2}));
  EXPECT_FALSE(requeued.follows({.id = of_job, .attempt = 3}));  // one job started the run twice
  EXPECT_EQ(identify_run(config({"--job.run_id=x"}), {}).id, "x");
}

TEST_F(RunFolders, NamesOfRunsArePlain) {
  expect_error([&] { config({"--job.run_id=a b"}).validate(); }, {"job.run_id is 'a b'", "letters"});
  expect_error([&] { config({"--job.attempt=-1"}).validate(); }, {"job.attempt is -1"});
  expect_error([&] { config({"--job.node_folder=node"}).validate(); }, {"job.node_folder is 'node'", "'/'"});
}

}  // namespace
}  // namespace tessera
