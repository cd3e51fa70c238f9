#include "health/verdict.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVerdictFormat = "tessera-health-verdict";
constexpr const char* kActiveCheckFormat = "tessera-health-active-check";
constexpr std::uint64_t kVerdictVersion = 1;
constexpr const char* kActiveCheckName = "active_check.json";
constexpr std::array<std::string_view, 3> kLevels = {"ok", "suspect", "bad"};
constexpr std::array<std::string_view, 3> kEvidence = {"hard", "soft", "alert"};

template <std::size_t kSize>
std::size_t index_of(const std::array<std::string_view, kSize>& names, const JsonFields<>& fields, const char* field) {
  const std::string& name = fields.text(field);
  const auto found = std::ranges::find(names, name);
  require(found != names.end(), "{}: unknown value '{}'", fields.place_of(field), name);
  return static_cast<std::size_t>(found - names.begin());
}

nlohmann::ordered_json to_json(const Finding& finding) {
  return {{"signal", finding.signal},
          {"part", finding.part},
          {"evidence", name_of(finding.evidence)},
          {"value", json_number(finding.value)},
          {"limit", json_number(finding.limit)},
          {"unit", finding.unit},
          {"detail", finding.detail}};
}

Finding finding_from_json(const JsonFields<>& fields) {
  return {.signal = fields.text("signal"),
          .part = fields.text("part"),
          .evidence = static_cast<EvidenceKind>(index_of(kEvidence, fields, "evidence")),
          .value = fields.find("value") == nullptr ? 0.0 : fields.number("value"),
          .limit = fields.find("limit") == nullptr ? 0.0 : fields.number("limit"),
          .unit = fields.text("unit"),
          .detail = fields.text("detail")};
}

}  // namespace

std::string_view name_of(HealthLevel level) { return kLevels[static_cast<std::size_t>(level)]; }

nlohmann::ordered_json to_json(const NodeVerdict& verdict) {
  nlohmann::ordered_json items = nlohmann::ordered_json::array();
  for (const NodeVerdict::Item& item : verdict.items) {
    items.push_back(to_json(item.finding));
    items.back()["since"] = item.since;
  }
  return {{"format", kVerdictFormat},       {"version", kVerdictVersion},           {"node", verdict.node},
          {"time", verdict.time},           {"level", name_of(verdict.level)},      {"reason", verdict.reason},
          {"bad_since", verdict.bad_since}, {"active_check", verdict.active_check}, {"boot_id", verdict.boot_id},
          {"findings", std::move(items)}};
}

std::string_view name_of(EvidenceKind evidence) { return kEvidence[static_cast<std::size_t>(evidence)]; }

void write_verdict(const fs::path& folder, const NodeVerdict& verdict) {
  write_whole_file(folder / kVerdictName, json_text(to_json(verdict), 2) + "\n");
}

std::optional<NodeVerdict> read_verdict(const fs::path& folder) {
  const std::optional<nlohmann::json> json = read_json_file(folder / kVerdictName, kVerdictFormat, kVerdictVersion);
  if (!json) return std::nullopt;
  const JsonFields fields(*json, fmt::format("'{}'", (folder / kVerdictName).string()));
  NodeVerdict verdict{.node = fields.text("node"),
                      .time = fields.number("time"),
                      .level = static_cast<HealthLevel>(index_of(kLevels, fields, "level")),
                      .reason = fields.text("reason"),
                      .bad_since = fields.number("bad_since"),
                      .active_check = fields.number("active_check"),
                      .boot_id = fields.find("boot_id") == nullptr ? "" : fields.text("boot_id")};
  for (const nlohmann::json& item : fields.array("findings")) {
    const JsonFields finding(item, fields.place_of("findings"));
    verdict.items.push_back({finding_from_json(finding), finding.number("since")});
  }
  return verdict;
}

void write_active_check(const fs::path& folder, double unix_time, const std::vector<Finding>& findings) {
  nlohmann::ordered_json json = {{"format", kActiveCheckFormat}, {"version", kVerdictVersion}, {"time", unix_time}};
  json["findings"] = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) json["findings"].push_back(to_json(finding));
  write_whole_file(folder / kActiveCheckName, json_text(json, 2) + "\n");
}

std::optional<ActiveCheckResult> read_active_check(const fs::path& folder) {
  const std::optional<nlohmann::json> json =
      read_json_file(folder / kActiveCheckName, kActiveCheckFormat, kVerdictVersion);
  if (!json) return std::nullopt;
  const JsonFields fields(*json, fmt::format("'{}'", (folder / kActiveCheckName).string()));
  ActiveCheckResult result{.time = fields.number("time"), .findings = {}};
  for (const nlohmann::json& item : fields.array("findings")) {
    result.findings.push_back(finding_from_json(JsonFields(item, fields.place_of("findings"))));
  }
  return result;
}

}  // namespace tessera
