// The kernels that groups of GPUs run besides NCCL's.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "device/cuda.h"
#include "tensor/arena.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

/// Holds a word of host memory that the GPU writes when it reaches a place in a stream or a graph. From it the host
/// sees how far the GPU is.
class Note {
 public:
  /// `count` points to a word of GPU memory that is 0.
  explicit Note(std::uint32_t* count) : count_(count) {}

  /// Puts a write of `value` on the stream. A note must always use the same stream.
  void put(const Stream& stream, std::uint32_t value) const;
  /// Returns the last value that the GPU has written. The upper 32 bits count all the values it has written.
  std::uint64_t seen() const { return *reinterpret_cast<const volatile std::uint64_t*>(word_.data()); }
  /// Returns the value in what seen() returned.
  static std::uint32_t value_of(std::uint64_t seen) { return static_cast<std::uint32_t>(seen); }
  /// Returns the number of values that the GPU had written when seen() returned this.
  static std::uint32_t count_of(std::uint64_t seen) { return static_cast<std::uint32_t>(seen >> 32); }

 private:
  Buffer word_ = Buffer::pinned(sizeof(std::uint64_t));
  std::uint32_t* count_;
};

// The tensors of the next three functions begin at multiples of 16 bytes. The functions throw InternalError otherwise,
// and for other types.

/// Puts out += x on the stream. Both are float32, or both bfloat16, with as many elements.
void put_sum(const Stream& stream, const Tensor& x, const Tensor& out);

/// Puts a kernel on the stream that rounds x [num_parts · n], float32, to bfloat16 in place. The rounded numbers fill
/// the first half of each part. Word i of a half has the numbers i (in its low bits) and i + n/2. n must be a multiple
/// of 8.
void put_rounding(const Stream& stream, const Tensor& x, int num_parts);

/// Puts out (= or +=) the sum of rounded parts on the stream. `x` is that of put_rounding(), and `out` [n] is float32.
/// The numbers of rank `own` are in the first half of its part, and those of the other ranks in the second halves of
/// theirs. They are added in the order of the ranks.
void put_sum_of_rounded(const Stream& stream, const Tensor& x, int own, const Tensor& out, Write write);

/// Returns the address of each rank's part of a window, as this GPU sees it. All ranks of the window must be able to
/// reach each other's memory. Waits for the GPU.
std::vector<std::byte*> peers_of_window(const Stream& stream, ncclWindow_t window, int size);

/// Returns how many ranks of the communicator, this one included, can reach this rank's memory.
int num_reachable(ncclComm_t communicator);

}  // namespace tessera::cuda
