#include "ops/elementwise/init_number.h"
#include "ops/kit/launch.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void draw_kernel(const Philox random, const InitPattern pattern, std::int64_t begin, std::int64_t count,
                            float* x) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    x[i] = initial_number(random, pattern, begin + i);
  }
}

}  // namespace

void draw_initial(const Context& op, const Philox& random, const InitPattern& pattern, std::int64_t begin,
                  const Tensor& x_N) {
  if (op.measuring()) return;
  const std::int64_t count = x_N.num_elements();
  draw_kernel<<<grid_for(op, count, kThreads), kThreads, 0, stream_of(op)>>>(random, pattern, begin, count,
                                                                             numbers<float>(x_N));
}

}  // namespace tessera::cuda
