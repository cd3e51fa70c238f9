// Runs a command as one process, or as the ranks that mpirun or srun has started.
#pragma once

#include <functional>

#include "comm/ranks.h"
#include "config/job_config.h"

namespace tessera {

/// Runs body(config, ranks) and returns its status as the process's exit status. If one of several ranks fails, all
/// end, because the others could only wait for it. An error that all ranks see is reported once. `read_config` and
/// `body` may throw.
int run_on_ranks(const std::function<JobConfig()>& read_config,
                 const std::function<int(const JobConfig& config, Ranks& ranks)>& body);

}  // namespace tessera
