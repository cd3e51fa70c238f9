#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "compare/report/report.h"
#include "run/record/metrics.h"

namespace tessera {
namespace {

using nlohmann::ordered_json;

std::string spread_text(const Spread& spread) {
  if (!std::isfinite(spread.mean)) return "not finite";
  if (!std::isfinite(spread.deviation)) return fmt::format("{:.4f}", spread.mean);
  return fmt::format("{:.4f} ± {:.4f}", spread.mean, spread.deviation);
}

/// Returns a text such as "1234 (+8 %)". The percentage is relative to the baseline.
std::string with_change(std::string text, double value, double baseline, bool is_baseline) {
  if (is_baseline || !(baseline > 0.0)) return text;
  const double change = 100.0 * (value / baseline - 1.0);
  return fmt::format("{} ({}{:.0f} %)", text, change < 0.0 ? "−" : "+", std::abs(change));
}

/// Returns a text such as "4.5437 nats (63 %)".
std::string nats_text(double nats, double of) {
  if (!std::isfinite(nats)) return "not finite";
  const char* sign = nats < 0.0 ? "−" : "";
  return fmt::format("{}{:.4f} nats ({}{:.0f} %)", sign, std::abs(nats), sign, 100.0 * std::abs(nats) / of);
}

/// Returns how many columns of a terminal a text takes: it counts characters, which are bytes that do not continue one.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

ordered_json numbers(const std::vector<double>& values) {
  ordered_json array = ordered_json::array();
  for (const double value : values) array.push_back(json_number(value));
  return array;
}

ordered_json to_json(const Curve& curve, const char* x_name) {
  ordered_json json = {{x_name, numbers(curve.x)}, {"value", numbers(curve.y)}};
  if (!curve.low.empty()) {
    json["low"] = numbers(curve.low);
    json["high"] = numbers(curve.high);
  }
  return json;
}

ordered_json to_json(const std::map<std::string, Curve>& curves, const char* x_name) {
  ordered_json json = ordered_json::object();
  for (const auto& [name, curve] : curves) json[name] = to_json(curve, x_name);
  return json;
}

ordered_json to_json(const Spread& spread) {
  return {{"mean", json_number(spread.mean)}, {"standard_deviation", json_number(spread.deviation)}};
}

ordered_json to_json(const Evidence& evidence) {
  return {
      {"enough", evidence.enough()},
      {"tokens", {{"found", evidence.tokens}, {"needed", kMinTokens}}},
      {"steps_after_warmup", {{"found", evidence.steps_after_warmup}, {"needed", evidence.needed_steps_after_warmup}}},
      {"loss_fall", {{"found", json_number(evidence.fall)}, {"needed", json_number(evidence.needed_fall)}}}};
}

ordered_json to_json(const Learned& learned) {
  return {{"tokens", learned.tokens},
          {"steps_after_warmup", learned.steps_after_warmup},
          {"first_loss", json_number(learned.first_loss)},
          {"final_loss", json_number(learned.last_loss)},
          {"uniform_loss", learned.uniform_loss ? ordered_json(*learned.uniform_loss) : ordered_json(nullptr)}};
}

ordered_json to_json(const Verdict& verdict) {
  return {{"verdict", name_of(verdict.kind)},
          {"text", verdict.text},
          {"evidence", to_json(verdict.evidence)},
          {"seeds", verdict.num_seeds},
          {"difference", json_number(verdict.difference)},
          {"half_width", json_number(verdict.half_width)},
          {"difference_per_seed", numbers(verdict.differences)},
          {"more_seeds", verdict.more_seeds > kMaxMoreSeeds ? ordered_json(nullptr) : ordered_json(verdict.more_seeds)},
          {"identical", verdict.identical},
          {"broken", verdict.broken},
          {"growing", verdict.growing},
          {"growth_rate", json_number(verdict.growth_rate)}};
}

ordered_json to_json(const SideResult& side) {
  ordered_json json = {{"label", side.label}};
  if (side.verdict) {
    json["verdict"] = to_json(*side.verdict);
    json["same_configuration"] = side.same_configuration;
  }
  json["learned"] = to_json(side.learned);
  json["final_loss"] = to_json(side.final_loss);
  if (side.validation_loss) json["validation_loss"] = to_json(*side.validation_loss);
  json["tokens_per_second"] = json_number(side.tokens_per_second);
  json["peak_memory_bytes"] = json_number(side.peak_memory_bytes);
  ordered_json& curves = json["curves"];
  curves["loss"] = to_json(side.loss, "step");
  if (!side.validation.x.empty()) curves["validation_loss"] = to_json(side.validation, "step");
  if (side.verdict) curves["difference"] = to_json(side.difference, "step");
  curves["grad_norm"] = to_json(side.grad_norm, "step");
  curves["quantization_sqnr_db"] = to_json(side.sqnr, "step");
  curves["quantization_sqnr_db_by_layer"] = to_json(side.sqnr_by_layer, "layer");
  json["worst_sites"] = ordered_json::array();
  for (const WorstSite& site : side.worst_sites) {
    json["worst_sites"].push_back({{"site", site.site}, {"sqnr_db", site.sqnr}});
  }
  return json;
}

}  // namespace

std::vector<std::vector<std::string>> summary_table(const Comparison& comparison) {
  std::vector<std::vector<std::string>> rows = {
      {""},       {"Loss at the end"}, {"Fallen by"},         {"Tokens/s per rank"}, {"Peak memory"},
      {"Tokens"}, {"Steps"},           {"After the warm-up"}, {"Steps compared"},    {"Seeds"}};
  const SideResult& baseline = comparison.sides.front();
  for (const SideResult& side : comparison.sides) {
    const bool is_baseline = &side == &baseline;
    rows[0].push_back(side.label);
    rows[1].push_back(spread_text(side.final_loss));
    const Learned& learned = side.learned;
    rows[2].push_back(nats_text(learned.fall(), learned.first_loss));
    rows[3].push_back(with_change(fmt::format("{:.0f}", side.tokens_per_second), side.tokens_per_second,
                                  baseline.tokens_per_second, is_baseline));
    rows[4].push_back(with_change(format_gib(static_cast<std::size_t>(side.peak_memory_bytes)), side.peak_memory_bytes,
                                  baseline.peak_memory_bytes, is_baseline));
    rows[5].push_back(fmt::format("{:.0f}", learned.tokens));
    rows[6].push_back(std::to_string(comparison.num_steps));
    rows[7].push_back(std::to_string(learned.steps_after_warmup));
    rows[8].push_back(std::to_string(comparison.num_lines));
    rows[9].push_back(std::to_string(comparison.num_seeds));
  }
  if (baseline.learned.uniform_loss) {
    std::vector<std::string> row = {"Below ln(vocabulary)"};
    for (const SideResult& side : comparison.sides) {
      const double uniform = *side.learned.uniform_loss;
      row.push_back(nats_text(uniform - side.learned.last_loss, uniform));
    }
    rows.insert(rows.begin() + 3, row);
  }
  if (baseline.validation_loss) {
    std::vector<std::string> row = {"Validation loss"};
    for (const SideResult& side : comparison.sides) row.push_back(spread_text(*side.validation_loss));
    rows.insert(rows.begin() + 2, row);
  }
  return rows;
}

std::string report_text(const Comparison& comparison) {
  std::string text;
  for (const SideResult& side : comparison.sides) {
    if (!side.verdict) continue;
    text += fmt::format("{} against {}: {}\n", side.label, comparison.sides.front().label, side.verdict->text);
    if (side.same_configuration) text += fmt::format("  {} has the same configuration as the baseline\n", side.label);
  }
  const auto rows = summary_table(comparison);
  std::vector<std::size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns_of(row[i]));
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - columns_of(row[i]) + 2, ' ');
    }
    text += "\n" + line.substr(0, line.find_last_not_of(' ') + 1);
  }
  text += '\n';
  if (comparison.num_seeds < 2) return text;
  return text + fmt::format(
                    "\n±: in a verdict, the {:g} % confidence interval of the mean difference; in the table, the "
                    "standard deviation over the seeds\n",
                    100.0 * kConfidence);
}

std::string report_json(const Comparison& comparison) {
  ordered_json json = {{"format", "tessera-compare"},
                       {"version", 1},
                       {"steps", comparison.num_steps},
                       {"compared_steps", comparison.num_lines},
                       {"seeds", comparison.num_seeds},
                       {"margin", comparison.margin},
                       {"confidence", kConfidence},
                       {"tail", kTail},
                       {"smoothing_lines", comparison.smoothing_lines}};
  json["sides"] = ordered_json::array();
  for (const SideResult& side : comparison.sides) json["sides"].push_back(to_json(side));
  json["differences"] = ordered_json::array();
  for (const Difference& difference : comparison.differences) {
    json["differences"].push_back({{"key", difference.key}, {"values", difference.values}});
  }
  json["runs"] = ordered_json::array();
  for (const RunSummary& run : comparison.runs) {
    json["runs"].push_back({{"side", run.side},
                            {"seed", run.seed},
                            {"folder", run.folder},
                            {"final_loss", json_number(run.learned.last_loss)},
                            {"learned", to_json(run.learned)},
                            {"tokens_per_second", json_number(run.tokens_per_second)},
                            {"threads", run.threads},
                            {"processor", run.processor},
                            {"program", run.program}});
  }
  json["command"] = comparison.command;
  return json_text(json) + "\n";
}

}  // namespace tessera
