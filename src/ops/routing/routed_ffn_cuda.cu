// The choices are read where an expert's weights are needed, so nothing is sorted or moved.
#include "ops/kit/dots.cuh"
#include "ops/routing/routed_ffn.h"

namespace tessera::cuda {
namespace {

/// Computes a hidden number per warp, for the choice blockIdx.x = t·K + k. Choices of one expert are computed at about
/// the same time, so the GPU's cache has its weights.
template <typename T>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks)
    up_kernel(const T* y_TD, std::int64_t stride, const T* w13_E2FD, const std::int32_t* ids_TK, std::int64_t top_k,
              std::int64_t dim, std::int64_t hidden, T* a_TKF) {
  // This order matters: down_kernel reads the choices before its own wait. They are complete once this one waited.
  wait_for_kernel_before();
  let_next_kernel_begin();
  const std::int64_t slot = blockIdx.x, f = std::int64_t{blockIdx.y} * kDotsWarps + threadIdx.x / kWarp;
  if (f >= hidden) return;
  const T* const gate_D = w13_E2FD + (ids_TK[slot] * 2 * hidden + f) * dim;
  const T* const w[2] = {gate_D, gate_D + hidden * dim};
  const T* const y[1] = {y_TD + slot / top_k * stride};
  float h[2][1];
  DotsOfWarp<T, 2>(w, dim).with(y, h);
  const float gate = rounded<T>(h[0][0]), up = rounded<T>(h[1][0]);
  if (threadIdx.x % kWarp == 0) a_TKF[slot * hidden + f] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
}

/// Computes number d of token blockIdx.x per warp.
template <typename T>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks)
    down_kernel(const T* a_TKF, const T* w2_EDF, const std::int32_t* ids_TK, const float* weights_TK,
                std::int64_t top_k, std::int64_t dim, std::int64_t hidden, T* out_TD) {
  const std::int64_t t = blockIdx.x, d = std::int64_t{blockIdx.y} * kDotsWarps + threadIdx.x / kWarp;
  if (d >= dim) return;
  let_next_kernel_begin();
  float sum = 0.0f;
  for (std::int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
    // A cache of the SM may still have other choices, since this kernel has not waited.
    const T* const w[1] = {w2_EDF + (__ldcg(ids_TK + slot) * dim + d) * hidden};
    const T* const a[1] = {a_TKF + slot * hidden};
    DotsOfWarp<T, 1> dots(w, hidden);
    wait_for_kernel_before();
    float out[1][1];
    dots.with(a, out);
    sum += weights_TK[slot] * rounded<T>(out[0][0]);
  }
  if (threadIdx.x % kWarp == 0) out_TD[t * dim + d] = from_float<T>(sum);
}

}  // namespace

void routed_ffn(const Context& op, const Tensor& y_TD, const RoutedFfn& experts, const Tensor& out_TD) {
  const std::int64_t num_tokens = y_TD.dim(0), dim = y_TD.dim(1), hidden = experts.w2_EDF.dim(2);
  const std::int64_t top_k = experts.expert_ids_TK.dim(1);
  const bool fits = dim % kLanes == 0 && hidden % kLanes == 0 && in_lanes(y_TD, experts.w13_E2FD, experts.w2_EDF);
  if (num_tokens > kFewRows || !fits) {
    return routed_ffn_by_operators(op, y_TD, experts, out_TD);
  }
  const ArenaScope scope(*op.arena);
  const Tensor a_TKF = op.arena->allocate({num_tokens, top_k, hidden}, y_TD.dtype());
  if (op.measuring() || num_tokens == 0) return;
  for_float_type(y_TD.dtype(), [&]<typename T>(T) {
    const auto* const ids_TK = numbers<const std::int32_t>(experts.expert_ids_TK);
    launch_early(op, up_kernel<T>, dim3(static_cast<unsigned>(num_tokens * top_k), dots_blocks(hidden)), kDotsThreads,
                 0, numbers<const T>(y_TD), y_TD.stride(), numbers<const T>(experts.w13_E2FD), ids_TK, top_k, dim,
                 hidden, numbers<T>(a_TKF));
    launch_early(op, down_kernel<T>, dim3(static_cast<unsigned>(num_tokens), dots_blocks(dim)), kDotsThreads, 0,
                 numbers<const T>(a_TKF), numbers<const T>(experts.w2_EDF), ids_TK,
                 numbers<const float>(experts.weights_TK), top_k, dim, hidden, numbers<T>(out_TD));
  });
}

}  // namespace tessera::cuda
