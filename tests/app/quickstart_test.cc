// Tests `tessera quickstart` as a child process: all stages with little time, a second start, and Ctrl-C.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/app/process.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs the program with one thread. Beside other tests, two threads would wait for each other.
Finished run(const TemporaryFolder& scratch, const std::vector<std::string>& arguments) {
  return Process(scratch, arguments, RLIM_INFINITY, {"/usr/bin/env", "OMP_NUM_THREADS=1"}).finish();
}

TEST(Quickstart, GoesThroughItsStagesAndDoesNothingTwice) {
  const TemporaryFolder scratch;
  const fs::path folder = scratch / "quick start";
  const std::vector<std::string> arguments = {"quickstart", "--out", folder, "--seconds=1"};
  const Finished first = run(scratch, arguments);
  ASSERT_EQ(first.status, 0) << first.output;
  EXPECT_THAT(first.output, AllOf(HasSubstr("[1/6]"), HasSubstr("processor:"), HasSubstr("[6/6]"),
                                  HasSubstr("too short to say"), HasSubstr("report.html"), HasSubstr("What next:")));
  EXPECT_THAT(first.output, Not(HasSubstr("\r")));  // without a terminal there is no progress bar
  for (const char* made :
       {"quickstart.toml", "data/dataset.json", "run/metrics.jsonl", "run/report.html", "compare.html"}) {
    EXPECT_TRUE(fs::exists(folder / made)) << made;
  }
  // Other seconds are those of another folder: this one has its runs already.
  const Finished second = run(scratch, {"quickstart", "--out", folder, "--seconds=1000"});
  ASSERT_EQ(second.status, 0) << second.output;
  EXPECT_THAT(second.output, HasSubstr("its runs are of --seconds 1, as at its first start"));
  EXPECT_THAT(second.output, AllOf(HasSubstr("what is done is not done again"), HasSubstr("nothing to do"),
                                   Not(HasSubstr("data prepare --input " + folder.string()))));
  // The configuration has the folder's name. Under another one it would train in the old place.
  fs::rename(folder, scratch / "renamed");
  const Finished renamed = run(scratch, {"quickstart", "--out", scratch / "renamed", "--seconds=1"});
  EXPECT_EQ(renamed.status, 2) << renamed.output;
  EXPECT_THAT(renamed.output, HasSubstr("made under another name"));
}

TEST(Quickstart, CtrlCEndsItAndItGoesOn) {
  const TemporaryFolder scratch;
  const fs::path folder = scratch / "quickstart";
  const Process process(scratch, {"quickstart", "--out", folder, "--seconds=60"});
  process.wait_for_output("norm");  // the run has logged a step
  process.send(SIGINT);
  const Finished stopped = process.finish(std::chrono::seconds(60));
  EXPECT_EQ(stopped.status, 130) << stopped.output;
  EXPECT_THAT(stopped.output, AllOf(HasSubstr("--seconds 60` goes on from here"), Not(HasSubstr("[4/6]"))));
  EXPECT_TRUE(fs::exists(folder / "run" / "checkpoint"));
}

}  // namespace
}  // namespace tessera
