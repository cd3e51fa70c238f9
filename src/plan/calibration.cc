#include "plan/calibration.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/file.h"
#include "base/json.h"

namespace tessera {
namespace {

constexpr const char* kFormat = "tessera calibration";
constexpr std::uint64_t kVersion = 1;
/// Errors of calls count as parts of their time and of this time together, because a short call's time is not
/// repeatable, and counts little.
constexpr double kShortCall = 5e-6;

/// Returns the words of a class: the operator, "+=", and the types of operands.
std::vector<std::string_view> words_of(std::string_view name) {
  std::vector<std::string_view> words;
  while (!name.empty()) {
    const std::size_t end = std::min(name.find(' '), name.size());
    if (end > 0) words.push_back(name.substr(0, end));
    name.remove_prefix(std::min(end + 1, name.size()));
  }
  return words;
}

/// Returns the first type among them. "NT" of a gemm and "+=" are no types.
std::string_view first_type(const std::vector<std::string_view>& words) {
  const auto found = std::find_if(words.begin() + 1, words.end(),
                                  [](std::string_view word) { return std::islower(word.front()) != 0; });
  return found == words.end() ? std::string_view() : *found;
}

}  // namespace

double OperatorRate::seconds(const OperatorWork& work) const {
  double sum = 0.0;
  for (std::size_t kind = 0; kind < OperatorWork::kKinds; ++kind) sum += seconds_per[kind] * work[kind];
  return sum;
}

bool OperatorRate::extrapolates(const OperatorWork& work) const {
  constexpr double kFactor = 2.0;
  return work.bytes() * kFactor < least_bytes || work.bytes() > kFactor * most_bytes;
}

std::string Calibration::measured_class(const std::string& name) const {
  if (operators.contains(name)) return name;
  const std::vector<std::string_view> wanted = words_of(name);
  const std::string* best = nullptr;
  std::size_t most = 0;
  for (const auto& [other, rate] : operators) {
    if (!other.starts_with(wanted.front())) continue;
    const std::vector<std::string_view> words = words_of(other);
    if (words.front() != wanted.front() || first_type(words) != first_type(wanted)) continue;
    std::size_t common = 1;
    for (const std::string_view word : wanted) common += static_cast<std::size_t>(std::ranges::count(words, word) > 0);
    if (common > most) best = &other;
    most = std::max(most, common);
  }
  return best == nullptr ? std::string() : *best;
}

std::optional<OperatorTime> Calibration::find_time(const RecordedOperator& call) const {
  const std::string name = class_of(call), measured = measured_class(name);
  if (measured.empty()) return std::nullopt;
  const OperatorRate& rate = operators.at(measured);
  const OperatorWork work = work_of(call);
  const bool is_extrapolated = measured != name || rate.extrapolates(work);
  return OperatorTime{.seconds = rate.seconds(work),
                      .is_extrapolated = is_extrapolated,
                      .error = is_extrapolated ? std::max(rate.mean_error, kUnmeasuredError) : rate.mean_error};
}

std::string calibrate_command(std::int64_t num_ranks) {
  return fmt::format("{}tessera bench calibrate", num_ranks == 1 ? "" : fmt::format("mpirun -np {} ", num_ranks));
}

std::int64_t Calibration::num_ranks() const {
  return between_ranks.empty() ? 1 : static_cast<std::int64_t>(between_ranks_value("ranks"));
}

std::string Calibration::command() const {
  return threads == 0 ? "tessera bench calibrate --gpu" : calibrate_command(num_ranks());
}

double Calibration::between_ranks_value(const std::string& name) const {
  const auto found = std::ranges::find(between_ranks, name, &RankValue::name);
  require(found != between_ranks.end(), "'{}' has no '{}': `{}` measures several ranks", path.string(), name,
          calibrate_command(2));
  return found->value;
}

OperatorTime Calibration::time_of(const RecordedOperator& call) const {
  if (const std::optional<OperatorTime> time = find_time(call)) return *time;
  throw MissingRate(fmt::format("'{}' has no rate of '{}'; `{}` measures all operators of this program on a machine",
                                path.string(), class_of(call), command()));
}

OperatorRate fit_rate(std::span<const MeasuredCall> calls) {
  constexpr std::size_t kKinds = OperatorWork::kKinds;
  OperatorRate rate;
  rate.num_calls = calls.size();
  rate.least_bytes = std::numeric_limits<double>::infinity();
  // Kinds are scaled by their mean, so that their coefficients are seconds of an average call.
  std::array<double, kKinds> scale{};
  for (const MeasuredCall& call : calls) {
    for (std::size_t kind = 0; kind < kKinds; ++kind)
      scale[kind] += call.work[kind] / static_cast<double>(calls.size());
    rate.least_bytes = std::min(rate.least_bytes, call.work.bytes());
    rate.most_bytes = std::max(rate.most_bytes, call.work.bytes());
  }
  // Non-negative least squares by coordinate descent (Franc, Hlavac and Navara, CAIP 2005) on A x = b, with a row per
  // call.
  std::array<std::array<double, kKinds>, kKinds> products{};  // AᵀA
  std::array<double, kKinds> right{}, x{};                    // Aᵀb
  for (const MeasuredCall& call : calls) {
    const double weight = 1.0 / (call.seconds + kShortCall);
    std::array<double, kKinds> row{};
    for (std::size_t i = 0; i < kKinds; ++i) row[i] = scale[i] > 0.0 ? call.work[i] / scale[i] * weight : 0.0;
    for (std::size_t i = 0; i < kKinds; ++i) {
      for (std::size_t j = 0; j < kKinds; ++j) products[i][j] += row[i] * row[j];
      right[i] += row[i] * call.seconds * weight;
    }
  }
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    double change = 0.0;
    for (std::size_t i = 0; i < kKinds; ++i) {
      if (products[i][i] <= 0.0) continue;
      double rest = right[i];
      for (std::size_t j = 0; j < kKinds; ++j) rest -= products[i][j] * x[j];
      const double next = std::max(0.0, x[i] + rest / products[i][i]);
      change = std::max(change, std::abs(next - x[i]));
      x[i] = next;
    }
    if (change <= 1e-12 * *std::max_element(x.begin(), x.end())) break;
  }
  for (std::size_t i = 0; i < kKinds; ++i) rate.seconds_per[i] = scale[i] > 0.0 ? x[i] / scale[i] : 0.0;
  for (const MeasuredCall& call : calls) {
    rate.mean_error += std::abs(rate.seconds(call.work) - call.seconds) / (call.seconds + kShortCall) /
                       static_cast<double>(calls.size());
  }
  return rate;
}

Calibration read_calibration(const std::filesystem::path& path) {
  const std::optional<nlohmann::json> json = read_json_file(path, kFormat, kVersion);
  require(json.has_value(), "there is no '{}'; `tessera bench calibrate --out {}` measures this machine", path.string(),
          path.string());
  const JsonFields fields(*json, fmt::format("'{}', $", path.string()));
  constexpr std::uint64_t kMost = 1 << 20;
  Calibration result{.machine = fields.text("machine"),
                     .program = fields.text("program"),
                     .date = fields.text("date"),
                     .threads = static_cast<int>(fields.count("threads", kMost)),
                     .operators = {},
                     .seconds_per_operator = fields.number("seconds_per_operator"),
                     .between_ranks = {},
                     .path = path};
  require(result.seconds_per_operator >= 0.0, "'{}', $.seconds_per_operator is below 0", path.string());
  require(fields.at("operators").is_object(), "'{}', $.operators is no object", path.string());
  for (const auto& [name, value] : fields.at("operators").items()) {
    const JsonFields of_class(value, fmt::format("'{}', $.operators.{}", path.string(), name));
    OperatorRate rate{.num_calls = of_class.count("calls"),
                      .mean_error = of_class.number("mean_error"),
                      .least_bytes = of_class.number("least_bytes"),
                      .most_bytes = of_class.number("most_bytes")};
    for (std::size_t kind = 0; kind < OperatorWork::kKinds; ++kind) {
      rate.seconds_per[kind] = of_class.number(fmt::format("seconds_per_{}", OperatorWork::kNames[kind]).c_str());
      require(rate.seconds_per[kind] >= 0.0, "'{}', $.operators.{}.seconds_per_{} is below 0", path.string(), name,
              OperatorWork::kNames[kind]);
    }
    require(rate.mean_error >= 0.0, "'{}', $.operators.{}.mean_error is below 0", path.string(), name);
    result.operators.emplace(name, rate);
  }
  if (fields.contains("between_ranks")) {
    for (const auto& [name, value] : fields.at("between_ranks").items()) {
      const JsonFields of_value(value, fmt::format("'{}', $.between_ranks.{}", path.string(), name));
      result.between_ranks.push_back({.name = name,
                                      .value = of_value.number("value"),
                                      .unit = of_value.text("unit"),
                                      .source = of_value.text("source"),
                                      .date = of_value.text("date")});
      const bool is_part = name.ends_with("overlap_cost") || name == "straggler";
      const double least = name.ends_with("gb_per_s") ? 1e-3 : 0.0, most = is_part ? 1.0 : 1e9;
      const double read = result.between_ranks.back().value;
      require(read >= least && read <= most, "'{}', $.between_ranks.{}.value is {:g}; expected {:g} to {:g}",
              path.string(), name, read, least, most);
    }
  }
  return result;
}

void write_calibration(const Calibration& calibration, const std::filesystem::path& path) {
  nlohmann::ordered_json operators = nlohmann::ordered_json::object();
  for (const auto& [name, rate] : calibration.operators) {
    nlohmann::ordered_json& json = operators[name];
    for (std::size_t kind = 0; kind < OperatorWork::kKinds; ++kind) {
      json[fmt::format("seconds_per_{}", OperatorWork::kNames[kind])] = rate.seconds_per[kind];
    }
    json["calls"] = rate.num_calls;
    json["mean_error"] = rate.mean_error;
    json["least_bytes"] = rate.least_bytes;
    json["most_bytes"] = rate.most_bytes;
  }
  nlohmann::ordered_json between_ranks = nlohmann::ordered_json::object();
  for (const RankValue& value : calibration.between_ranks) {
    between_ranks[value.name] = {
        {"value", value.value}, {"unit", value.unit}, {"source", value.source}, {"date", value.date}};
  }
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"machine", calibration.machine},
                                       {"program", calibration.program},
                                       {"date", calibration.date},
                                       {"source", "tessera bench calibrate"},
                                       {"threads", calibration.threads},
                                       {"seconds_per_operator", calibration.seconds_per_operator},
                                       {"between_ranks", between_ranks},
                                       {"operators", operators}};
  write_whole_file(path, json_text(json, 1) + '\n');
}

}  // namespace tessera
