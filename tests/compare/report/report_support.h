// Plants comparisons and runs for reports, and checks that a page is well-formed.
#pragma once

#include <sstream>

#include "compare/comparison.h"
#include "tests/compare/support.h"

namespace tessera::compare_test {

struct PlantedComparison {
  std::string label = "low";
  std::int64_t seeds = 3, steps = 400;
  double offset = 0.0;  // relative offset of the candidate's loss
  double noise = 0.0;   // relative noise between seeds
  int sqnr_layers = 0;  // layers of the candidate that log the SQNR
};

inline Side planted_side(const data::TemporaryFolder& scratch, const PlantedComparison& planted, bool baseline) {
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

inline Comparison planted_comparison(const data::TemporaryFolder& scratch, const PlantedComparison& planted) {
  return compare_sides({planted_side(scratch, planted, true), planted_side(scratch, planted, false)}, kDefaultMargin);
}

struct FullRun {
  std::int64_t steps = 200, last_step = -1;
  int moe_layers = 5;
};

/// Writes a run with every field that a report shows. It has a checkpoint and a validation every 50 steps, other
/// settings from steps 41 and 81 on, and low precision.
inline std::filesystem::path write_full_run(const std::filesystem::path& folder, const FullRun& full) {
  PlantedRun planted{.steps = full.steps,
                     .config = {{"model.args.vocab_size", "258"},
                                {"model.args.n_layers", "\"" + std::to_string(full.moe_layers) + " <layers>\""},
                                {"validation.enable", "true"}},
                     .sqnr_layers = 2,
                     .last_step = full.last_step};
  planted.write(folder);
  auto info = nlohmann::json::parse(read_text_file(folder / "run.json"));
  info["changed"] = {{"optimizer.lr", {"0.0008", "0.0004 at step 41", "0.0002 at step 81"}},
                     {"training.steps", {"40", std::to_string(full.steps) + " at step 41"}}};
  data::write_file(folder / "run.json", info.dump());
  std::istringstream stream(read_text_file(folder / "metrics.jsonl"));
  std::string lines;
  for (std::string text; std::getline(stream, text);) {
    auto line = nlohmann::json::parse(text);
    const auto step = line["step"].get<std::int64_t>();
    line["lr"] = 1e-3 * static_cast<double>(step);
    line["mfu"] = 0.4;
    line["mtp_loss"] = line["loss"].get<double>() + 0.5;
    line["step_seconds"] = 0.2;
    line["seconds"] = {{"data", 0.01}, {"forward", 0.05}, {"backward", 0.1}, {"optimizer", 0.03}};
    for (int layer = 0; layer < full.moe_layers; ++layer) {
      line["expert_load_per_layer"].push_back(1.0 + 8.0 * std::exp(-static_cast<double>(step) / (10.0 + 5.0 * layer)));
    }
    lines += line.dump() + "\n";
    if (step % 50 != 0) continue;
    lines += nlohmann::json{{"step", step}, {"validation_loss", line["loss"].get<double>() + 0.1}}.dump() + "\n";
    lines +=
        nlohmann::json{{"step", step}, {"checkpoint_stall_seconds", 0.03}, {"checkpoint_seconds", 1.4}}.dump() + "\n";
  }
  data::write_file(folder / "metrics.jsonl", lines);
  return folder;
}

/// Returns "" if tags are balanced, attributes are quoted, and '<' and '&' are escaped in texts. Otherwise returns the
/// first fault. Skips the text of a style element.
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
