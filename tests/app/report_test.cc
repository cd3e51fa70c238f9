// Tests `tessera report` as a child process, on a run that stops and resumes with another learning rate.
#include "tests/app/process.h"
#include "tests/compare/report/report_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using app_test::small_run;
using compare_test::PlantedRun;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Report : public ::testing::Test {
 protected:
  Finished report(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "report");
    return Process(scratch_, arguments).finish();
  }
  TemporaryFolder scratch_;
};

TEST_F(Report, OfARunThatWentOnWithAnotherLearningRate) {
  data::make_dataset(scratch_, 400, 3000, 0.1);
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments =
        small_run(scratch_, {"--training.local_batch_size=2", "--training.seq_len=32", "--metrics.log_freq=1",
                             "--validation.enable=true", "--validation.freq=4", "--validation.steps=2",
                             "--checkpoint.interval=4", "--metrics.peak_tflops=1"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = Process(scratch_, arguments).finish();
    ASSERT_EQ(finished.status, 0) << finished.output;
  };
  train({"--training.steps=8"});
  train({"--training.steps=12", "--optimizer.lr=0.0001"});
  const fs::path run = scratch_ / "outputs";
  Finished finished = report({run});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("Finished: all 12 steps"), HasSubstr((run / "report.html").string())));
  const std::string html = read_text_file(run / "report.html");
  EXPECT_EQ(compare_test::check_xml(html), "");
  for (const char* part : {"Changed on resume", "optimizer.lr", "0.0001", "3 checkpoints.",
                           "Load of the busiest expert", "MFU", "Where a step", "at step 12", "AdamW"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  EXPECT_EQ(report({run, "--out=" + (scratch_ / "new" / "a.html").string()}).status, 0);
  EXPECT_EQ(report({run, "--output=" + (scratch_ / "new" / "b.html").string()}).status, 0);
  EXPECT_EQ(read_text_file(scratch_ / "new/a.html"), read_text_file(scratch_ / "new/b.html"));
}

TEST_F(Report, BadInputExitsWithTwoAndWritesNoReport) {
  const auto refused = [&](const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    const Finished finished = report(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
    EXPECT_FALSE(fs::exists(scratch_ / "run/report.html"));
  };
  const fs::path run = PlantedRun{.steps = 5}.write(scratch_ / "run");
  refused({}, {"run"});
  refused({scratch_ / "nowhere"}, {"there is no folder", "nowhere", "job.dump_folder"});
  refused({run / "metrics.jsonl"}, {"there is no folder", "metrics.jsonl"});
  refused({scratch_ / "."}, {"holds no run", "job.dump_folder"});
  const std::string lines = read_text_file(run / "metrics.jsonl");
  data::write_file(run / "metrics.jsonl", "");
  refused({run}, {"metrics.jsonl", "no line of a step", "expected one"});
  data::write_file(run / "metrics.jsonl", "{\"step\":1,\n" + lines);
  refused({run}, {"metrics.jsonl', line 1", "not JSON"});
  data::write_file(run / "metrics.jsonl", lines + lines);  // as if a resumed run had kept the steps that it repeats
  refused({run}, {"line 6", "step 1 comes after step 5", "expected ascending steps"});
  data::write_file(run / "metrics.jsonl", lines);
  refused({run, "--out=" + scratch_.path().string()}, {"is a folder"});
  for (const char* own : {"metrics.jsonl", "run.json"}) {
    const std::string before = read_text_file(run / own);
    refused({run, "--out=" + (run / own).string()}, {own, "belongs to a run"});
    EXPECT_EQ(read_text_file(run / own), before);
  }
  fs::rename(run / "metrics.jsonl", run / "lines");
  ASSERT_EQ(::mkfifo((run / "metrics.jsonl").c_str(), 0600), 0);  // nobody writes to it
  refused({run}, {"metrics.jsonl", "not a regular file"});
  fs::rename(run / "lines", run / "metrics.jsonl");
  fs::remove(run / "run.json");
  refused({run}, {"run.json", "tessera train"});
}

}  // namespace
}  // namespace tessera
