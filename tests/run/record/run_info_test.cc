#include "run/record/run_info.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

JobConfig config_of(const std::filesystem::path& dataset, const std::vector<std::string>& more = {}) {
  std::vector<std::string> overrides = {"--training.dataset_path=" + dataset.string(), "--training.steps=7"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return parse_job_config("", overrides);
}

const RunIdentity kRun{.id = "a-run", .attempt = 2};

TEST(RunInfo, HoldsTheWholeConfigurationAndTheData) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000, 0.2);
  data::write_file(scratch / "run/run.json", "of an earlier start");
  JobConfig config = config_of(dataset, {"--model.args.score_func=sigmoid", "--validation.enable"});
  write_run_info(scratch / "run", {.run = kRun, .config = config, .num_data_ranks = 2});
  const auto info = nlohmann::json::parse(read_text_file(scratch / "run/run.json"));
  EXPECT_FALSE(info.contains("gpus"));
  EXPECT_EQ(info["format"], "tessera-run");
  const std::optional<RunIdentity> run = read_run_identity(scratch / "run");
  ASSERT_TRUE(run.has_value());
  EXPECT_EQ(run->id, kRun.id);
  EXPECT_EQ(run->attempt, kRun.attempt);
  EXPECT_EQ(info["config"].size(), config_table(config).describe().size());
  EXPECT_EQ(info["config"]["training.steps"], "7");
  EXPECT_EQ(info["config"]["training.global_batch_size"], std::to_string(2 * config.training.local_batch_size));
  EXPECT_EQ(info["data_ranks"], 2);
  EXPECT_EQ(info["config"]["model.args.score_func"], "\"sigmoid\"");
  EXPECT_EQ(info["dataset"].size(), 2u);
  EXPECT_NE(info["dataset"]["train"], info["dataset"]["val"]);
  EXPECT_GE(info["threads"], 1);
  EXPECT_NE(info["processor"], "");
  EXPECT_NE(info["program"], "");
  write_run_info(scratch / "run",
                 {.run = kRun, .config = config, .num_data_ranks = 2, .gpus = {"NVIDIA H200", "NVIDIA H200"}});
  const auto on_gpus = nlohmann::json::parse(read_text_file(scratch / "run/run.json"));
  EXPECT_EQ(on_gpus["gpus"], (nlohmann::json{"NVIDIA H200", "NVIDIA H200"}));
}

TEST(RunInfo, AFileThatCannotBeLookedForIsAnError) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000, 0.2);
  std::filesystem::create_symlink("run.json", scratch / "run.json");  // a link to itself
  expect_error([&] { read_run_identity(scratch.path()); }, {"cannot look for", "run.json", "Too many levels"});
  expect_error([&] { write_run_info(scratch.path(), {.run = kRun, .config = config_of(dataset)}); },
               {"cannot look for", "run.json", "Too many levels"});
}

TEST(RunInfo, DocumentsEndWithTheTokenizersEos) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000, 0.2);
  const data::Manifest manifest = data::read_manifest(dataset);
  ASSERT_GE(manifest.eos_id, 0);
  ASSERT_NE(manifest.eos_id, manifest.bos_id);
  JobConfig config = config_of(dataset), other = config_of(dataset, {"--model.args.eos_id=77"});
  set_document_end(config);
  EXPECT_EQ(config.model.args.eos_id, manifest.eos_id);
  set_document_end(other);
  EXPECT_EQ(other.model.args.eos_id, 77);
}

/// A dataset is identified by its tokens, not by its path.
TEST(RunInfo, DataIsItsTokens) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000);
  const auto identity = dataset_identity(config_of(dataset));
  EXPECT_EQ(identity.size(), 1u);
  std::filesystem::rename(dataset, scratch / "moved");
  EXPECT_EQ(dataset_identity(config_of(scratch / "moved")), identity);
  EXPECT_NE(dataset_identity(config_of(data::make_dataset(scratch, 101, 3000))), identity);
}

/// The file of a finished run says what the run was trained with, even if it is started again with other keys.
TEST(RunInfo, AFinishedRunKeepsItsFile) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000);
  std::filesystem::create_directories(scratch / "run");
  write_run_info(scratch / "run", {.run = kRun, .config = config_of(dataset), .first_step = 8});
  const std::string written = read_text_file(scratch / "run/run.json");
  write_run_info(
      scratch / "run",
      {.run = kRun, .config = config_of(dataset, {"--model.converters=quantize.linear.mx"}), .first_step = 8});
  EXPECT_EQ(read_text_file(scratch / "run/run.json"), written);
}

TEST(RunInfo, ChangesOnResumingAreRecorded) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000);
  std::filesystem::create_directories(scratch / "run");
  const auto start = [&](std::int64_t first_step, const std::vector<std::string>& overrides) {
    write_run_info(scratch / "run", {.run = kRun, .config = config_of(dataset, overrides), .first_step = first_step});
    const auto info = nlohmann::json::parse(read_text_file(scratch / "run/run.json"));
    return info.value("changed", nlohmann::json::object());
  };
  using List = std::vector<std::string>;
  EXPECT_TRUE(start(1, {}).empty());
  EXPECT_TRUE(start(3, {"--metrics.log_freq=3", "--validation.enable", "--checkpoint.interval=2", "--job.description=x",
                        "--profiling.profile_freq=2", "--training.num_threads=1", "--model.print_after_conversion"})
                  .empty());
  auto changed = start(3, {"--optimizer.lr=0.5"});
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed["optimizer.lr"], (List{"0.0008", "0.5 at step 3"}));
  EXPECT_EQ(start(5, {"--optimizer.lr=0.5"}), changed);  // the change is kept
  changed = start(6, {"--optimizer.lr=0.25", "--optimizer.beta1=0.8"});
  EXPECT_EQ(changed["optimizer.lr"], (List{"0.0008", "0.5 at step 3", "0.25 at step 6"}));
  EXPECT_EQ(changed["optimizer.beta1"], (List{"0.9", "0.8 at step 6"}));
  // The run goes back to step 4, before the second change, so that change is dropped.
  EXPECT_EQ(start(4, {"--optimizer.lr=0.5"}), (nlohmann::json{{"optimizer.lr", List{"0.0008", "0.5 at step 3"}}}));
  EXPECT_TRUE(start(2, {}).empty());
  constexpr std::size_t kDepth = 300'000;  // copying such a value would overflow the stack
  for (const std::string& damaged :
       {std::string("damaged"), "{\"a\":" + std::string(kDepth, '[') + std::string(kDepth, ']') + "}"}) {
    data::write_file(scratch / "run/run.json", damaged);
    EXPECT_TRUE(start(2, {}).empty());
  }
}

// A run that resumes in a new folder from a checkpoint elsewhere has no run.json yet. The checkpoint has its old
// configuration.
TEST(RunInfo, ChangesAgainstTheCheckpointAreRecorded) {
  const TemporaryFolder scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000);
  std::filesystem::create_directories(scratch / "run");
  write_run_info(scratch / "run",
                 {.run = kRun,
                  .config = config_of(dataset, {"--optimizer.lr=4e-4"}),
                  .first_step = 5,
                  .saved = config_of(dataset, {"--optimizer.lr=2e-4", "--training.global_batch_size=8"})});
  const auto info = nlohmann::json::parse(read_text_file(scratch / "run/run.json"));
  EXPECT_EQ(info["changed"], nlohmann::json({{"optimizer.lr", {"0.0002", "0.0004 at step 5"}}}));
}

}  // namespace
}  // namespace tessera
