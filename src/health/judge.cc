#include "health/judge.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kDay = 86400.0;
constexpr std::size_t kLongestLedger = 1000;

std::string describe(const Finding& finding) {
  return finding.part.empty() ? finding.detail : fmt::format("{}: {}", finding.part, finding.detail);
}

/// Returns the signal in whose place another one counts, because both report the same event. The driver writes an XID
/// to NVML and to the kernel's log, and a failed request of a disk is counted and logged.
std::string event_of(const std::string& signal) {
  if (signal == "kernelDiskError") return "diskErrors";
  return signal == "kernelXid" || signal == "gpuRowRemapPending" ? "gpuXid" : signal;
}

/// Returns the reason for draining a node as one line. Slurm does not limit reasons, but they should stay short.
std::string reason_of(const Finding& finding, const std::string& more = "") {
  std::string text = fmt::format("{} {}: {}{}", kReasonPrefix, finding.signal, describe(finding), more);
  std::ranges::replace_if(
      text, [](char ch) { return static_cast<unsigned char>(ch) < ' ' || ch == '\'' || ch == '"'; }, ' ');
  constexpr std::size_t kLongest = 400;
  return text.substr(0, kLongest);
}

}  // namespace

Judge::Judge(std::string node, std::vector<double> past, const JudgeOptions& options)
    : node_(std::move(node)), past_(std::move(past)), options_(options) {}

void Judge::resume(const NodeVerdict& before) {
  active_check_ = before.active_check;
  bad_since_ = before.bad_since;
  reason_ = before.reason;
}

std::int64_t Judge::recent_times_bad(double unix_now) const {
  const double first = unix_now - options_.lemon_days * kDay;
  return std::ranges::count_if(past_, [&](double time) { return time >= first; });
}

bool Judge::is_lemon(double unix_now) const { return recent_times_bad(unix_now) >= options_.lemon_count; }

std::string Judge::find_reason(const std::vector<Finding>& findings, double unix_now) const {
  std::map<std::string, std::string> soft;  // signals by the event that they report
  const Finding* first = nullptr;
  for (const Finding& finding : findings) {
    if (finding.evidence == EvidenceKind::kAlert) continue;
    if (seen_.at({finding.signal, finding.part}).polls < options_.polls_to_bad) continue;
    if (finding.evidence == EvidenceKind::kHard) return reason_of(finding);
    soft.try_emplace(event_of(finding.signal), finding.signal);
    if (first == nullptr) first = &finding;
  }
  if (soft.empty()) return {};
  if (is_lemon(unix_now)) {
    soft["past"] = fmt::format("bad {} times in {:g} days", recent_times_bad(unix_now), options_.lemon_days);
  }
  if (soft.size() < 2) return {};
  soft.erase(event_of(first->signal));
  return reason_of(*first, fmt::format("; also {}", fmt::join(soft | std::views::values, ", ")));
}

NodeVerdict Judge::judge(const std::vector<Finding>& findings, double unix_now, bool is_complete) {
  std::map<std::pair<std::string, std::string>, Seen> now;
  bool is_suspect = false;
  for (const Finding& finding : findings) {
    const std::pair key(finding.signal, finding.part);
    const auto before = seen_.find(key);
    now[key] = before == seen_.end() ? Seen{1, unix_now} : Seen{before->second.polls + 1, before->second.since};
    is_suspect = is_suspect || finding.evidence != EvidenceKind::kAlert;
  }
  seen_ = std::move(now);
  const std::string reason = find_reason(findings, unix_now);
  if (passed_check_ > 0.0) confirm_check(findings, reason, is_complete);
  if (bad_since_ == 0.0 && !reason.empty()) {
    reason_ = reason;
    bad_since_ = unix_now;
    past_.push_back(unix_now);
  }
  NodeVerdict verdict{.node = node_,
                      .time = unix_now,
                      .level = bad_since_ > 0.0 ? HealthLevel::kBad
                               : is_suspect     ? HealthLevel::kSuspect
                                                : HealthLevel::kOk,
                      .reason = reason_,
                      .bad_since = bad_since_,
                      .active_check = active_check_};
  for (const Finding& finding : findings) {
    verdict.items.push_back({finding, seen_.at({finding.signal, finding.part}).since});
  }
  return verdict;
}

void Judge::pass_active_check(double unix_time) {
  passed_check_ = unix_time;
  polls_since_check_ = 0;
  seen_.clear();
}

void Judge::confirm_check(const std::vector<Finding>& findings, const std::string& reason, bool is_complete) {
  if (!reason.empty()) {
    spdlog::warn("the active check does not count: {}", reason);
    passed_check_ = 0.0;
    if (bad_since_ > 0.0) reason_ = reason;
    return;
  }
  const bool is_hard = std::ranges::count(findings, EvidenceKind::kHard, &Finding::evidence) > 0;
  polls_since_check_ = is_hard || !is_complete ? 0 : polls_since_check_ + 1;
  if (polls_since_check_ < options_.polls_to_bad) return;
  active_check_ = std::exchange(passed_check_, 0.0);
  bad_since_ = 0.0;
  reason_.clear();
}

std::vector<double> HealthLedger::read() const {
  std::vector<double> times;
  std::error_code missing;
  if (!std::filesystem::exists(path_, missing)) return times;
  std::istringstream lines(read_text_file(path_));
  for (std::string line; std::getline(lines, line);) {
    try {
      const nlohmann::json json = parse_json(line, "a line");
      times.push_back(JsonFields(json, "a line").number("bad_since"));
    } catch (const Error&) {  // a crash has cut this line short
      continue;
    }
  }
  return times;
}

void HealthLedger::add(const NodeVerdict& verdict) {
  std::vector<std::string> lines;
  std::error_code missing;
  if (std::filesystem::exists(path_, missing)) {
    std::istringstream text(read_text_file(path_));
    for (std::string line; std::getline(text, line);) lines.push_back(line);
  }
  if (lines.size() >= kLongestLedger) lines.erase(lines.begin(), lines.end() - (kLongestLedger - 1));
  create_folder(fs::absolute(path_).parent_path());
  lines.push_back(json_text(
      nlohmann::ordered_json{{"bad_since", verdict.bad_since}, {"node", verdict.node}, {"reason", verdict.reason}}));
  write_whole_file(path_, fmt::format("{}\n", fmt::join(lines, "\n")));
}

}  // namespace tessera
