// Checks every call of the CUDA runtime. Only sources that are built with CUDA include it.
#pragma once

#include <cuda_runtime.h>

#include "base/error.h"

namespace tessera::cuda::detail {
[[noreturn]] void call_failed(const char* file, int line, const char* call, cudaError_t status);
}

/// TESSERA_CUDA(cudaMemcpyAsync(...)) throws InternalError, which names call, place and error, if the call fails.
#define TESSERA_CUDA(call)                                                                     \
  do {                                                                                         \
    if (const cudaError_t tessera_status = (call); tessera_status != cudaSuccess) [[unlikely]] \
      ::tessera::cuda::detail::call_failed(__FILE__, __LINE__, #call, tessera_status);         \
  } while (false)
