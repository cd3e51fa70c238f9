// The verdict on whether a node is fit to train. The node's health daemon writes it to a file. Slurm's
// HealthCheckProgram, node-problem-detector and the launcher read that file, so none of them waits for a probe.
//
//   <folder>/verdict.json:
//   {"format": "tessera-health-verdict", "version": 1, "node": "n1", "time": 1764000000.0, "level": "bad",
//    "reason": "[node_problem] gpuXid: GPU 3: ...", "bad_since": 1763999990.0, "active_check": 0.0,
//    "boot_id": "8f1c...",
//    "findings": [{"signal": "gpuXid", "part": "GPU 3", "evidence": "hard", "value": 79.0, "limit": 0.0, "unit": "",
//                  "detail": "...", "since": 1763999985.0}]}
#pragma once

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "health/probe.h"

namespace tessera {

enum class HealthLevel : std::uint8_t {
  kOk,
  kSuspect,  // something is wrong, but not enough to take the node out
  kBad,      // the node must not train until an active check has passed
};
/// Returns "ok", "suspect" or "bad".
std::string_view name_of(HealthLevel level);

struct NodeVerdict {
  struct Item {
    Finding finding;
    double since = 0.0;  // Unix time at which it was first seen
  };

  std::string node;
  double time = 0.0;  // Unix time of the verdict
  HealthLevel level = HealthLevel::kOk;
  /// Says why the node is bad, as Slurm and Soperator read it: "[node_problem] gpuXid: GPU 3: ...". It is empty if the
  /// node is not bad.
  std::string reason = {};
  double bad_since = 0.0;     // Unix time; 0: it is not bad
  double active_check = 0.0;  // Unix time of the last active check that made the node well; 0: none yet
  std::string boot_id = {};   // what the kernel calls the machine's boot; empty: unknown
  std::vector<Item> items = {};

  /// Returns whether the verdict is recent. An older one says nothing about the node, nor does one of a clock that was
  /// ahead.
  bool is_fresh(double unix_now) const { return std::abs(unix_now - time) <= kFreshSeconds; }
  static constexpr double kFreshSeconds = 60.0;
};

/// The text with which the reason for draining a node starts. Soperator's tools look for it.
inline constexpr const char* kReasonPrefix = "[node_problem]";

/// The folder that the daemon of a node writes to by default.
inline constexpr const char* kHealthFolder = "/run/tessera-health";
inline constexpr const char* kVerdictName = "verdict.json";

nlohmann::ordered_json to_json(const NodeVerdict& verdict);

/// Returns the name of a kind of evidence in files and metrics: "hard", "soft" or "alert".
std::string_view name_of(EvidenceKind evidence);

/// Writes the verdict to its file. Throws Error if the folder cannot be written to.
void write_verdict(const std::filesystem::path& folder, const NodeVerdict& verdict);
/// Returns the verdict, or nullopt if no daemon has ever written there. Throws Error if the file is damaged.
std::optional<NodeVerdict> read_verdict(const std::filesystem::path& folder);

/// Writes what an active check (health/active_check.h) of the node has found to <folder>/active_check.json. The daemon
/// calls a bad node well only after a check that found nothing, if its probes find no fault after it either.
void write_active_check(const std::filesystem::path& folder, double unix_time, const std::vector<Finding>& findings);
struct ActiveCheckResult {
  double time = 0.0;
  std::vector<Finding> findings;
};
/// Returns what the node's last active check found, or nullopt if there was none.
std::optional<ActiveCheckResult> read_active_check(const std::filesystem::path& folder);

}  // namespace tessera
