// Chooses the backend of a dispatcher: the only place that knows all of them.
#pragma once

#include <memory>

#include "ep/dispatcher.h"

namespace tessera {

/// Returns a dispatcher of this backend. The group must outlive it; `hook`, for direct, may be null. Throws Error if
/// the rows cannot be counted in 32 bits.
std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook = nullptr);

/// Returns a two-level dispatcher. The groups must outlive it. `hook` and errors are those of make_dispatcher for all
/// ranks.
std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook = nullptr);

}  // namespace tessera
