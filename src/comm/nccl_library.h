// Loads NCCL when it is first used. Only sources that are built with CUDA include this file.
#pragma once

#include <nccl.h>

#include "base/error.h"

/// Returns NCCL's function of this name, with the type that NCCL's header declares. Throws Error if it is not found.
#define TESSERA_NCCL_FUNCTION(name)                                                                     \
  ([] {                                                                                                 \
    static const auto found = reinterpret_cast<decltype(&::name)>(::tessera::cuda::nccl_symbol(#name)); \
    return found;                                                                                       \
  }())

/// TESSERA_NCCL(ncclAllGather, operands...) calls the function. If the call fails, it throws Error with the call's name
/// and the reason.
#define TESSERA_NCCL(name, ...)                                                             \
  do {                                                                                      \
    const ncclResult_t tessera_status = TESSERA_NCCL_FUNCTION(name)(__VA_ARGS__);           \
    if (tessera_status != ncclSuccess) ::tessera::cuda::nccl_failed(#name, tessera_status); \
  } while (false)

namespace tessera::cuda {

/// Returns the address of a function of NCCL. Throws Error if NCCL is missing or older than this build's headers.
void* nccl_symbol(const char* name);
[[noreturn]] void nccl_failed(const char* call, ncclResult_t status);

}  // namespace tessera::cuda
