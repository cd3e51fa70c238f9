// The values of parallelism.expert_parallel_comm_backend.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ep/dispatch_options.h"

namespace tessera {

/// Returns the backends between which a run of several ranks may choose, by the values of the key. A backend may have
/// several of them, its own name first.
std::vector<std::pair<std::string, DispatchBackend>> dispatch_backends();
/// Returns the key's help: how each of them moves tokens.
std::string dispatch_backends_help();

}  // namespace tessera
