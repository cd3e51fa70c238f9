// Runs ranks as threads of one process, for tests and `tessera bench world`. A sanitizer or a debugger then sees all of
// them.
#pragma once

#include <functional>

#include "comm/transport/transport.h"

namespace tessera {

/// Runs `body` on `num_ranks` threads. Each gets its rank's transport. When all have returned, it rethrows the
/// exception of the first thread that threw. After that exception the other ranks' operations throw, too, so that none
/// waits forever.
void run_rank_threads(int num_ranks, const std::function<void(std::unique_ptr<Transport>)>& body);

}  // namespace tessera
