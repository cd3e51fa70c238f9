#include "plan/cluster.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "plan/precision_choice.h"
#include "plan/toml_reader.h"

namespace tessera {
namespace {

constexpr double kGiga = 1e9, kTera = 1e12, kMicro = 1e-6;

/// Reads the bytes per second of the links within a domain, and of kinds of transfers that have rates of their own.
void read_domain(TomlReader reader, Cluster& cluster) {
  cluster.domain_bytes_per_second = kGiga * reader.number("gb_per_s", 1e-3);
  for (const std::string kind : kTransferKinds) {
    const std::string key = kind + "_gb_per_s";
    if (reader.has(key)) cluster.domain_bytes_per_second_of[kind] = kGiga * reader.number(key, 1e-3);
  }
  reader.text("source");
  reader.require_all_known();
}

void read_network(TomlReader reader, Cluster& cluster) {
  cluster.network_bytes_per_second = kGiga * reader.number("gb_per_s", 1e-3);
  reader.text("source");
  reader.require_all_known();
}

void read_direct(TomlReader reader, Cluster& cluster) {
  cluster.direct_bytes_per_second = kGiga * reader.number("gb_per_s", 1e-3);
  cluster.direct_overlap_cost = reader.part("overlap_cost");
  cluster.sm_written_per_second = kGiga * reader.number("written_gb_per_s_per_sm", 1e-3);
  cluster.sm_read_per_second = kGiga * reader.number("read_gb_per_s_per_sm", 1e-3);
  cluster.sm_summed_per_second = kGiga * reader.number("summed_gb_per_s_per_sm", 1e-3);
  reader.text("source");
  reader.require_all_known();
}

Cluster read(const std::filesystem::path& path, int depth = 0);

/// Adds the operators of another file in the same folder, a cluster's or a calibration, with rates that are `flop` and
/// `bytes` times as high.
void add_operators_of(TomlReader reader, Cluster& cluster, int depth) {
  const std::filesystem::path path = cluster.path.parent_path() / reader.text("file");
  require(path_exists(path), "'{}', $.operators_of.file: there is no '{}' beside it; copy that file, too",
          cluster.path.string(), path.filename().string());
  Cluster other;
  if (path.extension() == ".json") {
    other.calibration = read_calibration(path);
    require(other.calibration.threads == 0, "'{}' has the rates of a CPU, {}: expected those of a GPU", path.string(),
            other.calibration.machine);
  } else {
    other = read(path, depth + 1);
  }
  const double flop = reader.number("flop", 1e-6), bytes = reader.number("bytes", 1e-6);
  reader.text("source");
  reader.require_all_known();
  other.scale_rates(flop, bytes);
  cluster.rules.insert(cluster.rules.end(), other.rules.begin(), other.rules.end());
  cluster.calibration = std::move(other.calibration);
}

/// Reads a cluster's file. `depth` is the number of files whose [operators_of] led to this one.
Cluster read(const std::filesystem::path& path, int depth) {
  require(depth < 4, "'{}': [operators_of] leads through more than 4 files", path.string());
  const toml::table table = parse_toml_file(path);
  TomlReader reader(table, fmt::format("'{}', $", path.string()));
  Cluster cluster;
  cluster.path = path;
  cluster.name = reader.text("name");
  cluster.peak_flop_per_second = kTera * reader.number("peak_tflop_per_s", 1e-3);
  cluster.memory_bytes = static_cast<double>(1ULL << 30) * reader.number("memory_gib", 1e-3);
  cluster.reserved_bytes = static_cast<double>(1ULL << 30) * reader.number("reserved_gib");
  cluster.precisions = reader.texts("precisions");
  for (const std::string& name : cluster.precisions) require_known_precision(name, path.string() + ", precisions: ");
  cluster.num_sms = reader.count("sms");
  cluster.gpus_per_domain = reader.count("gpus_per_domain");
  cluster.dollars_per_gpu_hour = reader.number("dollars_per_gpu_hour");
  cluster.seconds_per_transfer = kMicro * reader.number("microseconds_per_transfer");
  cluster.seconds_per_dispatch = kMicro * reader.number("microseconds_per_dispatch");
  cluster.seconds_per_host_plan = kMicro * reader.number("microseconds_per_host_plan");
  cluster.overlap_cost = reader.part("overlap_cost");
  cluster.straggler = reader.part("straggler");
  reader.text("source");
  read_domain(reader.table("domain"), cluster);
  read_network(reader.table("network"), cluster);
  read_direct(reader.table("direct"), cluster);
  if (reader.has("operator") || !reader.has("operators_of")) {
    reader.each_table("operator", [&](TomlReader rule) {
      cluster.rules.push_back(read_rule(rule));
      rule.require_all_known();
    });
  }
  if (reader.has("operators_of")) add_operators_of(reader.table("operators_of"), cluster, depth);
  reader.require_all_known();
  return cluster;
}

}  // namespace

OperatorRule read_rule(TomlReader& reader) {
  OperatorRule rule;
  rule.operators = reader.texts("names");
  reader.text("source");
  const std::string_view types[] = {name_of(DType::kFloat64), name_of(DType::kFloat32), name_of(DType::kBFloat16),
                                    name_of(DType::kFloat8E4M3), name_of(DType::kInt32)};
  if (reader.has("type")) rule.type = reader.one_of("type", types);
  constexpr double kLeast = 1e-3;  // a rate of 0 would make operators free
  if (reader.has("tflop_per_s")) {
    rule.flop_per_second = kTera * reader.number("tflop_per_s", kLeast);
    rule.half_contraction = reader.number_or("half_contraction", 0.0);
  } else {
    require(!reader.has("half_contraction"), "{}.half_contraction needs tflop_per_s", reader.where());
  }
  if (reader.has("gb_per_s")) rule.bytes_per_second = kGiga * reader.number("gb_per_s", kLeast);
  if (reader.has("microseconds")) rule.seconds_per_call = kMicro * reader.number("microseconds", kLeast);
  reader.require_one_of({"tflop_per_s", "gb_per_s", "microseconds"});
  const bool has_flop = std::ranges::all_of(rule.operators, is_product_or_attention);
  require(has_flop || rule.bytes_per_second > 0.0 || rule.seconds_per_call > 0.0,
          "{} has operators without FLOP, such as '{}': they need gb_per_s or microseconds", reader.where(),
          *std::ranges::find_if_not(rule.operators, is_product_or_attention));
  return rule;
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::ranges::any_of(
      patterns, [&](const std::string& pattern) { return fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
}

bool OperatorRule::is_for(const RecordedOperator& call) const {
  if (!type.empty() && (call.operands.empty() || type != name_of(call.operands.front().dtype))) return false;
  return matches_any(operators, call.name);
}

double OperatorRule::seconds(const RecordedOperator& call) const {
  const OperatorWork work = work_of(call);
  double seconds = 0.0;
  if (flop_per_second > 0.0) {
    const double contraction = contraction_of(call);
    seconds += work[OperatorWork::kFlop] / flop_per_second;
    if (contraction > 0.0) seconds *= 1.0 + half_contraction / contraction;
  }
  const double bytes = flop_per_second > 0.0 ? work[OperatorWork::kOtherBytes] : work.bytes();
  if (bytes_per_second > 0.0) seconds += bytes / bytes_per_second;
  return seconds_per_call + seconds;
}

void Cluster::scale_rates(double flop, double bytes) {
  for (OperatorRule& rule : rules) {
    rule.flop_per_second *= flop;
    rule.bytes_per_second *= bytes;
  }
  for (auto& [of_class, rate] : calibration.operators) {
    rate.seconds_per[OperatorWork::kFlop] /= flop;
    for (const auto kind : {OperatorWork::kLeftBytes, OperatorWork::kRightBytes, OperatorWork::kOtherBytes}) {
      rate.seconds_per[kind] /= bytes;
    }
  }
}

OperatorTime Cluster::time_of(const RecordedOperator& call) const {
  OperatorTime time = own_time_of(call);
  time.seconds *= engine.factor_of(call.name, call.pass);
  if (call.name == "grouped_linear_wgrad" && call.accumulates && engine.expert_gradient_bytes > 0.0) {
    const double numbers = static_cast<double>(call.operands.back().shape.num_elements());
    time.seconds += copy_seconds(numbers * engine.expert_gradient_bytes, call.pass);
  }
  // The first product of an expert reads rows of the model's dim and writes gate and up. The last one of the backward
  // does the reverse.
  const bool is_in = call.name == "grouped_linear_forward", is_out = call.name == "grouped_linear_dgrad";
  const double bytes = is_in ? engine.row_bytes_forward : is_out ? engine.row_bytes_backward : 0.0;
  if (bytes == 0.0) return time;
  const RecordedOperator::Operand& rows = is_in ? call.operands.front() : call.operands.back();
  const RecordedOperator::Operand& gate_and_up = is_in ? call.operands.back() : call.operands.front();
  if (rows.shape[1] != engine.dim || gate_and_up.shape[1] != 2 * engine.moe_inter_dim) return time;
  const double numbers = static_cast<double>(rows.shape.num_elements()) * rows.used;
  time.seconds += copy_seconds(numbers * bytes, call.pass) / engine.row_rate;
  return time;
}

double Cluster::copy_seconds(double bytes, const std::string& pass) const {
  const Shape shape{static_cast<std::int64_t>(0.25 * bytes)};  // is read and written, with 2 bytes each
  const RecordedOperator copy{
      .name = "copy", .operands = {{shape, DType::kBFloat16}, {shape, DType::kBFloat16}}, .pass = pass};
  return own_time_of(copy).seconds;
}

OperatorTime Cluster::own_time_of(const RecordedOperator& call) const {
  OperatorTime time = measured_time_of(call);
  time.seconds /= is_product_or_attention(call.name) ? products_speedup : others_speedup;
  return time;
}

OperatorTime Cluster::measured_time_of(const RecordedOperator& call) const {
  const auto rule = std::ranges::find_if(rules, [&](const OperatorRule& one) { return one.is_for(call); });
  if (rule != rules.end()) return {.seconds = rule->seconds(call), .error = kUnmeasuredError};
  if (rules.empty()) return calibration.time_of(call);
  if (const std::optional<OperatorTime> time = calibration.find_time(call)) return *time;
  throw MissingRate(fmt::format(
      "'{}' has no rate for '{}': add an [[operator]] for it, or let [operators_of] name a file that `tessera bench "
      "calibrate --gpu` wrote",
      path.string(), class_of(call)));
}

double expected_maximum(std::int64_t n) {
  if (n == 1) return 0.0;
  const double above = 0.625 / (static_cast<double>(n) + 0.25);  // 1 - Φ
  double least = 0.0, most = 40.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (least + most);
    (0.5 * std::erfc(middle / std::numbers::sqrt2) > above ? least : most) = middle;
  }
  return least;
}

double Cluster::slowest_of(std::int64_t num_ranks) const { return 1.0 + straggler * expected_maximum(num_ranks); }

double Cluster::domain_rate(const std::string& kind) const {
  const auto found = domain_bytes_per_second_of.find(kind);
  return found == domain_bytes_per_second_of.end() ? domain_bytes_per_second : found->second;
}

Cluster cluster_of_cpus(const Calibration& calibration, std::int64_t num_ranks) {
  Cluster cluster;
  cluster.name = calibration.machine;
  cluster.path = calibration.path;
  cluster.calibration = calibration;
  cluster.gpus_per_domain = static_cast<int>(num_ranks);
  if (num_ranks == 1) return cluster;
  const std::int64_t measured = calibration.num_ranks();
  require(measured == num_ranks, "'{}' was measured by {} rank{}, and this run has {}: `{}` measures them",
          calibration.path.string(), measured, measured == 1 ? "" : "s", num_ranks, calibrate_command(num_ranks));
  const auto rate = [&](const std::string& kind) {
    return kGiga * calibration.between_ranks_value(kind + ".gb_per_s");
  };
  for (const std::string kind : kTransferKinds) {
    cluster.domain_bytes_per_second_of[kind] = rate(kind);
  }
  cluster.domain_bytes_per_second = cluster.network_bytes_per_second = rate("domain");
  // A dispatch moves what an all-to-all would, through the same memory.
  cluster.direct_bytes_per_second = rate("all_to_all");
  cluster.sm_written_per_second = cluster.sm_read_per_second = cluster.sm_summed_per_second = HUGE_VAL;
  cluster.seconds_per_transfer = cluster.seconds_per_dispatch =
      kMicro * calibration.between_ranks_value("domain.microseconds");
  cluster.overlap_cost = cluster.direct_overlap_cost = calibration.between_ranks_value("overlap_cost");
  cluster.straggler = calibration.between_ranks_value("straggler");
  return cluster;
}

Cluster read_cluster(const std::filesystem::path& path) { return read(path); }

}  // namespace tessera
