// The choices are read where an expert's weights are needed, so nothing is sorted or moved. For one token, the shared
// experts' hidden numbers are computed as those of further experts. More tokens would read their weights once each.
#include "ops/kit/dots.cuh"
#include "ops/routing/moe_decode.h"

namespace tessera::cuda {
namespace {

template <typename T>
struct MoeDecodeArgs {
  const T *x, *y;                   // [T, D]
  const T *w13, *w2;                // [E, 2F, D], [E, D, F]
  const T *shared_w13, *shared_w2;  // [2I, D], [D, I]
  const std::int32_t* ids;          // [T, K]
  const float* weights;             // [T, K]
  std::int64_t dim, hidden;         // D and F
  int top_k, num_shared;            // K, and I / F or 0 if these kernels do not compute the shared experts
  const T* shared;                  // [T, D]: the shared experts' output that is there already, or null
  T* a;                             // [T, (num_shared + K) · F]: hidden numbers after SwiGLU
  T* out;                           // [T, D]

  __device__ int num_parts() const { return num_shared + top_k; }
};

/// Computes a hidden number per warp, for part blockIdx.x of F numbers: part i of token t is t · num_parts + i. A
/// token's first parts are of the shared experts, and the others of its choices. Choices of one expert are computed at
/// about the same time, so the GPU's cache has its weights.
template <typename T>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks) up_kernel(const MoeDecodeArgs<T> args) {
  const int t = static_cast<int>(blockIdx.x) / args.num_parts(), part = static_cast<int>(blockIdx.x) % args.num_parts();
  const int choice = part - args.num_shared;  // negative for shared experts
  const std::int64_t f = std::int64_t{blockIdx.y} * kDotsWarps + threadIdx.x / kWarp;
  // This order matters: down_kernel reads the choices before its own wait. They are complete once this one waited.
  const auto wait = [] {
    wait_for_kernel_before();
    let_next_kernel_begin();
  };
  if (choice >= 0) wait();
  if (f >= args.hidden) return;
  const T* const of_part = choice < 0 ? args.shared_w13 + part * args.hidden * args.dim
                                      : args.w13 + args.ids[t * args.top_k + choice] * 2 * args.hidden * args.dim;
  const std::int64_t gate_rows = choice < 0 ? args.num_shared * args.hidden : args.hidden;
  const T* const gate_D = of_part + f * args.dim;
  const T* const w[2] = {gate_D, gate_D + gate_rows * args.dim};
  const T* const y[1] = {args.y + t * args.dim};
  DotsOfWarp<T, 2> dots(w, args.dim);
  if (choice < 0) wait();  // the shared experts' weights are on their way already
  float h[2][1];
  dots.with(y, h);
  const float gate = rounded<T>(h[0][0]), up = rounded<T>(h[1][0]);
  if (threadIdx.x % kWarp != 0) return;
  args.a[blockIdx.x * args.hidden + f] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
}

/// Computes number d of token blockIdx.x per warp.
template <typename T>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks) down_kernel(const MoeDecodeArgs<T> args) {
  const std::int64_t t = blockIdx.x, d = std::int64_t{blockIdx.y} * kDotsWarps + threadIdx.x / kWarp;
  if (d >= args.dim) return;
  let_next_kernel_begin();
  // Returns the product of a row of weights with hidden numbers, which begin with those of a part.
  const auto product = [&](const T* row, int part, std::int64_t length) {
    const T* const w[1] = {row};
    const T* const a[1] = {args.a + (t * args.num_parts() + part) * args.hidden};
    DotsOfWarp<T, 1> dots(w, length);
    wait_for_kernel_before();
    float out[1][1];
    dots.with(a, out);
    return rounded<T>(out[0][0]);
  };
  float shared = 0.0f, routed = 0.0f;
  if (args.num_shared > 0) {
    const std::int64_t length = args.num_shared * args.hidden;
    shared = product(args.shared_w2 + d * length, 0, length);
  }
  for (int k = 0; k < args.top_k; ++k) {
    // A cache of the SM may still have other choices, since this kernel may not have waited.
    const std::int64_t expert = __ldcg(args.ids + t * args.top_k + k);
    const float out = product(args.w2 + (expert * args.dim + d) * args.hidden, args.num_shared + k, args.hidden);
    routed += args.weights[t * args.top_k + k] * out;
  }
  if (threadIdx.x % kWarp != 0) return;
  const std::int64_t i = t * args.dim + d;
  if (args.shared != nullptr) shared = to_float(args.shared[i]);
  args.out[i] = from_float<T>(to_float(args.x[i]) + (rounded<T>(routed) + shared));
}

}  // namespace

void moe_decode(const Context& op, const Tensor& x_TD, const Tensor& y_TD, const MoeDecodeOperands& experts,
                const Tensor& out_TD) {
  const std::int64_t num_tokens = y_TD.dim(0), dim = y_TD.dim(1), hidden = experts.w2_EDF.dim(2);
  const bool has_shared = experts.shared_w2_DI.defined();
  const bool fits = dim % kLanes == 0 && hidden % kLanes == 0 && in_lanes(y_TD, experts.w13_E2FD, experts.w2_EDF) &&
                    (!has_shared || in_lanes(experts.shared_w13_2ID, experts.shared_w2_DI));
  if (num_tokens > kFewRows || !fits) return moe_decode_by_operators(op, x_TD, y_TD, experts, out_TD);
  const ArenaScope scope(*op.arena);
  Tensor shared_TD;
  if (has_shared && num_tokens > 1) {
    shared_TD = op.arena->allocate(y_TD.shape(), y_TD.dtype());
    shared_experts_by_operators(op, y_TD, experts, shared_TD);
  }
  const std::int64_t top_k = experts.expert_ids_TK.dim(1);
  const std::int64_t num_shared = has_shared && num_tokens == 1 ? experts.shared_w2_DI.dim(1) / hidden : 0;
  const Tensor a = op.arena->allocate({num_tokens, (num_shared + top_k) * hidden}, y_TD.dtype());
  if (op.measuring() || num_tokens == 0) return;
  for_float_type(y_TD.dtype(), [&]<typename T>(T) {
    const MoeDecodeArgs<T> args{.x = numbers<const T>(x_TD),
                                .y = numbers<const T>(y_TD),
                                .w13 = numbers<const T>(experts.w13_E2FD),
                                .w2 = numbers<const T>(experts.w2_EDF),
                                .shared_w13 = numbers<const T>(experts.shared_w13_2ID),
                                .shared_w2 = numbers<const T>(experts.shared_w2_DI),
                                .ids = numbers<const std::int32_t>(experts.expert_ids_TK),
                                .weights = numbers<const float>(experts.weights_TK),
                                .dim = dim,
                                .hidden = hidden,
                                .top_k = static_cast<int>(top_k),
                                .num_shared = static_cast<int>(num_shared),
                                .shared = numbers<const T>(shared_TD),
                                .a = numbers<T>(a),
                                .out = numbers<T>(out_TD)};
    const auto num_parts = static_cast<unsigned>(num_tokens * (num_shared + top_k));
    launch_early(op, up_kernel<T>, dim3(num_parts, dots_blocks(hidden)), kDotsThreads, 0, args);
    launch_early(op, down_kernel<T>, dim3(static_cast<unsigned>(num_tokens), dots_blocks(dim)), kDotsThreads, 0, args);
  });
}

}  // namespace tessera::cuda
