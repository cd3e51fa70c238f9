// Whether the nodes of a cluster fit together: what each of them says of itself, and what of that will keep a run from
// starting or make it slow.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct NodeFacts {
  std::string name;                            // as the engine calls it
  std::string problem = {};                    // why nothing is known of it; the rest is empty then
  std::string host = {}, version = {};         // of the machine, of Tessera
  std::string driver = {}, nccl = {};          // empty: none
  std::vector<std::string> gpus = {};          // their names
  double clock_ahead = 0.0;                    // of the asking machine's clock, in seconds
  double clock_uncertainty = 0.0;              // of that
  double locked_memory_bytes = 0.0;            // that a process may lock; infinity: all
  double memory_bytes = 0.0, shm_bytes = 0.0;  // of the machine, of /dev/shm
  bool has_infiniband = false, has_daemon = false;
  std::vector<std::string> missing_interfaces = {};  // of NCCL_SOCKET_IFNAME
  std::map<std::string, std::string> folders = {};   // what is wrong with each shared folder; "": nothing
  std::map<std::string, std::string> nccl_settings = {};
};

/// What this node says of itself. Each of `folders` must hold a file called `token`, which another node has written.
NodeFacts take_node_facts(const std::vector<std::filesystem::path>& folders, const std::string& token);

nlohmann::ordered_json to_json(const NodeFacts& facts);
/// Throws Error for what to_json() does not make. Without name, problem and clock, which the asking side knows.
NodeFacts node_facts_from_json(const nlohmann::json& json);

/// How much a finding says.
enum class Severity : std::uint8_t {
  kBad,   // runs will not start, or fail
  kWarn,  // runs will be slow, or not heal
};

struct ClusterFinding {
  Severity severity = Severity::kBad;
  std::string nodes;  // "n1, n3"
  std::string text;   // what is wrong, and how to mend it
};

/// `version`: of the asking program. The same finding of several nodes is one.
std::vector<ClusterFinding> compare_nodes(const std::vector<NodeFacts>& nodes, std::string_view version);

}  // namespace tessera
