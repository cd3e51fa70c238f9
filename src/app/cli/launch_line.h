// Tells people how to start more ranks.
#pragma once

#include <string>

#include "config/job_config.h"

namespace tessera {

inline constexpr int kMaxRanks = 1 << 20;  // of a run

/// Returns what the mesh of `config` needs if `num_ranks` ranks are too few for it: "the mesh needs 4 ranks (...)".
/// Returns "" if they are enough. Throws Error if the mesh itself is wrong.
std::string lack_of_ranks(const JobConfig& config, int num_ranks);

/// Throws Error if the mesh of `config` needs more than `num_ranks` ranks. The message has the lines of mpirun and srun
/// that start this command on as many ranks as it needs.
void require_enough_ranks(const JobConfig& config, int num_ranks);

}  // namespace tessera
