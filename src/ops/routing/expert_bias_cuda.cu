#include "ops/kit/launch.cuh"
#include "ops/routing/expert_bias.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float sign_of(double lack) { return lack > 0.0 ? 1.0f : (lack < 0.0 ? -1.0f : 0.0f); }

/// Runs in one block. Every thread sums up all experts in their order, as the CPU does, so that both get the same bits.
__global__ void update_kernel(const double* counts, int experts, float coeff, const float* finite, float* bias) {
  if (*finite == 0.0f) return;
  double sum = 0.0;
  for (int e = 0; e < experts; ++e) sum += counts[e];
  const double mean = sum / experts;
  float mean_sign = 0.0f;
  for (int e = 0; e < experts; ++e) mean_sign += sign_of(mean - counts[e]) / static_cast<float>(experts);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    // The product is rounded before it is added, as on a CPU. The intrinsics keep the compiler from fusing the two.
    bias[e] = __fadd_rn(bias[e], __fmul_rn(coeff, sign_of(mean - counts[e]) - mean_sign));
  }
}

}  // namespace

void update_expert_bias(const Context& op, const Tensor& counts_E, float coeff, const Tensor& finite_1,
                        const Tensor& bias_E) {
  if (op.measuring()) return;
  update_kernel<<<1, kThreads, 0, stream_of(op)>>>(numbers<const double>(counts_E), static_cast<int>(bias_E.dim(0)),
                                                   coeff, numbers<const float>(finite_1), numbers<float>(bias_E));
}

}  // namespace tessera::cuda
