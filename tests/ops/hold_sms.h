// A kernel that keeps SMs from others for a while.
#pragma once

#include "tensor/cuda.h"

namespace tessera {

/// One block on each of so many SMs takes all its shared memory.
void hold_sms(const cuda::Stream& stream, int num_sms, int microseconds);

}  // namespace tessera
