// Who is to blame for a run that hangs or has failed, from what all ranks' files say (comm/observe/rank_file.h).
//
// A rank that ended with an error of its own, died, is stopped or left no file is blamed for that. Among ranks that
// live, each that waits is followed to the ranks that it waits for: those that have not begun the operation, or have
// not sent their message. Who is reached and waits for nobody is blamed: it computes for ever, or is slow.
//
// On GPUs the rings tell what was enqueued, not what has ended, and nothing of a step that is replayed as a graph:
// there a rank that waits for its GPU is taken to wait for the ranks that have enqueued less.
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
  std::vector<int> ranks;  // ascending; empty if none can be named
  Certainty sure = Certainty::kUnknown;
  std::string reason;  // one sentence
};

/// `states`: of all ranks that left a file, in any order; `world_size`: how many ranks the run has.
Culprit find_culprit(std::span<const RankState> states, int world_size);

}  // namespace tessera
