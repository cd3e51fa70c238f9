// The direct dispatcher on GPUs: one kernel per call on the computation's stream (direct_kernels.h), which goes through
// the steps of protocol.h by itself, also as a part of a graph. The host waits for nothing.
#pragma once

#include "ep/direct/direct_window.h"

namespace tessera::ep {

/// For builds with CUDA only. Throws Error for what its kernels have no room for.
std::unique_ptr<Dispatcher> make_gpu_direct_dispatcher(const DispatchOptions& options, ProcessGroup& group);

}  // namespace tessera::ep
