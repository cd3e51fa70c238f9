// What Slurm says of a job, by scontrol.
#pragma once

#include <string>
#include <string_view>

#include "health/drain.h"

namespace tessera {

/// What a short command of a shell prints. Throws Error if it fails or takes longer than so many seconds.
std::string output_of(const std::string& command, int seconds = 20);

struct SlurmJob {
  std::string state;      // "RUNNING", "PENDING"; kForgottenJob if Slurm does not know the job any more
  int restarts = 0;       // how often it was requeued
  std::string host = {};  // the batch host, on which the job's script runs; empty: none
  bool host_is_down = false;
  std::string partition = {}, nodes = {};  // "n[1-3]"

  /// Whether it has ended, and Slurm will not start it again by itself.
  bool has_ended() const;
};

inline constexpr const char* kForgottenJob = "unknown to Slurm";

/// Reads a line of `scontrol -o show job`. Throws Error if it is none. Leaves `host_is_down` as it is.
SlurmJob parse_slurm_job(std::string_view line);
/// Whether Slurm counts the node of a line of `scontrol -o show node` as down, or gets no answer from it.
bool is_down(std::string_view line);

/// What Slurm says of a node, and how many nodes are drained for a "[node_problem]". Throws Error if it does not
/// answer.
SchedulerNode find_slurm_node(const std::string& name);
/// Throw Error if Slurm refuses. A node that is drained finishes its jobs.
void drain_slurm_node(const std::string& name, const std::string& reason);
void undrain_slurm_node(const std::string& name);
/// Reads a line of `scontrol -o show node`, without the number of nodes.
SchedulerNode parse_slurm_node(std::string_view line);

/// Asks Slurm. Throws Error if it does not answer.
SlurmJob find_slurm_job(const std::string& id);
/// Kills the job, if it runs, and queues it again. Throws Error if Slurm refuses.
void requeue_slurm_job(const std::string& id);

}  // namespace tessera
