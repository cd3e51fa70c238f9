// What all-to-alls that the host drives need: numbers of all ranks on the device, and a few of them on the host.
#pragma once

#include <span>
#include <string_view>

#include "comm/process_group.h"
#include "device/cuda.h"
#include "ops/runtime/context.h"

namespace tessera::ep {

/// Assigns `numbers` to the first numbers of x (int32), which may be on any device.
void put(const Context& op, std::span<const std::int32_t> numbers, const Tensor& x);

/// Brings a few numbers of operators to the host, while the GPU goes on.
class HostNumbers {
 public:
  /// Allocates memory for `size` numbers from a device. Call this before the ranks exchange data: an allocation may
  /// wait for the GPU. If ranks share a GPU, it may then run another rank's kernel, which waits for this rank.
  void allocate(Device device, std::int64_t size);
  /// Enqueues a copy of x (int32) to the host. The numbers of the copy before become invalid.
  void start(const Context& op, const Tensor& x);
  /// Waits for the copy. Returns its numbers, which are valid until the next start.
  std::span<const std::int32_t> wait(const Context& op);

 private:
  ::tessera::Buffer memory_;  // pinned for a GPU
  std::size_t size_ = 0;
  cuda::Event copied_;
};

/// Returns the numbers x [n] of all ranks on the device: [P, n] in scratch memory, in the order of the ranks. All ranks
/// must call it together. It is an all-to-all, in which every rank sends its numbers to each. NCCL's all-gather would
/// take more steps, and hang if ranks share a GPU (docs/cuda.md). `name` is for messages.
Tensor gather_on_device(const Context& op, ProcessGroup& group, const Tensor& x, std::string_view name);

}  // namespace tessera::ep
