// Every call of the CUDA runtime is checked, with the call and the place. For sources that are built with CUDA only.
#pragma once

#include <cuda_runtime.h>

#include "base/error.h"

namespace tessera::cuda::detail {
[[noreturn]] void call_failed(const char* file, int line, const char* call, cudaError_t status);
}

/// TESSERA_CUDA(cudaMemcpyAsync(...)): throws InternalError naming call, place and error unless it succeeds.
#define TESSERA_CUDA(call)                                                                     \
  do {                                                                                         \
    if (const cudaError_t tessera_status = (call); tessera_status != cudaSuccess) [[unlikely]] \
      ::tessera::cuda::detail::call_failed(__FILE__, __LINE__, #call, tessera_status);         \
  } while (false)
