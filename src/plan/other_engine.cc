#include "plan/other_engine.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/log.h"
#include "plan/cluster.h"
#include "plan/toml_reader.h"

namespace tessera {
namespace {

// Passes, as a dry run names them behind the stage: "stage 0 forward" (TrainingStep::dry_run).
constexpr std::string_view kPasses[] = {"forward", "backward", "weight gradients", "reduction", "optimizer"};

}  // namespace

double OtherEngine::factor_of(const std::string& name_of_operator, std::string_view pass) const {
  double result = 1.0;
  for (const Factor& factor : factors) {
    if (matches_any(factor.names, name_of_operator) && pass.ends_with(factor.pass)) result *= factor.times;
  }
  return result;
}

void use_engine(const std::filesystem::path& path, const ModelConfig& model, Cluster& cluster) {
  const toml::table table = parse_toml_file(path);
  TomlReader reader(table, fmt::format("'{}', $", path.string()));
  OtherEngine engine;
  engine.name = reader.text("name");
  engine.source = reader.text("source");
  engine.dim = model.dim;
  engine.moe_inter_dim = model.moe_inter_dim;
  engine.dispatch_overlap_cost = reader.has("dispatch_overlap_cost") ? reader.part("dispatch_overlap_cost") : -1.0;
  engine.overlaps_micro_batches = reader.flag_or("overlaps_micro_batches", false);
  engine.host_seconds = 1e-6 * reader.number_or("host_microseconds_per_operator", 0.0);
  engine.row_bytes_forward = reader.number_or("row_bytes_forward", 0.0);
  engine.row_bytes_backward = reader.number_or("row_bytes_backward", 0.0);
  engine.row_rate = reader.has("row_rate") ? reader.number("row_rate", 1e-3) : 1.0;
  engine.expert_gradient_bytes = reader.number_or("expert_gradient_bytes", 0.0);
  if (reader.has("factor")) {
    reader.each_table("factor", [&](TomlReader factor) {
      engine.factors.push_back({.names = factor.texts("names"),
                                .pass = factor.has("pass") ? factor.one_of("pass", kPasses) : std::string(),
                                .times = factor.number("times", 1e-6)});
      factor.text("source");
      factor.require_all_known();
    });
  }
  std::vector<OperatorRule> rules;
  std::set<std::string> others;
  if (reader.has("operator")) {
    reader.each_table("operator", [&](TomlReader rule) {
      const std::vector<std::string> gpus = rule.texts("gpus");
      others.insert(gpus.begin(), gpus.end());
      OperatorRule read = read_rule(rule);
      rule.require_all_known();
      if (std::ranges::count(gpus, cluster.name) > 0) rules.push_back(std::move(read));
    });
  }
  reader.require_all_known();
  if (!others.empty() && rules.empty()) {
    spdlog::warn("'{}' has rates of operators on {}, and none on {}, which keeps its own", path.string(),
                 fmt::join(others, ", "), cluster.name);
  }
  cluster.rules.insert(cluster.rules.begin(), rules.begin(), rules.end());
  cluster.engine = std::move(engine);
}

}  // namespace tessera
