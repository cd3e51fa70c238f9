// Tests what the reports show in a real browser, on a phone and on a desktop. `scripts/setup.sh browser` installs one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "compare/report/report.h"
#include "compare/report/run_report.h"
#include "tests/compare/report/report_support.h"

namespace tessera {
namespace {

using compare_test::planted_comparison;
using compare_test::PlantedComparison;
using compare_test::write_full_run;
using data::TemporaryFolder;
using ::testing::IsEmpty;

/// Returns the path of the first of these browsers in PATH, or "".
std::string find_browser() {
  std::istringstream folders(std::getenv("PATH") == nullptr ? "" : std::getenv("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    for (const char* name : {"chromium-headless-shell", "chromium", "google-chrome"}) {
      const std::string path = folder + "/" + name;
      if (access(path.c_str(), X_OK) == 0) return path;
    }
  }
  return {};
}

/// Returns the standard output of a shell command.
std::string output_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");  // NOLINT(bugprone-command-processor)
  std::string output;
  std::array<char, 4096> buffer;
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    output.append(buffer.data(), count);
  EXPECT_EQ(pclose(pipe), 0) << command;
  return output;
}

/// A page that shows the report in a frame of a device's size. It measures the report and writes the results into
/// itself, as JSON.
constexpr const char* kProbe = R"(<!DOCTYPE html><html><body style="margin:0">
<iframe id="f" style="border:0;width:WIDTHpx;height:HEIGHTpx" srcdoc="REPORT"></iframe><pre id="result"></pre><script>
const frame = document.getElementById('f');
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  const box = element => element.getBoundingClientRect();
  const texts = [...page.querySelectorAll('svg text')].map(text => {
    const svg = text.ownerSVGElement, scale = box(svg).width / svg.viewBox.baseVal.width;
    const cut = box(text).left < box(svg).left - 0.5 || box(text).right > box(svg).right + 0.5;
    return {size: parseFloat(view.getComputedStyle(text).fontSize) * scale, cut, text: text.textContent,
            left: box(text).left, right: box(text).right, top: box(text).top, bottom: box(text).bottom, svg};
  });
  const overlap = (a, b) => a !== b && a.svg === b.svg && a.left < b.right && b.left < a.right && a.top < b.bottom - 2 &&
                            b.top < a.bottom - 2;
  const html = [...page.querySelectorAll('body *')].filter(e => !e.closest('svg') && e.innerText);
  const verdict = page.querySelector('.verdict h2');
  document.getElementById('result').textContent = JSON.stringify({
    innerWidth: view.innerWidth, scrollWidth: root.scrollWidth, height: root.scrollHeight,
    svgs: [...page.querySelectorAll('figure > svg')].map(svg => ({width: box(svg).width, height: box(svg).height})),
    smallest: Math.min(...texts.map(t => t.size), ...html.map(e => parseFloat(view.getComputedStyle(e).fontSize))),
    cut: texts.filter(t => t.cut).map(t => t.text),
    overlaps: texts.filter(a => texts.some(b => overlap(a, b))).map(t => t.text),
    verdict: {text: verdict.innerText, bottom: box(verdict).bottom, height: box(verdict).height,
              color: view.getComputedStyle(verdict).color},
    background: view.getComputedStyle(page.body).backgroundColor,
    tops: [...page.querySelectorAll('figure > svg')].map(svg => Math.round(box(svg).top)),
    heat: [...page.querySelectorAll('figure > svg [class^="h"]')].map(e => view.getComputedStyle(e).fill),
    resources: view.performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith('data:')),
  });
};
</script></body></html>)";

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    browser_ = find_browser();
    // This variable is set where nobody would notice that a test was skipped.
    const char* required = std::getenv("TESSERA_REQUIRE_BROWSER");
    ASSERT_FALSE(browser_.empty() && required != nullptr && *required != '\0') << "there is no Chromium";
    if (browser_.empty()) GTEST_SKIP() << "there is no Chromium; `scripts/setup.sh browser` installs one";
  }

  /// Returns what the probe measures in a page on a screen of this size.
  nlohmann::json measure(const std::string& html, int width, int height, bool dark = false) {
    const std::string report = replaced(replaced(html, "&", "&amp;"), "\"", "&quot;");  // quoted for an attribute
    const std::string probe = replaced(
        replaced(replaced(kProbe, "WIDTH", std::to_string(width)), "HEIGHT", std::to_string(height)), "REPORT", report);
    data::write_file(scratch_ / "probe.html", probe);
    const std::string log = scratch_ / "browser.log";
    // The browser has its own settings, no network, and a log of the page's console.
    const std::string dom = output_of(
        fmt::format("timeout 60 '{}' --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars "
                    "--user-data-dir='{}' "
                    "--host-resolver-rules='MAP * ~NOTFOUND' --enable-logging=stderr {} --window-size={},{} "
                    "--virtual-time-budget=5000 --dump-dom 'file://{}' 2>'{}'",
                    browser_, (scratch_ / "profile").string(), dark ? "--blink-settings=preferredColorScheme=0" : "",
                    width, height, (scratch_ / "probe.html").string(), log));
    console_ = console_lines(read_text_file(log));
    const std::size_t begin = dom.find("<pre id=\"result\">"), end = dom.find("</pre>", begin);
    EXPECT_NE(begin, std::string::npos) << read_text_file(log);
    if (begin == std::string::npos) return {};
    const std::string text = dom.substr(begin + 17, end - begin - 17);
    return nlohmann::json::parse(
        replaced(replaced(replaced(replaced(text, "&lt;", "<"), "&gt;", ">"), "&nbsp;", " "), "&amp;", "&"));
  }

  static std::string console_lines(const std::string& log) {
    std::istringstream stream(log);
    std::string lines;
    for (std::string line; std::getline(stream, line);) {
      if (line.find("CONSOLE") != std::string::npos) lines += line + "\n";
    }
    return lines;
  }

  TemporaryFolder scratch_;
  std::string browser_, console_;
};

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
      EXPECT_EQ(page["innerWidth"], width);
      EXPECT_LE(page["scrollWidth"], width) << "the page scrolls sideways";
      EXPECT_GE(page["smallest"].get<double>(), 9.0);
      EXPECT_THAT(page["cut"], IsEmpty()) << page["cut"];
      EXPECT_THAT(page["overlaps"], IsEmpty()) << page["overlaps"];
      EXPECT_EQ(page["svgs"].size(), planted.sqnr_layers > 0 ? 5u : 3u);
      for (const auto& svg : page["svgs"]) {
        EXPECT_GT(svg["width"].get<double>(), 0.4 * width);
        EXPECT_GT(svg["height"].get<double>(), 150.0);
      }
      EXPECT_THAT(page["verdict"]["text"].get<std::string>(), ::testing::HasSubstr(comparison.sides[1].verdict->text));
      EXPECT_GT(page["verdict"]["height"].get<double>(), 10.0);
      EXPECT_LT(page["verdict"]["bottom"].get<double>(), height) << "the verdict is not in the first screen";
      EXPECT_THAT(page["resources"], IsEmpty()) << page["resources"];
      EXPECT_EQ(console_, "");
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
      EXPECT_LE(page["scrollWidth"], width) << "the page scrolls sideways";
      EXPECT_GE(page["smallest"].get<double>(), 9.0);
      EXPECT_THAT(page["cut"], IsEmpty()) << page["cut"];
      EXPECT_THAT(page["overlaps"], IsEmpty()) << page["overlaps"];
      EXPECT_EQ(page["svgs"].size(), page_idx == 2 ? 10u : 12u);  // the early run has no second half and no checkpoint
      for (const auto& svg : page["svgs"]) EXPECT_GT(svg["width"].get<double>(), 0.4 * width);
      EXPECT_LT(page["verdict"]["bottom"].get<double>(), height) << "the state is not in the first screen";
      EXPECT_THAT(page["resources"], IsEmpty()) << page["resources"];
      EXPECT_EQ(console_, "");
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
