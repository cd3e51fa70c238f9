// Kernels that do nothing for a while.
#pragma once

#include "device/cuda.h"

namespace tessera {

/// Holds the stream up.
void put_delay(const cuda::Stream& stream, int microseconds);

/// Holds so many SMs: a block on each takes nearly all its shared memory.
void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds);

}  // namespace tessera
