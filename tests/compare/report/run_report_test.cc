// Tests what the report of one run says. browser_test.cc tests how it looks.
#include "compare/report/run_report.h"

#include <gmock/gmock.h>

#include "compare/curve.h"
#include "compare/report/run_figures.h"
#include "compare/report/svg_plot.h"
#include "tests/compare/report/report_support.h"

namespace tessera {
namespace {

using compare_test::check_xml;
using compare_test::PlantedRun;
using compare_test::write_full_run;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::system_clock::time_point kAsOf{std::chrono::hours(24 * 365)};  // 1971-01-01

std::string page_of(const std::filesystem::path& folder) { return run_report_html(read_run(folder), kAsOf); }

TEST(RunReport, HasEveryPart) {
  const TemporaryFolder scratch;
  const std::string html = page_of(write_full_run(scratch / "runs/first", {.steps = 200, .moe_layers = 5}));
  EXPECT_EQ(check_xml(html), "");
  for (const char* part : {"<h1>runs/first</h1>",
                           "<b>Finished: all 200 steps</b>",
                           "1971-01-01 00:00 UTC",
                           ">Loss<",
                           "Loss, second half",
                           "Learning rate",
                           "Gradient norm",
                           "clipped above 1",
                           "Tokens per second",
                           "Model FLOP utilization (MFU)",
                           "Where a step&#39;s time goes",
                           "forward 25\u00a0%",
                           "backward 50\u00a0%",
                           "other 5\u00a0%",
                           ">Memory<",
                           "Load of the busiest expert",
                           "Checkpoints",
                           "4 checkpoints. Training waited for 30 ms of each (median).",
                           "Quantization error (SQNR)",
                           "Changed on resume",
                           "configuration changed",
                           "5 &lt;layers&gt;",
                           "vocabulary 258",
                           "All ",
                           "Validation loss",
                           "410k",
                           "AdamW"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  for (const char* outside :
       {"<script", "http:", "https:", "url(http", "@import", "src=", ">nan<", "\"nan\"", "nan,", "inf<"}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
}

/// A run of an older version logged less, such as those in docs/runs.
TEST(RunReport, FiguresWithoutNumbersAreLeftOut) {
  const TemporaryFolder scratch;
  const std::string html = page_of(PlantedRun{}.write(scratch / "run"));
  EXPECT_EQ(check_xml(html), "");
  for (const char* part :
       {"Learning rate</h3>", "MFU", "Where a step", "busiest", "Checkpoints", "SQNR", "Changed on"}) {
    EXPECT_THAT(html, Not(HasSubstr(part)));
  }
  EXPECT_THAT(html, AllOf(HasSubstr("Gradient norm"), HasSubstr("Tokens per second"), HasSubstr("Memory")));
}

/// Every prefix of the file belongs to a run that goes on. An incomplete last line does not count.
TEST(RunReport, ARunThatGoesOn) {
  const TemporaryFolder scratch;
  const auto folder = write_full_run(scratch / "run", {.steps = 300, .last_step = 100});
  EXPECT_THAT(page_of(folder), AllOf(HasSubstr("<b>Step 100 of 300 (33\u00a0%)</b>"), HasSubstr("about 40.0 s left"),
                                     HasSubstr("width:33.3%")));
  const std::string whole = read_text_file(folder / "metrics.jsonl");
  const std::size_t last_line = whole.rfind('\n', whole.size() - 2) + 1;
  for (std::size_t size = last_line; size <= whole.size(); size += 7) {
    data::write_file(folder / "metrics.jsonl", whole.substr(0, size));
    EXPECT_EQ(check_xml(page_of(folder)), "");
  }
  // These runs have one step and two.
  for (const std::int64_t steps : {1, 2}) {
    EXPECT_EQ(check_xml(page_of(write_full_run(scratch / "short", {.steps = 300, .last_step = steps}))), "");
  }
}

TEST(RunReport, ARunThatBrokeDown) {
  const TemporaryFolder scratch;
  PlantedRun planted{.steps = 50, .last_step = 13};
  planted.loss = [](double loss, std::int64_t step) { return step == 13 ? std::nan("") : loss; };
  const std::string html = page_of(planted.write(scratch / "run"));
  EXPECT_THAT(html,
              AllOf(HasSubstr("Broke down: the loss is not finite at step 13 of 50"), HasSubstr("verdict worse")));
  EXPECT_EQ(check_xml(html), "");
}

TEST(RunReport, WhatIsNoRunIsRefused) {
  const TemporaryFolder scratch;
  expect_error([&] { require_run(scratch / "nowhere"); }, {"nowhere", "expected a run's folder", "job.dump_folder"});
  std::filesystem::create_directory(scratch / "empty");
  expect_error([&] { require_run(scratch / "empty"); }, {"empty", "metrics.jsonl", "job.dump_folder"});
  const auto folder = PlantedRun{.steps = 5}.write(scratch / "run");
  data::write_file(folder / "metrics.jsonl", "");
  expect_error([&] { page_of(folder); }, {"metrics.jsonl", "no line of a step", "expected one", "wait for its first"});
  data::write_file(folder / "metrics.jsonl", "{\"step\":1,\"validation_loss\":4}\n");
  expect_error([&] { page_of(folder); }, {"no line of a step"});
}

TEST(RunRecord, ReadsEverythingThatAReportShows) {
  const TemporaryFolder scratch;
  const RunRecord run = read_run(write_full_run(scratch / "run", {.steps = 100, .moe_layers = 3}));
  EXPECT_EQ(run.learning_rates.at(49), 1e-3 * 50);
  EXPECT_EQ(run.mfus.at(0), 0.4);
  EXPECT_EQ(run.forward_seconds.at(0), 0.05);
  EXPECT_EQ(run.optimizer_seconds.at(99), 0.03);
  EXPECT_EQ(run.expert_loads.at(9).size(), 3u);
  ASSERT_EQ(run.checkpoints.size(), 2u);
  EXPECT_EQ(run.checkpoints[1].step, 100);
  EXPECT_EQ(run.checkpoints[1].stall_seconds, 0.03);
  EXPECT_EQ(run.gradient_clip(), 1.0);
  EXPECT_EQ(run.first_moe_layer(), 1);
  const std::vector<ConfigChange> changes = run.changes();
  ASSERT_EQ(changes.size(), 3u);
  EXPECT_EQ(changes[0].key, "optimizer.lr");
  EXPECT_EQ(changes[0].before, "0.0008");
  EXPECT_EQ(changes[0].after, "0.0004");
  EXPECT_EQ(changes[0].step, 41);
  EXPECT_EQ(changes[1].key, "training.steps");
  EXPECT_EQ(changes[2].before, "0.0004");
  EXPECT_EQ(changes[2].step, 81);
}

TEST(RunRecord, DamagedFieldsOfAReportAreNamed) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{.steps = 1}.write(scratch / "run");
  const std::string start = R"({"step":1,"loss":4,"grad_norm":1,"tokens_per_second":1,"memory_bytes":1)";
  const auto refused = [&](const std::string& rest, const std::vector<std::string>& parts) {
    data::write_file(folder / "metrics.jsonl", start + rest + "}\n");
    expect_error([&] { read_run(folder); }, parts);
  };
  refused(R"(,"lr":"x")", {"line 1", "lr", "a number"});
  refused(R"(,"seconds":3)", {"line 1", "seconds", "an object"});
  refused(R"(,"seconds":{"data":"x"})", {"seconds.data", "a number"});
  refused(R"(,"expert_load_per_layer":[1,"x"])", {"expert_load_per_layer", "numbers", "x"});
  refused(R"(,"checkpoint_seconds":1)", {"checkpoint_stall_seconds"});
  data::write_file(folder / "metrics.jsonl", start + R"(,"lr":null,"seconds":null,"expert_load_per_layer":[null]})");
  EXPECT_TRUE(std::isnan(read_run(folder).learning_rates.at(0)));
  auto info = nlohmann::json::parse(read_text_file(folder / "run.json"));
  info["changed"] = {{"optimizer.lr", {"0.0008", "0.0004"}}};
  data::write_file(folder / "run.json", info.dump());
  expect_error([&] { page_of(folder); }, {"run.json", "changed.optimizer.lr", "VALUE at step N", "0.0004"});
}

TEST(Curve, SmoothedOverFiniteValuesWithTheirRange) {
  std::vector<std::int64_t> steps;
  std::vector<double> values;
  for (int i = 0; i < 150; ++i) {
    steps.push_back(i + 1);
    values.push_back(i);
  }
  values[10] = std::nan("");
  const Curve curve = smoothed_curve(steps, values);
  ASSERT_EQ(curve.x.size(), 150u);
  EXPECT_EQ(smoothing_window(150), 3);
  EXPECT_EQ(curve.y[50], 50.0);
  EXPECT_EQ(curve.low[50], 49.0);
  EXPECT_EQ(curve.high[50], 51.0);
  EXPECT_EQ(curve.y[0], 0.5);
  EXPECT_EQ(curve.y[10], 10.0);  // the mean of 9 and 11
  EXPECT_TRUE(smoothed_curve({1, 2}, std::vector<double>{1.0, 2.0}).low.empty());
}

TEST(SvgHeatMap, NeighboursOfOneLevelAreOneShape) {
  const HeatMap map{.id = "m",
                    .description = "a < b",
                    .x_label = "step",
                    .y_label = "layer",
                    .x_range = {0.0, 4.0},
                    .edges = {0, 1, 2, 3, 4},
                    .first_row = 1,
                    .levels = {{0, 0, 0, 7}, {2, -1, -1, 2}}};
  const std::string svg = svg_heat_map(map);
  EXPECT_EQ(check_xml(svg), "");
  const auto shapes = [&](const std::string& level) {
    const std::size_t begin = svg.find("class=\"" + level + "\" d=\"");
    if (begin == std::string::npos) return std::ptrdiff_t(0);
    const std::size_t end = svg.find("/>", begin);
    return std::count(svg.begin() + static_cast<std::ptrdiff_t>(begin), svg.begin() + static_cast<std::ptrdiff_t>(end),
                      'z');
  };
  EXPECT_EQ(shapes("h0"), 1);
  EXPECT_EQ(shapes("h7"), 1);
  EXPECT_EQ(shapes("h2"), 2);
  EXPECT_EQ(shapes("h1"), 0);
  EXPECT_THAT(svg, AllOf(HasSubstr(">1</text>"), HasSubstr(">2</text>"), Not(HasSubstr(">1.5</text>"))));
}

TEST(Duration, InTheUnitThatFits) {
  std::vector<std::string> texts;
  for (const double seconds : {0.0162, 41.46, 1000.0, 11'111.0, 200'000.0, 1e300})
    texts.push_back(duration_text(seconds));
  EXPECT_THAT(texts, ElementsAre("16 ms", "41.5 s", "17 min", "3 h 5 min", "2 d 7 h", "1e+300 s"));
}

}  // namespace
}  // namespace tessera
