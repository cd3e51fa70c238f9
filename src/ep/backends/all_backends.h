// Lists the backends of dispatch. Nothing else knows all of them.
#pragma once

#include "ep/backends/local_dispatcher.h"
#include "ep/backends/standard_dispatcher.h"
#include "ep/direct/direct_dispatcher.h"

namespace tessera::ep {

template <typename... Backends>
struct BackendList {};

/// A backend is a Dispatcher that is made of its options and its group (make_dispatcher.cc has exceptions). It names
/// itself by kBackend. kChoices has the values of parallelism.expert_parallel_comm_backend that stand for it.
using AllBackends = BackendList<LocalDispatcher, StandardDispatcher, DirectDispatcher>;

}  // namespace tessera::ep
