// Kernels that occupy a GPU for a given time and compute nothing.
#pragma once

#include "device/cuda.h"

namespace tessera {

/// Occupies the stream for `microseconds`, with one block.
void put_delay(const cuda::Stream& stream, int microseconds);

/// Occupies `num_sms` SMs for `microseconds`. A block on each SM takes nearly all its shared memory.
void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds);

}  // namespace tessera
