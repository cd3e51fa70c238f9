// Looks at a page in a real browser. `scripts/setup.sh browser` installs one.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/file.h"
#include "tests/data/support.h"

namespace tessera::browser_test {

/// Returns the path of the first of these browsers in PATH, or "".
inline std::string find_browser() {
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
inline std::string output_of(const std::string& command) {
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
inline constexpr const char* kProbe = R"(<!DOCTYPE html><html><body style="margin:0">
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

inline std::string replaced(std::string text, const std::string& what, const std::string& by) {
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

  /// Requires of a measured page that a screen of this size shows all of it, that texts are legible, and that the
  /// heading is in the first screen.
  void expect_legible(const nlohmann::json& page, int width, int height) const {
    EXPECT_LE(page["scrollWidth"], width) << "the page scrolls sideways";
    EXPECT_GE(page["smallest"].get<double>(), 9.0);
    EXPECT_TRUE(page["cut"].empty()) << page["cut"];
    EXPECT_TRUE(page["overlaps"].empty()) << page["overlaps"];
    for (const auto& svg : page["svgs"]) EXPECT_GT(svg["width"].get<double>(), 0.4 * width);
    EXPECT_LT(page["verdict"]["bottom"].get<double>(), height) << "the heading is not in the first screen";
    EXPECT_TRUE(page["resources"].empty()) << page["resources"];
    EXPECT_EQ(console_, "");
  }

  data::TemporaryFolder scratch_;
  std::string browser_, console_;
};

}  // namespace tessera::browser_test
