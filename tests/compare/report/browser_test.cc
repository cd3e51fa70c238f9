// Tests what the reports show in a real browser, on a phone and on a desktop. `scripts/setup.sh browser` installs one.
#include "tests/browser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "compare/report/report.h"
#include "compare/report/run_report.h"
#include "tests/compare/report/report_support.h"

namespace tessera {
namespace {

using browser_test::Browser;
using compare_test::planted_comparison;
using compare_test::PlantedComparison;
using compare_test::write_full_run;

const PlantedComparison kPlanted[] = {
    {.label = "mxfp8", .offset = 0.0004, .noise = 0.0003, .sqnr_layers = 6},
    {.label = "mxfp8-with-a-long-name_and.more", .seeds = 2, .steps = 50, .offset = 0.02, .noise = 0.02},
    {.label = "sixty-layers", .steps = 300, .offset = -0.001, .noise = 0.002, .sqnr_layers = 60},
};

TEST_F(Browser, EverythingIsLegibleOnAPhoneAndOnADesktop) {
  for (const PlantedComparison& planted : kPlanted) {
    const Comparison comparison = planted_comparison(scratch_, planted);
    for (const auto& [width, height] : {std::pair{390, 844}, std::pair{1280, 800}}) {
      SCOPED_TRACE(fmt::format("{}, {} px", planted.label, width));
      const nlohmann::json page = measure(report_html(comparison), width, height);
      ASSERT_TRUE(page.is_object());
      expect_legible(page, width, height);
      EXPECT_EQ(page["innerWidth"], width);
      EXPECT_EQ(page["svgs"].size(), planted.sqnr_layers > 0 ? 5u : 3u);
      for (const auto& svg : page["svgs"]) {
        EXPECT_GT(svg["height"].get<double>(), 150.0);
      }
      EXPECT_THAT(page["verdict"]["text"].get<std::string>(), ::testing::HasSubstr(comparison.sides[1].verdict->text));
      EXPECT_GT(page["verdict"]["height"].get<double>(), 10.0);
    }
  }
}

TEST_F(Browser, DarkSchemeIsFollowed) {
  const std::string report = report_html(planted_comparison(scratch_, kPlanted[0]));
  const nlohmann::json light = measure(report, 390, 844), dark = measure(report, 390, 844, true);
  EXPECT_EQ(light["background"], "rgb(255, 255, 255)");
  EXPECT_EQ(dark["background"], "rgb(20, 23, 26)");
  EXPECT_NE(light["verdict"]["color"], dark["verdict"]["color"]);
}

class RunBrowser : public Browser {
 protected:
  /// Returns reports of a finished run, of one that still goes on, and of one whose numbers and names are long.
  std::vector<std::string> pages() {
    const auto growing = write_full_run(scratch_ / "growing", {.steps = 100'000, .last_step = 37});
    const std::string lines = read_text_file(growing / "metrics.jsonl");
    data::write_file(growing / "metrics.jsonl", lines.substr(0, lines.size() - 40));  // the last line is incomplete
    const auto wide =
        write_full_run(scratch_ / std::string(60, 'w') / std::string(60, 'x'), {.steps = 12'000, .moe_layers = 60});
    std::vector<std::string> pages;
    for (const auto& folder : {write_full_run(scratch_ / "run", {}), growing, wide}) {
      pages.push_back(run_report_html(read_run(folder), {}));
    }
    return pages;
  }
};

TEST_F(RunBrowser, EverythingIsLegibleOnAPhoneAndOnADesktop) {
  int page_idx = 0;
  for (const std::string& html : pages()) {
    ++page_idx;
    EXPECT_LT(html.size(), 400'000u);
    for (const auto& [width, height] : {std::pair{360, 740}, std::pair{390, 844}, std::pair{1280, 800}}) {
      SCOPED_TRACE(fmt::format("page {}, {} px", page_idx, width));
      const nlohmann::json page = measure(html, width, height);
      ASSERT_TRUE(page.is_object());
      expect_legible(page, width, height);
      EXPECT_EQ(page["svgs"].size(), page_idx == 2 ? 10u : 12u);  // the early run has no second half and no checkpoint
      if (width < 880) continue;
      for (std::size_t i = 0; i + 1 < page["tops"].size(); i += 2) {
        EXPECT_EQ(page["tops"][i], page["tops"][i + 1]) << "plots side by side begin at different heights";
      }
    }
  }
}

TEST_F(RunBrowser, DarkSchemeIsFollowedByTheHeatMap) {
  const std::string html = pages()[0];
  const nlohmann::json light = measure(html, 390, 844), dark = measure(html, 390, 844, true);
  EXPECT_EQ(dark["background"], "rgb(20, 23, 26)");
  ASSERT_GT(light["heat"].size(), 3u);
  for (std::size_t i = 0; i < light["heat"].size(); ++i) EXPECT_NE(light["heat"][i], dark["heat"][i]);
}

}  // namespace
}  // namespace tessera
