// Asks Slurm about jobs and nodes, through scontrol and sinfo.
#pragma once

#include <string>
#include <string_view>

#include "health/drain.h"

namespace tessera {

/// Returns what a short shell command prints. Throws Error if it fails or takes longer than `seconds`.
std::string output_of(const std::string& command, int seconds = 20);

struct SlurmJob {
  std::string state;      // "RUNNING", "PENDING"; kForgottenJob if Slurm does not know the job any more
  int restarts = 0;       // number of times that it was requeued
  std::string host = {};  // the batch host, which runs the job's script; empty: none
  bool host_is_down = false;
  std::string partition = {}, nodes = {};  // "n[1-3]"

  /// Returns whether the job has ended and Slurm will not start it again by itself.
  bool has_ended() const;
};

inline constexpr const char* kForgottenJob = "unknown to Slurm";

/// Reads a line of `scontrol -o show job`. Throws Error if it is not such a line. It does not set `host_is_down`.
SlurmJob parse_slurm_job(std::string_view line);
/// Returns whether Slurm counts a node as down or gets no answer from it, by its line of `scontrol -o show node`.
bool is_down(std::string_view line);

/// Returns what Slurm reports about a node, and how many nodes are drained for a "[node_problem]". Throws Error if
/// Slurm does not answer.
SchedulerNode find_slurm_node(const std::string& name);
/// Tells Slurm to drain a node. A drained node finishes its jobs. Throws Error if Slurm refuses.
void drain_slurm_node(const std::string& name, const std::string& reason);
/// Tells Slurm to use a node again. Throws Error if Slurm refuses.
void undrain_slurm_node(const std::string& name);
/// Reads a line of `scontrol -o show node`, without the number of nodes.
SchedulerNode parse_slurm_node(std::string_view line);

/// Asks Slurm about a job. Throws Error if it does not answer.
SlurmJob find_slurm_job(const std::string& id);
/// Kills the job, if it runs, and queues it again. Throws Error if Slurm refuses.
void requeue_slurm_job(const std::string& id);

}  // namespace tessera
