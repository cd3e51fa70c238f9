// Runs ranks as threads of one process, for tests and `tessera bench world`. A sanitizer or a debugger then sees all of
// them.
#pragma once

#include <functional>
#include <limits>

#include "comm/transport/transport.h"

namespace tessera {

/// Runs `body` on `num_ranks` threads. Each gets its rank's transport. When all have returned, it rethrows the
/// exception of the first thread that threw. After that exception the other ranks' operations throw, too, so that none
/// waits forever. The ranks act as if each node had `ranks_per_node` of them.
void run_rank_threads(int num_ranks, const std::function<void(std::unique_ptr<Transport>)>& body,
                      int ranks_per_node = std::numeric_limits<int>::max());

}  // namespace tessera
