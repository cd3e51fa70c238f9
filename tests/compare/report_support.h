// Comparisons of planted runs, and a check that a page is well-formed.
#pragma once

#include "compare/comparison.h"
#include "tests/compare/support.h"

namespace tessera::compare_test {

struct PlantedComparison {
  std::string label = "low";
  std::int64_t seeds = 3, steps = 400;
  double offset = 0.0;  // of the candidate's loss, relative
  double noise = 0.0;   // between seeds, relative
  int sqnr_layers = 0;  // of the candidate
};

inline Side planted_side(const data::Scratch& scratch, const PlantedComparison& planted, bool baseline) {
  const Noise noise(11);
  std::vector<RunRecord> runs;
  const std::string folder = baseline ? "base" : "candidate";
  for (std::int64_t seed = 1; seed <= planted.seeds; ++seed) {
    PlantedRun run{.seed = seed, .steps = planted.steps};
    if (!baseline) {
      run.loss = [&](double loss, std::int64_t step) {
        const double scatter = planted.noise * noise(seed, 0) + 0.004 * noise(100 + seed, step);
        return loss * (1.0 + planted.offset + (planted.offset == 0.0 ? 0.0 : scatter));
      };
      run.config = {{"model.converters", "[\"quantize.linear.mx\", \"quantize.grouped_mm.mx\"]"}};
      run.sqnr_layers = planted.sqnr_layers;
      run.tokens_per_second = 4400.0;
      run.memory_bytes = 800'000'000;
    }
    runs.push_back(read_run(run.write(scratch / (folder + "/seed-" + std::to_string(seed)))));
  }
  return make_side(baseline ? "base" : planted.label, std::move(runs));
}

inline Comparison planted_comparison(const data::Scratch& scratch, const PlantedComparison& planted) {
  return compare_sides({planted_side(scratch, planted, true), planted_side(scratch, planted, false)}, kDefaultMargin);
}

/// "" if tags are balanced, attributes quoted, and '<' and '&' escaped in what is between; else the first fault. A
/// style element's text is passed over.
inline std::string check_xml(const std::string& text) {
  std::vector<std::string> open;
  std::size_t at = 0;
  while (at < text.size()) {
    if (text[at] == '&') {
      const std::size_t end = text.find(';', at);
      if (end == std::string::npos || end - at > 8) return "a bare '&' at " + text.substr(at, 40);
    }
    if (text[at] == '>') return "a bare '>' at " + text.substr(at > 40 ? at - 40 : 0, 80);
    if (text[at] != '<') {
      ++at;
      continue;
    }
    std::size_t end = at + 1;
    for (bool quoted = false; end < text.size() && (quoted || text[end] != '>'); ++end) {
      if (text[end] == '"') quoted = !quoted;
      if (text[end] == '<') return "'<' in a tag: " + text.substr(at, 80);
    }
    if (end == text.size()) return "a tag without an end: " + text.substr(at, 80);
    const std::string tag = text.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag.starts_with('!')) continue;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag.starts_with('/')) {
      if (open.empty() || "/" + open.back() != tag) return "</" + tag + "> closes " + (open.empty() ? "" : open.back());
      open.pop_back();
    } else if (!tag.ends_with('/')) {
      open.push_back(name);
      if (name == "style") at = text.find("</style>", at);
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is never closed";
}

}  // namespace tessera::compare_test
