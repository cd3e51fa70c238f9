// GPU memory that the other ranks of an NCCL communicator can write to.
#pragma once

#include <memory>

#include "comm/nccl_library.h"
#include "device/cuda.h"

namespace tessera::cuda {

/// Holds zeroed memory of one size on all ranks, registered as a symmetric window.
class RegisteredMemory {
 public:
  /// All ranks of the communicator must call it together. Waits for the stream. `*aborted` becomes true when the
  /// communicator is aborted, and then it no longer exists. Throws Error if there is not enough memory.
  RegisteredMemory(ncclComm_t communicator, std::shared_ptr<const bool> aborted, const Stream& stream,
                   std::size_t num_bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  ncclWindow_t window() const { return window_; }

 private:
  ncclComm_t communicator_;
  std::shared_ptr<const bool> aborted_;
  void* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

}  // namespace tessera::cuda
