// Finds the ranks to blame for a run that hangs or has failed, from the files of all ranks (comm/observe/rank_file.h).
//
// A rank is to blame if it ended with its own error, died, is stopped or left no file. If there is none, the analysis
// follows each waiting rank to the ranks that it waits for. These have not begun the operation, or have not sent their
// message. If the analysis reaches a rank that waits for nobody, that rank is to blame: it computes forever, or is
// slow.
//
// On GPUs the flight recorders show which operations were enqueued, not which have ended. They show nothing of a step
// that is replayed as a graph. There, a rank that waits for its GPU counts as waiting for the ranks that have enqueued
// fewer operations.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/observe/rank_file.h"

namespace tessera {

enum class Certainty : std::uint8_t { kUnknown, kLikely, kCertain };
std::string_view name_of(Certainty sure);

struct Culprit {
  std::vector<int> ranks;  // ascending; empty if no rank can be named
  Certainty sure = Certainty::kUnknown;
  std::string reason;  // one sentence
};

/// Returns the ranks to blame. `states` holds all ranks that left a file, in any order. `world_size` is the number of
/// ranks of the run.
Culprit find_culprit(std::span<const RankState> states, int world_size);

}  // namespace tessera
