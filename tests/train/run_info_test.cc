#include "train/run_info.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::Scratch;

JobConfig config_of(const std::filesystem::path& dataset, const std::vector<std::string>& more = {}) {
  std::vector<std::string> overrides = {"--training.dataset_path=" + dataset.string(), "--training.steps=7"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return parse_job_config("", overrides);
}

TEST(RunInfo, HoldsTheWholeConfigurationAndTheData) {
  const Scratch scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000, 0.2);
  data::write_file(scratch / "run/run.json", "of an earlier start");
  JobConfig config = config_of(dataset, {"--model.args.score_func=sigmoid", "--validation.enable"});
  write_run_info(scratch / "run", config);
  const auto info = nlohmann::json::parse(read_text_file(scratch / "run/run.json"));
  EXPECT_EQ(info["format"], "tessera-run");
  EXPECT_EQ(info["config"].size(), config_table(config).describe().size());
  EXPECT_EQ(info["config"]["training.steps"], "7");
  EXPECT_EQ(info["config"]["model.args.score_func"], "\"sigmoid\"");
  EXPECT_EQ(info["dataset"].size(), 2u);
  EXPECT_NE(info["dataset"]["train"], info["dataset"]["val"]);
  EXPECT_GE(info["threads"], 1);
  EXPECT_NE(info["processor"], "");
  EXPECT_NE(info["program"], "");
}

/// The data is known by what it is, not by where it is.
TEST(RunInfo, DataIsItsTokens) {
  const Scratch scratch;
  const auto dataset = data::make_dataset(scratch, 100, 3000);
  const auto identity = dataset_identity(config_of(dataset));
  EXPECT_EQ(identity.size(), 1u);
  std::filesystem::rename(dataset, scratch / "moved");
  EXPECT_EQ(dataset_identity(config_of(scratch / "moved")), identity);
  EXPECT_NE(dataset_identity(config_of(data::make_dataset(scratch, 101, 3000))), identity);
}

}  // namespace
}  // namespace tessera
