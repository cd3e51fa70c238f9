// What groups of GPUs run besides NCCL's kernels.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "device/cuda.h"
#include "tensor/arena.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

/// A word of the host's memory that a GPU writes as it comes by, for the host to see how far it is; also in graphs.
class Note {
 public:
  /// `count`: a word of the GPU's memory, 0.
  explicit Note(std::uint32_t* count) : count_(count) {}

  /// Puts it on the stream; of one note always the same stream.
  void put(const Stream& stream, std::uint32_t value) const;
  /// The last value that the GPU has come to, and behind it, in the upper half, how many it has come to in all.
  std::uint64_t seen() const { return *reinterpret_cast<const volatile std::uint64_t*>(word_.data()); }
  static std::uint32_t value_of(std::uint64_t seen) { return static_cast<std::uint32_t>(seen); }
  static std::uint32_t count_of(std::uint64_t seen) { return static_cast<std::uint32_t>(seen >> 32); }

 private:
  Buffer word_ = Buffer::pinned(sizeof(std::uint64_t));
  std::uint32_t* count_;
};

/// Puts out += x on the stream; float32 or bfloat16.
void put_sum(const Stream& stream, const Tensor& x, const Tensor& out);

/// Where the ranks of a window, which can all reach each other's memory, have it, as this GPU sees it. Waits for the
/// GPU.
std::vector<std::byte*> peers_of_window(const Stream& stream, ncclWindow_t window, int size);

/// How many ranks of the communicator, this one included, can reach its memory.
int num_reachable(ncclComm_t communicator);

}  // namespace tessera::cuda
