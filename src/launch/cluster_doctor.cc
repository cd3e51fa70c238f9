#include "launch/cluster_doctor.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "health/verdict.h"
#include "ops/runtime/inventory.h"
#include "run/record/run_info.h"
#include "system/host_name.h"
#include "system/nccl_settings.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kClockLimit = 0.5;  // in seconds
constexpr double kShmShare = 0.25;   // least part of the machine's memory

/// Returns why a folder is not shared or cannot be written to, or "" if all is well.
std::string problem_of(const fs::path& folder, const std::string& token) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return "does not exist there";
  if (!fs::exists(folder / token, error)) return "is another folder there, not the same one";
  const fs::path own = folder / (token + "." + host_name());
  try {
    write_whole_file(own, "written\n");
    fs::remove(own, error);
  } catch (const Error&) {
    return "cannot be written to there";
  }
  return "";
}

std::vector<std::string> missing_interfaces() {
  std::vector<std::string> missing;
  const char* setting = std::getenv("NCCL_SOCKET_IFNAME");
  std::string names = setting == nullptr ? "" : setting;
  if (names.starts_with('^')) return missing;  // it names interfaces that must not be used
  if (names.starts_with('=')) names.erase(0, 1);
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    std::error_code error;
    bool is_there = false;  // NCCL takes a name as the beginning of an interface's name
    for (fs::directory_iterator entry("/sys/class/net", error), end; !error && entry != end; entry.increment(error)) {
      is_there = is_there || entry->path().filename().string().starts_with(name);
    }
    if (!is_there) missing.push_back(name);
  }
  return missing;
}

double room_of(const char* folder) {
  struct statvfs room {};
  if (::statvfs(folder, &room) != 0) return 0.0;
  return static_cast<double>(room.f_blocks) * static_cast<double>(room.f_frsize);
}

std::string gigabytes(double num_bytes) { return fmt::format("{:.1f} GB", 1e-9 * num_bytes); }

/// A list of findings. The same text about several nodes is one finding.
class Findings {
 public:
  void add(Severity severity, const std::string& node, const std::string& text) {
    const auto same = std::ranges::find_if(
        findings_, [&](const ClusterFinding& one) { return one.severity == severity && one.text == text; });
    if (same == findings_.end()) {
      findings_.push_back({severity, node, text});
    } else {
      same->nodes += ", " + node;
    }
  }
  std::vector<ClusterFinding> take() {
    std::ranges::stable_sort(findings_, {}, &ClusterFinding::severity);
    return std::move(findings_);
  }

 private:
  std::vector<ClusterFinding> findings_;
};

/// Returns the value that most nodes have.
template <typename Project>
std::string most_common(const std::vector<NodeFacts>& nodes, Project project) {
  std::map<std::string, int> counts;
  for (const NodeFacts& node : nodes) {
    if (node.problem.empty()) ++counts[project(node)];
  }
  const auto most = std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; });
  return most == counts.end() ? "" : most->first;
}

template <typename Project>
void compare_with_most(const std::vector<NodeFacts>& nodes, const char* what, const char* remedy, Project project,
                       Findings& findings) {
  const std::string most = most_common(nodes, project);
  const auto shown = [](const std::string& text) { return text.empty() ? std::string("none") : text; };
  for (const NodeFacts& node : nodes) {
    const std::string answer = project(node);
    if (!node.problem.empty() || answer == most) continue;
    findings.add(Severity::kBad, node.name,
                 fmt::format("{}: {}, most nodes have {}. {}", what, shown(answer), shown(most), remedy));
  }
}

std::string gpus_of(const NodeFacts& node) {
  return node.gpus.empty() ? "" : fmt::format("{} x {}", node.gpus.size(), node.gpus.front());
}

void look_at(const NodeFacts& node, std::string_view version, Findings& findings) {
  if (node.version != version) {
    findings.add(Severity::kBad, node.name,
                 fmt::format("Tessera {} is there, this is {}. Install the same program", node.version, version));
  }
  if (std::abs(node.clock_ahead) - node.clock_uncertainty > kClockLimit) {
    findings.add(Severity::kBad, node.name,
                 fmt::format("its clock is {:.1f} s {}. Have chrony or systemd-timesyncd run there",
                             std::abs(node.clock_ahead), node.clock_ahead > 0.0 ? "ahead" : "behind"));
  }
  for (const auto& [folder, problem] : node.folders) {
    if (problem.empty()) continue;
    findings.add(Severity::kBad, node.name,
                 fmt::format("'{}' {}. Mount the same storage on all nodes", folder, problem));
  }
  for (const std::string& name : node.missing_interfaces) {
    findings.add(Severity::kBad, node.name,
                 fmt::format("NCCL_SOCKET_IFNAME names the interface '{}', which is not there. ip link shows those "
                             "that are",
                             name));
  }
  if (node.has_infiniband && std::isfinite(node.locked_memory_bytes)) {
    findings.add(Severity::kBad, node.name,
                 fmt::format("a process may lock {} only, and InfiniBand locks its buffers. Set memlock unlimited in "
                             "limits.conf, and LimitMEMLOCK=infinity in the service of slurmd, sshd or containerd",
                             gigabytes(node.locked_memory_bytes)));
  }
  if (node.shm_bytes < kShmShare * node.memory_bytes) {
    findings.add(Severity::kWarn, node.name,
                 fmt::format("/dev/shm has {} of {}. Copies of the state lie there: mount it larger, or give "
                             "--node-folder",
                             gigabytes(node.shm_bytes), gigabytes(node.memory_bytes)));
  }
  if (!node.has_daemon) {
    findings.add(Severity::kWarn, node.name,
                 "no health daemon speaks there. Start tessera health serve as root, or nobody notices a sick GPU");
  }
}

}  // namespace

NodeFacts take_node_facts(const std::vector<fs::path>& folders, const std::string& token) {
  const cuda::Inventory inventory = cuda::take_inventory();
  NodeFacts facts{.name = {},
                  .version = version(),
                  .driver = inventory.driver,
                  .memory_bytes = static_cast<double>(machine_memory_bytes()),
                  .shm_bytes = room_of("/dev/shm")};
  for (const cuda::GpuInfo& gpu : inventory.gpus) facts.gpus.push_back(gpu.name);
  for (const cuda::LibraryInfo& library : inventory.libraries) {
    if (library.name == "NCCL" && library.problem.empty()) facts.nccl = library.version;
  }
  struct rlimit limit {};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  facts.locked_memory_bytes =
      limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<double>::infinity() : static_cast<double>(limit.rlim_cur);
  std::error_code error;
  facts.has_infiniband = fs::exists("/sys/class/infiniband", error);
  try {
    const std::optional<NodeVerdict> verdict = read_verdict(kHealthFolder);
    facts.has_daemon = verdict && verdict->is_fresh(unix_time());
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a damaged file is no daemon that speaks
  }
  facts.missing_interfaces = missing_interfaces();
  for (const fs::path& folder : folders) facts.folders[folder.string()] = problem_of(folder, token);
  facts.nccl_settings = nccl_settings();
  return facts;
}

nlohmann::ordered_json to_json(const NodeFacts& facts) {
  return {{"version", facts.version},
          {"driver", facts.driver},
          {"nccl", facts.nccl},
          {"gpus", facts.gpus},
          {"time", unix_time()},
          {"locked_memory_bytes", json_number(facts.locked_memory_bytes)},
          {"memory_bytes", facts.memory_bytes},
          {"shm_bytes", facts.shm_bytes},
          {"has_infiniband", facts.has_infiniband},
          {"has_daemon", facts.has_daemon},
          {"missing_interfaces", facts.missing_interfaces},
          {"folders", facts.folders},
          {"nccl_settings", facts.nccl_settings}};
}

NodeFacts node_facts_from_json(const nlohmann::json& json) {
  try {
    const nlohmann::json& locked = json.at("locked_memory_bytes");
    return {.name = {},
            .version = json.at("version").get<std::string>(),
            .driver = json.at("driver").get<std::string>(),
            .nccl = json.at("nccl").get<std::string>(),
            .gpus = json.at("gpus").get<std::vector<std::string>>(),
            .locked_memory_bytes = locked.is_null() ? std::numeric_limits<double>::infinity() : locked.get<double>(),
            .memory_bytes = json.at("memory_bytes").get<double>(),
            .shm_bytes = json.at("shm_bytes").get<double>(),
            .has_infiniband = json.at("has_infiniband").get<bool>(),
            .has_daemon = json.at("has_daemon").get<bool>(),
            .missing_interfaces = json.at("missing_interfaces").get<std::vector<std::string>>(),
            .folders = json.at("folders").get<std::map<std::string, std::string>>(),
            .nccl_settings = json.at("nccl_settings").get<std::map<std::string, std::string>>()};
  } catch (const nlohmann::json::exception& error) {
    fail("a node's answer cannot be read: {}", json_problem(error));
  }
}

std::vector<ClusterFinding> compare_nodes(const std::vector<NodeFacts>& nodes, std::string_view version) {
  Findings findings;
  for (const NodeFacts& node : nodes) {
    if (node.problem.empty()) {
      look_at(node, version, findings);
    } else {
      findings.add(Severity::kBad, node.name, node.problem);
    }
  }
  compare_with_most(nodes, "GPUs", "A GPU that is missing shows in nvidia-smi and in the kernel's log", gpus_of,
                    findings);
  compare_with_most(
      nodes, "driver", "Install the same one on all nodes", [](const NodeFacts& node) { return node.driver; },
      findings);
  compare_with_most(
      nodes, "NCCL", "Install the same one on all nodes", [](const NodeFacts& node) { return node.nccl; }, findings);
  compare_with_most(
      nodes, "NCCL's settings", "Set them where all ranks see them",
      [](const NodeFacts& node) {
        std::string text;
        for (const auto& [name, value] : node.nccl_settings)
          text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
        return text;
      },
      findings);
  return findings.take();
}

}  // namespace tessera
