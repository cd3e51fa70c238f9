#include "run/restart_step.h"

#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

class RestartStepTest : public ::testing::Test {
 protected:
  void save(std::int64_t step, const std::string& content) {
    data::write_file(scratch_ / ("step-" + std::to_string(step)) / "manifest.json", content);
  }

  const data::TemporaryFolder scratch_;
};

TEST_F(RestartStepTest, TheNewestOfAllIsOfThisLaunch) {
  for (const std::int64_t step : {5, 10, 15}) save(step, "old");
  LaunchBegin begin = begin_of_launch(scratch_.path(), 15);
  EXPECT_EQ(restart_step(scratch_.path(), begin), 15);  // an earlier launch may have left copies in memory
  begin.has_trained = true;
  EXPECT_EQ(restart_step(scratch_.path(), begin), -1);  // of step 15 or of newer copies in memory
  begin.has_trained = false;
  save(20, "new");
  EXPECT_EQ(restart_step(scratch_.path(), begin), -1);
  std::filesystem::remove_all(scratch_ / "step-15");  // checkpoint.keep_latest_k
  EXPECT_EQ(restart_step(scratch_.path(), begin), -1);
}

TEST_F(RestartStepTest, LaterOnesThatWereLeftBehindAreNotResumedFrom) {
  for (const std::int64_t step : {10, 15, 20, 25, 30}) save(step, "old");
  std::filesystem::remove(scratch_ / "step-30" / "manifest.json");
  const LaunchBegin begin = begin_of_launch(scratch_.path(), 15);
  EXPECT_EQ(restart_step(scratch_.path(), begin), 15);
  save(18, "new");
  EXPECT_EQ(restart_step(scratch_.path(), begin), 18);
  save(20, "new");
  EXPECT_EQ(restart_step(scratch_.path(), begin), 20);
  save(25, "new");
  save(30, "new");
  EXPECT_EQ(restart_step(scratch_.path(), begin), -1);
}

}  // namespace
}  // namespace tessera
