// Chooses the backend of a dispatcher: the only place that knows all of them.
#pragma once

#include <memory>

#include "ep/dispatcher.h"

namespace tessera {

/// The group must stay; `hook`, for direct, may be null. Throws Error if so many rows cannot be counted.
std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook = nullptr);

/// Two-level. The groups must stay; the rest as of make_dispatcher for all ranks.
std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook = nullptr);

}  // namespace tessera
