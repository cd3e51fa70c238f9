// A kernel that does nothing for a while.
#pragma once

#include "tensor/cuda.h"

namespace tessera::ep_test {

void put_delay(const cuda::Stream& stream, int microseconds);

}  // namespace tessera::ep_test
