// Kernels that occupy a GPU for a given time.
#pragma once

#include "device/cuda.h"

namespace tessera {

/// Occupies the stream for `microseconds`, with one block.
void put_delay(const cuda::Stream& stream, int microseconds);

/// Copies bytes on the GPU, but only after `microseconds`. A kernel behind it that is launched early begins at once.
void put_late_copy(const cuda::Stream& stream, const void* from, std::size_t num_bytes, int microseconds, void* to);

/// Occupies `num_sms` SMs for `microseconds`. A block on each SM takes nearly all its shared memory.
void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds);

}  // namespace tessera
