// Checks whether the nodes of a cluster fit together. Each node reports its facts. The findings name what keeps a run
// from starting or makes it slow.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct NodeFacts {
  std::string name;                            // the engine's name for the node
  std::string problem = {};                    // reason why nothing is known of the node; the rest is then empty
  std::string version = {};                    // of Tessera
  std::string driver = {}, nccl = {};          // empty: none
  std::vector<std::string> gpus = {};          // their names
  double clock_ahead = 0.0;                    // time by which its clock is ahead of the asking machine's, in seconds
  double clock_uncertainty = 0.0;              // uncertainty of clock_ahead
  double locked_memory_bytes = 0.0;            // most that a process may lock; infinity: no limit
  double memory_bytes = 0.0, shm_bytes = 0.0;  // size of the machine's memory and of /dev/shm
  bool has_infiniband = false, has_daemon = false;
  std::vector<std::string> missing_interfaces = {};  // interfaces in NCCL_SOCKET_IFNAME that it lacks
  std::map<std::string, std::string> folders = {};   // problem of each shared folder; "": none
  std::map<std::string, std::string> nccl_settings = {};
};

/// Returns the facts of this node. Each of `folders` must hold a file called `token`, which another node has written.
NodeFacts take_node_facts(const std::vector<std::filesystem::path>& folders, const std::string& token);

nlohmann::ordered_json to_json(const NodeFacts& facts);
/// Reads what to_json() makes, without name, problem and clock, which the asking side knows. Throws Error for other
/// JSON.
NodeFacts node_facts_from_json(const nlohmann::json& json);

/// Says what a finding means for runs.
enum class Severity : std::uint8_t {
  kBad,   // runs will not start, or fail
  kWarn,  // runs will be slow, or not heal
};

struct ClusterFinding {
  Severity severity = Severity::kBad;
  std::string nodes;  // "n1, n3"
  std::string text;   // the problem and its remedy
};

/// Returns the findings. `version` is that of the asking program. The same finding about several nodes is one.
std::vector<ClusterFinding> compare_nodes(const std::vector<NodeFacts>& nodes, std::string_view version);

}  // namespace tessera
