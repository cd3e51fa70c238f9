// What groups of GPUs run besides NCCL's kernels.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "tensor/cuda.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

/// Puts a store into the host's memory on the stream.
void put_note(const Stream& stream, std::uint32_t value, std::uint32_t* target);

/// Puts out += x on the stream; float32 or bfloat16.
void put_sum(const Stream& stream, const Tensor& x, const Tensor& out);

/// Where the ranks of a window, which can all reach each other's memory, have it, as this GPU sees it. Waits for the
/// GPU.
std::vector<std::byte*> peers_of_window(const Stream& stream, ncclWindow_t window, int size);

/// How many ranks of the communicator, this one included, can reach its memory.
int num_reachable(ncclComm_t communicator);

}  // namespace tessera::cuda
