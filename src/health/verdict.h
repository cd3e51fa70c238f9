// Whether a node is fit to train, as the health daemon of the node says in a file. Slurm's HealthCheckProgram,
// node-problem-detector and the launcher read that file, so none of them waits for a probe.
//
//   <folder>/verdict.json:
//   {"format": "tessera-health-verdict", "version": 1, "node": "n1", "time": 1764000000.0, "level": "bad",
//    "reason": "[node_problem] gpuXid: GPU 3: ...", "bad_since": 1763999990.0, "active_check": 0.0,
//    "findings": [{"signal": "gpuXid", "part": "GPU 3", "evidence": "hard", "value": 79.0, "limit": 0.0, "unit": "",
//                  "detail": "...", "since": 1763999985.0}]}
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "health/probe.h"

namespace tessera {

enum class HealthLevel : std::uint8_t {
  kOk,
  kSuspect,  // something is wrong, but not enough to take the node out
  kBad,      // the node must not train until an active check has passed
};
/// "ok", "suspect", "bad".
std::string_view name_of(HealthLevel level);

struct NodeVerdict {
  struct Item {
    Finding finding;
    double since = 0.0;  // Unix time at which it was first seen
  };

  std::string node;
  double time = 0.0;  // Unix time at which it was given
  HealthLevel level = HealthLevel::kOk;
  /// Why the node is bad, as Slurm and Soperator read it: "[node_problem] gpuXid: GPU 3: ...". Empty: it is not.
  std::string reason = {};
  double bad_since = 0.0;     // Unix time; 0: it is not bad
  double active_check = 0.0;  // Unix time of the last active check that passed; 0: none since the daemon began
  std::vector<Item> items = {};

  /// Whether the daemon has said something lately. A verdict that is older says nothing of the node.
  bool is_fresh(double unix_now) const { return unix_now - time <= kFreshSeconds; }
  static constexpr double kFreshSeconds = 60.0;
};

/// Soperator's tools look for it at the begin of the reason for which a node is drained.
inline constexpr const char* kReasonPrefix = "[node_problem]";

/// Where the daemon of a node writes by default.
inline constexpr const char* kHealthFolder = "/run/tessera-health";
inline constexpr const char* kVerdictName = "verdict.json";

nlohmann::ordered_json to_json(const NodeVerdict& verdict);

/// Throws Error if the folder cannot be written to.
void write_verdict(const std::filesystem::path& folder, const NodeVerdict& verdict);
/// None if no daemon has ever written there. Throws Error if the file is damaged.
std::optional<NodeVerdict> read_verdict(const std::filesystem::path& folder);

/// What an active check (health/active_check.h) of the node found: <folder>/active_check.json. The daemon takes a node
/// back only after one that found nothing.
void write_active_check(const std::filesystem::path& folder, double unix_time, const std::vector<Finding>& findings);
struct ActiveCheckResult {
  double time = 0.0;
  std::vector<Finding> findings;
};
std::optional<ActiveCheckResult> read_active_check(const std::filesystem::path& folder);

}  // namespace tessera
