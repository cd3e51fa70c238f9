// Makes dispatchers of every backend (ep/backends/all_backends.h).
#pragma once

#include <memory>

#include "ep/direct/protocol.h"
#include "ep/dispatcher.h"

namespace tessera {

/// Holds the groups of a rank for dispatch over several domains. `all` has all ranks, which are cut into domains of
/// equally many neighbours. `within` is this rank's domain, whose ranks reach each other's memory. `across` has the
/// ranks with this rank's place in each domain, in the order of the domains.
struct DomainGroups {
  ProcessGroup &all, &within, &across;
};

/// Returns a dispatcher of this backend. The group must outlive it. `hook` serves the direct backend and may be null.
/// Throws Error if the rows cannot be counted in 32 bits. On GPUs the direct backend also throws Error for more ranks,
/// experts or choices than its kernels take, and for rows that are not whole 16 bytes. It needs at least 2 SMs.
std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook = nullptr);

/// Returns a direct dispatcher within this rank's domain, with an exchange in front. The groups must outlive it. `hook`
/// and the errors are as in make_dispatcher.
std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook = nullptr);

}  // namespace tessera
