// NCCL, which is looked for when it is first used. For sources that are built with CUDA only.
#pragma once

#include <nccl.h>

#include "base/error.h"

/// The function of NCCL of this name, as its header declares it. Throws Error where it is not found.
#define TESSERA_NCCL_FUNCTION(name)                                                                     \
  ([] {                                                                                                 \
    static const auto found = reinterpret_cast<decltype(&::name)>(::tessera::cuda::nccl_symbol(#name)); \
    return found;                                                                                       \
  }())

/// TESSERA_NCCL(ncclAllGather, operands...): calls it; throws Error naming call and reason unless it succeeds.
#define TESSERA_NCCL(name, ...)                                                             \
  do {                                                                                      \
    const ncclResult_t tessera_status = TESSERA_NCCL_FUNCTION(name)(__VA_ARGS__);           \
    if (tessera_status != ncclSuccess) ::tessera::cuda::nccl_failed(#name, tessera_status); \
  } while (false)

namespace tessera::cuda {

/// Throws Error if NCCL is missing, or older than this build's headers.
void* nccl_symbol(const char* name);
[[noreturn]] void nccl_failed(const char* call, ncclResult_t status);

}  // namespace tessera::cuda
