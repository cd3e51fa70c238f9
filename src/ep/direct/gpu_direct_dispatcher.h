// The direct dispatcher on GPUs. A call is one kernel (direct_kernels.h) on the calls' stream. The kernel makes
// the steps of protocol.h by itself, also as a part of a graph. The host waits for nothing.
#pragma once

#include "ep/direct/direct_window.h"

namespace tessera::ep {

/// Returns the direct dispatcher for GPUs. It exists in builds with CUDA only. Throws Error if the options or the group
/// exceed what the kernels have room for.
std::unique_ptr<Dispatcher> make_gpu_direct_dispatcher(const DispatchOptions& options, ProcessGroup& group);

}  // namespace tessera::ep
