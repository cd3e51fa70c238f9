// Commands that run as one process, or as the ranks that mpirun or srun has started.
#pragma once

#include <functional>

#include "comm/ranks.h"
#include "config/job_config.h"

namespace tessera {

/// The status that body(config, ranks) returns, as the process's exit status. A failure of one of several ranks ends
/// all, since the others could only wait for it; what all ranks see is told once. `read_config` and `body` may throw.
int run_on_ranks(const std::function<JobConfig()>& read_config,
                 const std::function<int(const JobConfig& config, Ranks& ranks)>& body);

}  // namespace tessera
