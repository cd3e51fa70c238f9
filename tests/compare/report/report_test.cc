// Tests what the report says and how it is made. browser_test.cc tests how it looks.
#include "compare/report/report.h"

#include <gmock/gmock.h>

#include "compare/report/html.h"
#include "compare/report/report_style.h"
#include "compare/report/svg_plot.h"
#include "compare/statistics.h"
#include "system/child_process.h"
#include "tests/compare/report/report_support.h"

namespace tessera {
namespace {

using compare_test::check_xml;
using compare_test::planted_comparison;
using compare_test::PlantedRun;
using data::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(RoundTicks, AreRound) {
  EXPECT_THAT(round_ticks(0, 300, 5), ElementsAre(0, 100, 200, 300));
  EXPECT_THAT(round_ticks(1, 10, 5), ElementsAre(2, 4, 6, 8, 10));
  const std::vector<double> small = round_ticks(-0.4, 0.4, 5);
  ASSERT_EQ(small.size(), 5u);
  EXPECT_NEAR(small[1], -0.2, 1e-12);
  EXPECT_THAT(log_ticks(0.4, 30), ElementsAre(0.5, 1, 2, 5, 10, 20));
  EXPECT_EQ(log_ticks(1e-6, 1e6).size(), 13u);
  // The bounds differ in a few last bits, so no step fits between them.
  EXPECT_THAT(round_ticks(0.1, std::nextafter(0.1, 1.0), 5), ElementsAre(0.1));
}

TEST(SvgPlot, DrawsWhatIsFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Plot plot{.id = "p", .description = "a < b", .x_label = "step", .y_label = "y"};
  plot.series = {{{.x = {1, 2, 3, 4, 5}, .y = {1, 2, nan, 4, HUGE_VAL}, .low = {}, .high = {}}, 0}};
  const std::string svg = svg_plot(plot);
  EXPECT_THAT(check_xml(svg), "");
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  // An empty curve, a point and a constant must show something, and no NaN.
  for (const Curve& curve :
       {Curve{}, Curve{{1}, {2}, {2}, {2}}, Curve{{1, 2}, {0, 0}, {}, {}}, Curve{{1}, {nan}, {}, {}},
        Curve{{1, 2}, {0.1, std::nextafter(0.1, 1.0)}, {}, {}}, Curve{{1, 2}, {1e9, 1e9 + 1e-6}, {}, {}}}) {
    plot.series = {{curve, 1}};
    const std::string odd = svg_plot(plot);
    EXPECT_THAT(check_xml(odd), "");
    EXPECT_THAT(odd, Not(HasSubstr("nan")));
    EXPECT_THAT(odd, HasSubstr("<text"));
  }
  // The smallest and the largest numbers must not make a bound of the axis 0 or infinite.
  plot.log_y = true;
  plot.series = {{{.x = {1, 2, 3}, .y = {5e-324, 1.0, 1e308}, .low = {}, .high = {}}, 0}};
  const std::string wide = svg_plot(plot);
  EXPECT_THAT(check_xml(wide), "");
  EXPECT_THAT(wide, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
}

TEST(HtmlEscape, LeavesOnlyCharactersOfXml) {
  EXPECT_EQ(html_escape("a\tb\nc\xc3\xbc"), "a\tb\nc\xc3\xbc");
  const std::string escaped = html_escape(std::string("\0\x1b[1m \xef\xbf\xbe \xef\xbf\xbf caf\xe9 <", 20));
  EXPECT_EQ(escaped, "\uFFFD\uFFFD[1m \uFFFD \uFFFD caf\uFFFD &lt;");
  EXPECT_EQ(check_xml("<p>" + escaped + "</p>"), "");
}

TEST(Report, IsWellFormedSelfContainedAndEscaped) {
  const TemporaryFolder scratch;
  const Comparison comparison = planted_comparison(scratch, {.label = "a<b>&\"'", .offset = 0.0002, .sqnr_layers = 6});
  const std::string html = report_html(comparison);
  EXPECT_EQ(check_xml(html), "");
  const auto has = [&](const std::string& part) { return html.find(part) != std::string::npos; };
  EXPECT_TRUE(has("a&lt;b&gt;&amp;&quot;&#39;"));
  EXPECT_TRUE(has("Planted &lt;Processor&gt; &amp; Co."));
  for (const char* outside : {"<script", "http:", "https:", "url(http", "@import", "src=", "<b>&\""}) {
    EXPECT_FALSE(has(outside)) << outside;
  }
  EXPECT_TRUE(has("name=\"viewport\""));
  EXPECT_EQ(occurrences(html, "<figure>"), 5u);  // loss, difference, gradient norm, and two of the SQNR
  EXPECT_TRUE(has("<b>equivalent</b> (difference +0.02\u00a0% ± 0.07\u00a0%, margin 0.25\u00a0%)"))
      << comparison.sides[1].verdict->text;
  EXPECT_TRUE(has("model.<wbr/>converters"));
}

TEST(Report, WithoutLowPrecisionThereIsNoSqnr) {
  const TemporaryFolder scratch;
  const std::string html = report_html(planted_comparison(scratch, {}));
  EXPECT_EQ(occurrences(html, "<figure>"), 3u);
  EXPECT_EQ(occurrences(html, "SQNR of"), 0u);
}

TEST(Report, LongRunsMakeSmallFiles) {
  const TemporaryFolder scratch;
  const Comparison comparison = planted_comparison(scratch, {.steps = 20'000, .offset = 0.0002, .sqnr_layers = 2});
  EXPECT_LT(report_html(comparison).size(), 500'000u);
  EXPECT_EQ(comparison.sides[1].loss.x.size(), kMaxCurvePoints);
  EXPECT_EQ(comparison.sides[1].loss.x.front(), 1.0);
  EXPECT_EQ(comparison.sides[1].loss.x.back(), 20'000.0);
}

TEST(Report, JsonHasTheVerdictAndTheCurves) {
  const TemporaryFolder scratch;
  const Comparison comparison = planted_comparison(scratch, {.label = "low", .offset = 0.01, .sqnr_layers = 3});
  const auto json = nlohmann::json::parse(report_json(comparison));
  EXPECT_EQ(json["format"], "tessera-compare");
  EXPECT_EQ(json["seeds"], 3);
  ASSERT_EQ(json["sides"].size(), 2u);
  EXPECT_FALSE(json["sides"][0].contains("verdict"));
  const auto& side = json["sides"][1];
  EXPECT_EQ(side["label"], "low");
  EXPECT_EQ(side["verdict"]["verdict"], "worse");
  EXPECT_NEAR(side["verdict"]["difference"].get<double>(), 0.01, 0.002);
  EXPECT_EQ(side["verdict"]["difference_per_seed"].size(), 3u);
  EXPECT_NEAR(side["final_loss"]["mean"].get<double>() / json["sides"][0]["final_loss"]["mean"].get<double>(), 1.01,
              0.002);
  const auto& curves = side["curves"];
  EXPECT_EQ(curves["loss"]["step"].size(), curves["loss"]["value"].size());
  EXPECT_EQ(curves["difference"]["low"].size(), curves["difference"]["step"].size());
  EXPECT_EQ(curves["quantization_sqnr_db_by_layer"]["x"]["layer"], nlohmann::json({0, 1, 2}));
  EXPECT_EQ(side["worst_sites"].size(), 8u);
  EXPECT_EQ(side["worst_sites"][0]["site"], "layers.2.attention.wq");
  EXPECT_EQ(json["runs"].size(), 6u);
}

TEST(Report, TextHasVerdictAndTable) {
  const TemporaryFolder scratch;
  const std::string text = report_text(planted_comparison(scratch, {.label = "low", .offset = -0.01}));
  EXPECT_THAT(text, HasSubstr("low against base: better by 1."));
  EXPECT_THAT(text, HasSubstr("Tokens/s"));
  EXPECT_THAT(text, HasSubstr("4400 (+10 %)"));
  EXPECT_THAT(text, HasSubstr("(−20 %)"));
}

TEST(Comparison, ValidationLossesOfOtherDataAreLeftOut) {
  const TemporaryFolder scratch;
  const auto with_validation = [&](const std::string& name, const std::string& checksum) {
    const auto folder =
        PlantedRun{.config = {{"validation.steps", "8"}}, .dataset = {{"val", checksum}}}.write(scratch / name);
    data::write_file(folder / "metrics.jsonl",
                     read_text_file(folder / "metrics.jsonl") +
                         "{\"step\":100,\"validation_loss\":9.5}\n{\"step\":200,\"validation_loss\":4.5}\n");
    return make_side(name, {read_run(folder)});
  };
  const Side a = with_validation("a", "01"), b = with_validation("b", "01"), c = with_validation("c", "02");
  const Comparison same = compare_sides({a, b}, kDefaultMargin), other = compare_sides({a, c}, kDefaultMargin);
  ASSERT_TRUE(same.sides[1].validation_loss);
  EXPECT_EQ(same.sides[1].validation_loss->mean, 4.5);
  EXPECT_EQ(same.sides[1].verdict->kind, Verdict::Kind::kEquivalent);
  EXPECT_FALSE(other.sides[0].validation_loss);
  auto info = nlohmann::json::parse(read_text_file(scratch / "b/run.json"));
  info["data_ranks"] = 2;  // the same sequences, spread over two ranks
  data::write_file(scratch / "b/run.json", info.dump());
  EXPECT_TRUE(compare_sides({a, make_side("b", {read_run(scratch / "b")})}, kDefaultMargin).sides[0].validation_loss);
  info["config"]["validation.steps"] = "4";
  data::write_file(scratch / "b/run.json", info.dump());
  EXPECT_FALSE(compare_sides({a, make_side("b", {read_run(scratch / "b")})}, kDefaultMargin).sides[0].validation_loss);
}

/// Compares the numbers of a side with the lines of its runs.
TEST(Comparison, NumbersOfASide) {
  const TemporaryFolder scratch;
  std::vector<Side> sides;
  std::vector<double> starts, ends, ratios;  // numbers of the candidate
  for (const double offset : {0.0, 0.01}) {
    std::vector<RunRecord> runs;
    for (std::int64_t seed = 1; seed <= 3; ++seed) {
      const auto folder = scratch / fmt::format("{}-{}", offset > 0.0 ? "b" : "a", seed);
      runs.push_back(read_run(
          PlantedRun{.seed = seed,
                     .loss = [&](double loss, auto) { return loss * (1.0 + offset * static_cast<double>(seed)); },
                     .tokens_per_second = 1000.0 * static_cast<double>(seed * seed)}
              .write(folder)));
      if (offset > 0.0) starts.push_back(mean(std::span(runs.back().losses).first(20)));
      if (offset > 0.0) ends.push_back(mean(std::span(runs.back().losses).last(20)));
      if (offset > 0.0) ratios.push_back(offset * static_cast<double>(seed));
    }
    sides.push_back(make_side(offset > 0.0 ? "b" : "a", std::move(runs)));
  }
  const Comparison comparison = compare_sides(sides, kDefaultMargin);
  const SideResult& b = comparison.sides[1];
  EXPECT_NEAR(b.final_loss.mean, mean(ends), 1e-12);
  EXPECT_EQ(b.learned.tokens, 200 * 4 * 512);
  EXPECT_EQ(b.learned.steps_after_warmup, 180);
  EXPECT_EQ(b.learned.last_loss, b.final_loss.mean);
  EXPECT_NEAR(b.learned.first_loss, mean(starts), 1e-12);
  EXPECT_FALSE(b.learned.uniform_loss);
  EXPECT_EQ(b.tokens_per_second, 4000.0);
  EXPECT_NEAR(b.difference.y.back(), 0.02, 1e-9);
  EXPECT_NEAR(b.difference.high.back() - b.difference.y.back(),
              confidence_half_width(standard_deviation(ratios), 3, kConfidence), 1e-9);
}

/// The runs of docs/results.md are long enough for the verdict on that page.
TEST(Comparison, TheWholeModelsRunsAreLongEnough) {
  const TemporaryFolder scratch;
  const std::string archive = std::string(TESSERA_TEST_DATA) + "/../docs/runs/16B-two-h200.tar.gz";
  const volatile StopRequest no_stop{};
  ASSERT_EQ(wait_for(spawn("tar", {"-xzf", archive, "-C", scratch.path()}), no_stop), 0);
  const std::filesystem::path folder = scratch / "16B-two-h200";
  std::vector<Side> sides;
  for (const char* name : {"bf16", "mxfp8", "fp8_blockwise"}) {
    std::vector<RunRecord> runs;
    for (const auto& run : find_runs(folder / name)) runs.push_back(read_run(run));
    sides.push_back(make_side(name, std::move(runs)));
  }
  const Comparison comparison = compare_sides(sides, kDefaultMargin);
  EXPECT_THAT(comparison.sides[1].verdict->text, StartsWith("equivalent (difference +0.02 % ± 0.18 %"));
  EXPECT_THAT(comparison.sides[2].verdict->text, StartsWith("equivalent (difference +0.05 % ± 0.15 %"));
  EXPECT_EQ(comparison.sides[0].learned.tokens, 1500 * 2 * 2048);
  EXPECT_EQ(comparison.sides[0].learned.steps_after_warmup, 1300);
  EXPECT_NEAR(comparison.sides[0].learned.fall(), 4.54, 0.01);
  EXPECT_EQ(comparison.sides[0].learned.uniform_loss, std::log(102'400.0));
}

/// Runs that log different steps are compared at the steps that both have.
TEST(Comparison, LoggedStepsMayDiffer) {
  const TemporaryFolder scratch;
  const auto a = PlantedRun{}.write(scratch / "a"), b = PlantedRun{}.write(scratch / "b");
  std::istringstream lines(read_text_file(b / "metrics.jsonl"));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (nlohmann::json::parse(line)["step"].get<int>() % 5 == 0) kept += line + "\n";
  }
  data::write_file(b / "metrics.jsonl", kept);
  const Comparison comparison =
      compare_sides({make_side("a", {read_run(a)}), make_side("b", {read_run(b)})}, kDefaultMargin);
  EXPECT_EQ(comparison.num_lines, 40);
  EXPECT_FALSE(comparison.sides[1].verdict->identical);
  EXPECT_EQ(nlohmann::json::parse(report_json(comparison))["compared_steps"], 40);
  EXPECT_THAT(report_html(comparison), HasSubstr("200 steps, of which 40 are compared"));
  EXPECT_THAT(report_text(comparison), HasSubstr("Steps compared     40"));
}

/// A seed that breaks down takes none of the others' steps away, and is the one that is named.
TEST(Comparison, ABrokenSeedAmongRunsThatLogDifferentSteps) {
  const TemporaryFolder scratch;
  const auto run = [&](const std::string& name, std::int64_t seed, std::int64_t every, std::int64_t null_step) {
    PlantedRun planted{.seed = seed, .last_step = null_step};
    planted.loss = [=](double loss, std::int64_t step) { return step == null_step ? std::nan("") : loss; };
    const auto folder = planted.write(scratch / name);
    std::istringstream lines(read_text_file(folder / "metrics.jsonl"));
    std::string kept;
    for (std::string line; std::getline(lines, line);) {
      if (nlohmann::json::parse(line)["step"].get<std::int64_t>() % every == 0) kept += line + "\n";
    }
    data::write_file(folder / "metrics.jsonl", kept);
    return read_run(folder);
  };
  const Comparison comparison = compare_sides({make_side("a", {run("a1", 1, 1, -1), run("a2", 2, 1, -1)}),
                                               make_side("b", {run("b1", 1, 5, -1), run("b2", 2, 5, 15)})},
                                              kDefaultMargin);
  EXPECT_EQ(comparison.num_lines, 40);
  EXPECT_EQ(comparison.sides[1].verdict->text, "worse: the loss is not finite at step 15 (seed 2)");
}

TEST(Report, SixKindsOfLinesThatDashesAloneTellApart) {
  const std::string style = kReportStyle;
  std::set<std::string> dashes;
  for (int i = 0; i < kNumPlotStyles; ++i) {
    const std::string rule = fmt::format(".s{}{{stroke:var(--c{})", i, i);
    const std::size_t at = style.find(rule);
    ASSERT_NE(at, std::string::npos) << rule;
    dashes.insert(style.substr(at + rule.size(), style.find('}', at) - at - rule.size()));
  }
  EXPECT_EQ(dashes.size(), 6u);
  const TemporaryFolder scratch;
  std::vector<Side> sides;
  for (int i = 0; i < 7; ++i) {
    const std::string name = fmt::format("side{}", i);
    sides.push_back(make_side(name, {read_run(PlantedRun{}.write(scratch / name))}));
  }
  expect_error([&] { compare_sides(sides, kDefaultMargin); }, {"7 sides", "at most 6"});
  sides.pop_back();
  const Comparison comparison = compare_sides(sides, kDefaultMargin);
  EXPECT_TRUE(comparison.sides[1].same_configuration);
  EXPECT_THAT(report_html(comparison), HasSubstr("Both sides have the same configuration"));
  EXPECT_THAT(report_text(comparison), HasSubstr("side1 has the same configuration as the baseline"));
}

TEST(Report, TheTerminalSaysWhatPlusMinusMeans) {
  const TemporaryFolder scratch;
  const Comparison comparison = planted_comparison(scratch, {.offset = 0.01});
  EXPECT_THAT(report_text(comparison), HasSubstr("±: in a verdict, the 90 % confidence interval"));
  EXPECT_FALSE(comparison.sides[1].same_configuration);
  const std::string html = report_html(comparison);
  EXPECT_THAT(html, HasSubstr("aria-hidden=\"true\">↑</span>"));
  const auto verdict = nlohmann::json::parse(report_json(comparison))["sides"][1]["verdict"];
  EXPECT_EQ(verdict["broken"], false);
  EXPECT_EQ(verdict["growing"], false);
  EXPECT_TRUE(verdict["growth_rate"].is_number());
}

/// A side that breaks down early does not shorten the comparison of the others. It is found whatever the others logged.
TEST(Comparison, ABrokenSideIsWorseAndTheOthersAreJudgedWhole) {
  const TemporaryFolder scratch;
  const auto side = [&](const std::string& name, std::int64_t null_step) {
    PlantedRun planted{.last_step = null_step};
    planted.loss = [&](double loss, std::int64_t step) { return step == null_step ? std::nan("") : loss; };
    const auto folder = planted.write(scratch / name);
    data::write_file(folder / "metrics.jsonl", read_text_file(folder / "metrics.jsonl") +
                                                   (null_step < 0 ? "{\"step\":200,\"validation_loss\":4.5}\n" : ""));
    auto info = nlohmann::json::parse(read_text_file(folder / "run.json"));
    info["dataset"]["val"] = "01";
    info["config"]["validation.steps"] = "8";
    data::write_file(folder / "run.json", info.dump());
    return make_side(name, {read_run(folder)});
  };
  const Comparison comparison = compare_sides({side("a", -1), side("b", 13), side("c", -1)}, kDefaultMargin);
  EXPECT_EQ(comparison.num_lines, 200);
  EXPECT_EQ(comparison.sides[1].verdict->text, "worse: the loss is not finite at step 13 (seed 1)");
  EXPECT_EQ(comparison.sides[2].verdict->text, "equivalent: the same losses at every step");
  EXPECT_THAT(report_text(comparison), HasSubstr("not finite"));
  EXPECT_EQ(check_xml(report_html(comparison)), "");
  const auto json = nlohmann::json::parse(report_json(comparison));
  EXPECT_EQ(json["sides"][1]["verdict"]["broken"], true);
  EXPECT_EQ(json["sides"][0]["curves"]["validation_loss"]["step"], nlohmann::json({200}));
  EXPECT_EQ(json["sides"][0]["validation_loss"]["mean"], 4.5);
  expect_error([&] { compare_sides({side("b", 13), side("a", -1)}, kDefaultMargin); }, {"baseline", "step 13"});
}

}  // namespace
}  // namespace tessera
