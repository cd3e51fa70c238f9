#include "comm/registered_memory.h"

#include <cuda_runtime.h>

#include "device/cuda_check.h"

namespace tessera::cuda {

RegisteredMemory::RegisteredMemory(ncclComm_t communicator, std::shared_ptr<const bool> aborted, const Stream& stream,
                                   std::size_t num_bytes)
    : communicator_(communicator), aborted_(std::move(aborted)) {
  const std::size_t whole =
      (num_bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT * NCCL_WIN_REQUIRED_ALIGNMENT;
  TESSERA_NCCL(ncclMemAlloc, &memory_, whole);
  TESSERA_CUDA(cudaMemsetAsync(memory_, 0, whole, stream.handle()));
  stream.synchronize();
  TESSERA_NCCL(ncclCommWindowRegister, communicator_, memory_, whole, &window_, NCCL_WIN_COLL_SYMMETRIC);
}

RegisteredMemory::~RegisteredMemory() {
  if (!*aborted_) TESSERA_NCCL_FUNCTION(ncclCommWindowDeregister)(communicator_, window_);
  TESSERA_NCCL_FUNCTION(ncclMemFree)(memory_);
}

}  // namespace tessera::cuda
