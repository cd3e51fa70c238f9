#include "run/record/expert_loads.h"

#include <gtest/gtest.h>

#include "run/record/run_files.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

TEST(ExpertLoads, AFileHasWhatWasWritten) {
  const data::TemporaryFolder scratch;
  write_expert_loads({.step = 7, .tokens = {{"layers.1.moe", {1, 2, 3, 2}}}}, scratch / kExpertLoadsName);
  const ExpertLoads loads = read_expert_loads((scratch / kExpertLoadsName).parent_path());
  EXPECT_EQ(loads.step, 7);
  EXPECT_EQ(loads.tokens, (std::map<std::string, std::vector<double>>{{"layers.1.moe", {1, 2, 3, 2}}}));
  EXPECT_EQ(loads.busiest_rank("layers.1.moe", 4, 1), 1.0);
  EXPECT_EQ(loads.busiest_rank("layers.1.moe", 4, 2), 1.25);
  EXPECT_EQ(loads.busiest_rank("layers.1.moe", 4, 4), 1.5);
}

TEST(ExpertLoads, LoadsOfAnotherModelAreRefused) {
  const ExpertLoads loads{.step = 1, .tokens = {{"layers.1.moe", {1, 2}}}, .path = "run/loads.json"};
  expect_error([&] { loads.busiest_rank("layers.9.moe", 2, 1); }, {"run/loads.json", "layers.9.moe", "another model"});
  expect_error([&] { loads.busiest_rank("layers.1.moe", 4, 2); }, {"run/loads.json", "2 experts", "4"});
}

TEST(ExpertLoads, AFileThatHoldsNoLoadsIsRefused) {
  const data::TemporaryFolder scratch;
  const std::filesystem::path path = scratch / "loads.json";
  expect_error([&] { read_expert_loads(path); }, {"there is no", "loads.json", "writes it"});
  const auto refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    data::write_file(path, text);
    expect_error([&] { read_expert_loads(path); }, parts);
  };
  const std::string begin = R"({"format":"tessera expert loads","version":1,"step":3,"tokens":)";
  refused("{", {"loads.json"});
  refused(R"({"format":"tessera calibration","version":1})", {"loads.json", "tessera expert loads"});
  refused(begin + R"({"layers.1.moe":[1,"x"]}})", {"layers.1.moe", "numbers of tokens", "x"});
  refused(begin + R"({"layers.1.moe":[1,-2]}})", {"layers.1.moe", "-2"});
  refused(begin + R"({"layers.1.moe":[0,0]}})", {"layers.1.moe", "no expert has tokens"});
  refused(begin + "3}", {"tokens"});
}

}  // namespace
}  // namespace tessera
