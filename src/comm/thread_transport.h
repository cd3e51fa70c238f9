// Ranks that are threads of one process, for tests: sanitizers see all of them, and a debugger too.
#pragma once

#include <functional>

#include "comm/transport.h"

namespace tessera {

/// Runs `body` on `num_ranks` threads, each with its end of a transport. When all have returned, rethrows the exception
/// of the first one that threw; after that the others' operations throw as well, so that none waits forever.
void run_rank_threads(int num_ranks, const std::function<void(std::unique_ptr<Transport>)>& body);

}  // namespace tessera
