#include "plan/cluster.h"

#include <fnmatch.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "base/file.h"

namespace tessera {
namespace {

/// Reads a table of a file. Errors name the file and the key.
class Reader {
 public:
  Reader(const toml::table& table, std::string where) : table_(table), where_(std::move(where)) {}

  double number(const char* key, double least = 0.0) {
    const std::optional<double> value = known(key).value<double>();
    require(value.has_value() && std::isfinite(*value) && *value >= least, "{}.{} must be a number of at least {:g}",
            where_, key, least);
    return *value;
  }
  double number_or(const char* key, double otherwise) { return table_.contains(key) ? number(key) : otherwise; }
  bool flag_or(const char* key, bool otherwise) {
    if (!table_.contains(key)) return otherwise;
    const std::optional<bool> value = known(key).value<bool>();
    require(value.has_value(), "{}.{} must be true or false", where_, key);
    return *value;
  }
  int count(const char* key) {
    const double value = number(key, 1.0);
    require(value == std::floor(value) && value <= 1e6, "{}.{} must be a whole number, and is {:g}", where_, key,
            value);
    return static_cast<int>(value);
  }
  std::string text(const char* key) {
    const std::optional<std::string> value = known(key).value<std::string>();
    require(value.has_value() && !value->empty(), "{}.{} must be a text", where_, key);
    return *value;
  }
  std::vector<std::string> texts(const char* key) {
    std::vector<std::string> result;
    const toml::array* array = known(key).as_array();
    require(array != nullptr && !array->empty(), "{}.{} must be an array of texts", where_, key);
    for (const toml::node& node : *array) {
      const std::optional<std::string> value = node.value<std::string>();
      require(value.has_value(), "{}.{} must be an array of texts", where_, key);
      result.push_back(*value);
    }
    return result;
  }
  bool has(const char* key) const { return table_.contains(key); }
  Reader table(const char* key) {
    const toml::table* table = known(key).as_table();
    require(table != nullptr, "{}.{} must be a table", where_, key);
    return {*table, where_ + "." + key};
  }
  template <typename Each>
  void each_table(const char* key, const Each& each) {
    const toml::array* array = known(key).as_array();
    require(array != nullptr && !array->empty(), "{}.{} must be an array of tables: [[{}]]", where_, key, key);
    std::size_t idx = 0;
    for (const toml::node& node : *array) {
      require(node.is_table(), "{}.{} must be an array of tables: [[{}]]", where_, key, key);
      each(Reader(*node.as_table(), fmt::format("{}.{}[{}]", where_, key, idx++)));
    }
  }
  /// Throws Error if the table has a key that was not asked for.
  void require_all_known() const {
    for (const auto& [key, value] : table_) {
      require(known_.contains(std::string(key.str())), "{}.{}: no such key", where_, key.str());
    }
  }

 private:
  toml::node_view<const toml::node> known(const char* key) {
    known_.insert(key);
    return table_[key];
  }

  const toml::table& table_;
  std::string where_;
  std::set<std::string> known_;
};

constexpr double kGiga = 1e9, kTera = 1e12, kMicro = 1e-6;

Cluster::Link read_link(Reader reader) {
  Cluster::Link link{.bytes_per_second = kGiga * reader.number("gb_per_s", 1e-3), .source = reader.text("source")};
  reader.require_all_known();
  return link;
}

void read_direct(Reader reader, Cluster& cluster) {
  cluster.direct_bytes_per_second = kGiga * reader.number("gb_per_s", 1e-3);
  cluster.direct_overlap_cost = reader.number("overlap_cost");
  cluster.sm_written_per_second = kGiga * reader.number("written_gb_per_s_per_sm", 1e-3);
  cluster.sm_read_per_second = kGiga * reader.number("read_gb_per_s_per_sm", 1e-3);
  cluster.sm_summed_per_second = kGiga * reader.number("summed_gb_per_s_per_sm", 1e-3);
  reader.text("source");
  reader.require_all_known();
}

OperatorRule read_rule(Reader reader) {
  OperatorRule rule;
  rule.operators = reader.texts("names");
  rule.source = reader.text("source");
  if (reader.has("type")) rule.type = reader.text("type");
  rule.adds = reader.flag_or("adds", false);
  rule.flop_per_second = kTera * reader.number_or("tflop_per_s", 0.0);
  rule.half_contraction = reader.number_or("half_contraction", 0.0);
  rule.half_outputs = reader.number_or("half_outputs", 0.0);
  rule.most_flop_per_second = kTera * reader.number_or("most_tflop_per_s", 0.0);
  rule.bytes_per_second = kGiga * reader.number_or("gb_per_s", 0.0);
  rule.seconds_per_call = kMicro * reader.number_or("microseconds", 0.0);
  reader.require_all_known();
  return rule;
}

Cluster read(const std::filesystem::path& path, int depth = 0);

/// Adds the operators of another file in the same folder, a cluster's or a calibration, with rates that are `flop` and
/// `bytes` times as high.
void add_operators_of(Reader reader, Cluster& cluster, int depth) {
  const std::filesystem::path path = cluster.path.parent_path() / reader.text("file");
  std::vector<OperatorRule> rules;
  if (path.extension() == ".json") {
    cluster.calibration = read_calibration(path);
  } else {
    const Cluster other = read(path, depth + 1);
    rules = other.rules;
    cluster.calibration = other.calibration;
  }
  const double flop = reader.number("flop", 1e-6), bytes = reader.number("bytes", 1e-6);
  const std::string source = reader.text("source");
  reader.require_all_known();
  for (OperatorRule& rule : rules) {
    rule.flop_per_second *= flop;
    rule.most_flop_per_second *= flop;
    rule.bytes_per_second *= bytes;
    rule.source = fmt::format("{:g} (flop) and {:g} (bytes) times those of {}: {}; there: {}", flop, bytes,
                              path.filename().string(), source, rule.source);
    cluster.rules.push_back(rule);
  }
  for (auto& [name, rate] : cluster.calibration.operators) {
    rate.seconds_per[OperatorWork::kFlop] /= flop;
    for (const auto kind : {OperatorWork::kLeftBytes, OperatorWork::kRightBytes, OperatorWork::kOtherBytes}) {
      rate.seconds_per[kind] /= bytes;
    }
  }
}

/// `depth` files lead to it.
Cluster read(const std::filesystem::path& path, int depth) {
  require(depth < 4, "'{}': [operators_of] leads from file to file without end", path.string());
  toml::table table;
  try {
    table = toml::parse(read_text_file(path), path.string());
  } catch (const toml::parse_error& error) {
    fail("'{}', line {}: {}", path.string(), error.source().begin.line, error.description());
  }
  Reader reader(table, fmt::format("'{}', $", path.string()));
  Cluster cluster;
  cluster.path = path;
  cluster.name = reader.text("name");
  cluster.peak_flop_per_second = kTera * reader.number("peak_tflop_per_s", 1e-3);
  cluster.memory_bytes = static_cast<double>(1ULL << 30) * reader.number("memory_gib", 1e-3);
  cluster.reserved_bytes = static_cast<double>(1ULL << 30) * reader.number("reserved_gib");
  cluster.num_sms = reader.count("sms");
  cluster.gpus_per_domain = reader.count("gpus_per_domain");
  cluster.dollars_per_gpu_hour = reader.number("dollars_per_gpu_hour");
  cluster.seconds_per_transfer = kMicro * reader.number("microseconds_per_transfer");
  cluster.seconds_per_dispatch = kMicro * reader.number("microseconds_per_dispatch");
  cluster.seconds_per_host_plan = kMicro * reader.number("microseconds_per_host_plan");
  cluster.overlap_cost = reader.number("overlap_cost");
  cluster.straggler = reader.number("straggler");
  cluster.source = reader.text("source");
  cluster.domain = read_link(reader.table("domain"));
  cluster.network = read_link(reader.table("network"));
  read_direct(reader.table("direct"), cluster);
  if (reader.has("operator") || !reader.has("operators_of")) {
    reader.each_table("operator", [&](const Reader& rule) { cluster.rules.push_back(read_rule(rule)); });
  }
  if (reader.has("operators_of")) add_operators_of(reader.table("operators_of"), cluster, depth);
  reader.require_all_known();
  return cluster;
}

}  // namespace

bool OperatorRule::is_for(const RecordedOperator& call) const {
  if (adds && !call.accumulates) return false;
  if (!type.empty() && (call.operands.empty() || type != name_of(call.operands.front().dtype))) return false;
  return std::ranges::any_of(operators,
                             [&](const std::string& name) { return fnmatch(name.c_str(), call.name.c_str(), 0) == 0; });
}

double OperatorRule::seconds(const RecordedOperator& call) const {
  const OperatorWork work = work_of(call);
  double seconds = 0.0;
  if (flop_per_second > 0.0) {
    const double contraction = contraction_of(call), outputs = outputs_of(call);
    double factor = 1.0;
    if (contraction > 0.0) factor = (1.0 + half_contraction / contraction) * (1.0 + half_outputs / outputs);
    seconds += work[OperatorWork::kFlop] / flop_per_second * factor;
  }
  const double bytes = flop_per_second > 0.0 ? work[OperatorWork::kOtherBytes] : work.bytes();
  if (bytes_per_second > 0.0) seconds += bytes / bytes_per_second;
  if (most_flop_per_second > 0.0) seconds = std::max(seconds, work[OperatorWork::kFlop] / most_flop_per_second);
  return seconds_per_call + seconds;
}

OperatorTime Cluster::time_of(const RecordedOperator& call) const {
  const auto rule = std::ranges::find_if(rules, [&](const OperatorRule& one) { return one.is_for(call); });
  if (rule != rules.end()) return {.seconds = rule->seconds(call)};
  require(
      !calibration.measured_class(class_of(call)).empty(),
      "'{}' has no rate for '{}': add an [[operator]] for it, or let [operators_of] name a file that `tessera bench "
      "calibrate --gpu` wrote",
      path.string(), class_of(call));
  return calibration.time_of(call);
}

double Cluster::slowest_of(std::int64_t num_ranks) const {
  return 1.0 + 0.87 * straggler * std::sqrt(2.0 * std::log(static_cast<double>(num_ranks)));
}

Cluster read_cluster(const std::filesystem::path& path) { return read(path); }

}  // namespace tessera
