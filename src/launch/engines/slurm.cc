#include "launch/engines/slurm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

/// Returns the value of " name=value " in a line, or "" if there is none.
std::string_view field(std::string_view line, std::string_view name) {
  for (std::size_t at = line.find(name); at != line.npos; at = line.find(name, at + 1)) {
    const std::string_view rest = line.substr(at + name.size());
    const bool is_whole = (at == 0 || line[at - 1] == ' ') && rest.starts_with('=');
    if (is_whole) return rest.substr(1, rest.find_first_of(" \n") - 1);
  }
  return {};
}

}  // namespace

std::string output_of(const std::string& command, int seconds) {
  // NOLINTNEXTLINE(bugprone-command-processor): the program is the scheduler's, which PATH finds
  std::FILE* pipe = popen(fmt::format("timeout -k 1 {} {} 2>&1", seconds, command).c_str(), "re");
  require(pipe != nullptr, "cannot start '{}'", command);
  std::string output;
  std::array<char, 4096> part{};
  while (const std::size_t size = std::fread(part.data(), 1, part.size(), pipe)) output.append(part.data(), size);
  const int status = pclose(pipe);
  const std::string_view shown = std::string_view(output).substr(0, output.find_last_not_of('\n') + 1);
  require(status == 0, "'{}' failed: {}", command, shown.empty() ? "it printed nothing" : shown);
  return output;
}

bool SlurmJob::has_ended() const {
  constexpr std::array<std::string_view, 13> kEnds = {
      "SPECIAL_EXIT", "REQUEUE_HOLD",  "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE",   "FAILED",
      "NODE_FAIL",    "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",   "TIMEOUT",   kForgottenJob};
  return std::ranges::find(kEnds, state) != kEnds.end();
}

SlurmJob parse_slurm_job(std::string_view line) {
  SlurmJob job{.state = std::string(field(line, "JobState")),
               .host = std::string(field(line, "BatchHost")),
               .partition = std::string(field(line, "Partition")),
               .nodes = std::string(field(line, "NodeList"))};
  const auto restarts = parse_number<int>(field(line, "Restarts"));
  require(!job.state.empty() && restarts,
          "expected a job as `scontrol -o show job` prints it, with JobState and Restarts, got '{}'",
          line.substr(0, 200));
  job.restarts = *restarts;
  return job;
}

bool is_down(std::string_view line) {
  const std::string_view state = field(line, "State");
  return state.find("DOWN") != state.npos || state.find("NOT_RESPONDING") != state.npos || state.ends_with('*');
}

SchedulerNode parse_slurm_node(std::string_view line) {
  SchedulerNode node;
  node.is_drained = field(line, "State").find("DRAIN") != std::string_view::npos;
  // "Reason=[node_problem] gpuXid: GPU 3 [root@2026-11-24T05:00:00]": the reason ends before who gave it and when.
  constexpr std::string_view kReason = " Reason=";
  if (const std::size_t at = line.find(kReason); at != line.npos) {
    const std::string_view rest = line.substr(at + kReason.size());
    node.reason = rest.substr(0, std::min(rest.rfind(" ["), rest.size()));
  }
  return node;
}

SchedulerNode find_slurm_node(const std::string& name) {
  SchedulerNode node = parse_slurm_node(output_of("scontrol -o show node " + shell_word(name)));
  std::istringstream lines(output_of("sinfo -h -N -t drain,drng -o '%N %E'"));
  std::set<std::string> drained;  // a node that is in two partitions has two lines
  for (std::string line; std::getline(lines, line);) {
    if (line.find(kReasonPrefix) != line.npos) drained.insert(line);
  }
  node.num_drained = static_cast<int>(drained.size());
  return node;
}

void drain_slurm_node(const std::string& name, const std::string& reason) {
  output_of(fmt::format("scontrol update nodename={} state=drain reason={}", shell_word(name), shell_word(reason)));
}

void undrain_slurm_node(const std::string& name) {
  output_of(fmt::format("scontrol update nodename={} state=undrain", shell_word(name)));
}

SlurmJob find_slurm_job(const std::string& id) {
  std::string line;
  try {
    line = output_of("scontrol -o show job " + shell_word(id));
  } catch (const Error& error) {
    if (std::string_view(error.what()).find("Invalid job id") == std::string_view::npos) throw;
    return {.state = kForgottenJob};
  }
  SlurmJob job = parse_slurm_job(line);
  if (!job.host.empty()) job.host_is_down = is_down(output_of("scontrol -o show node " + shell_word(job.host)));
  return job;
}

void requeue_slurm_job(const std::string& id) { output_of("scontrol requeue " + shell_word(id)); }

}  // namespace tessera
