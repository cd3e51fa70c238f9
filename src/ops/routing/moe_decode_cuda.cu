// The choices are read where an expert's weights are needed, so nothing is sorted or moved. For one token, the shared
// experts' hidden numbers are computed as those of further experts. With more tokens, each would read these weights
// again, so the operators of products compute them.
#include "ops/kit/dots.cuh"
#include "ops/kit/formulas.cuh"
#include "ops/routing/moe_decode.h"

namespace tessera::cuda {
namespace {

/// The most tokens of these kernels. More of them share their experts' weights, and other kernels read those once.
constexpr std::int64_t kMostTokens = 4;

constexpr int kDownWarps = 8, kDownRows = 2;

/// The hidden numbers are in parts of F numbers. The first parts are the shared experts', and the others are those of
/// the tokens' choices.
template <typename T>
struct MoeDecodeArgs {
  const T *x, *y;                   // [T, D]
  const T *w13, *w2;                // [E, 2F, D], [E, D, F]
  const T *shared_w13, *shared_w2;  // [2I, D], [D, I]
  const std::int32_t* ids;          // [T, K]
  const float* weights;             // [T, K]
  std::int64_t dim, hidden;         // D and F
  int num_choices, top_k;           // T · K, and K
  int num_shared;                   // I / F, or 0 if these kernels do not compute the shared experts
  int blocks_per_part;              // of up_kernel
  const T* shared;                  // [T, D]: the shared experts' output that is there already, or null
  T* a;                             // [num_shared + T · K, F]: hidden numbers after SwiGLU
  T* out;                           // [T, D]
};

/// Computes a hidden number per warp. The shared experts' blocks come first, since they need no choice: they load
/// weights while this kernel waits. After them, neighbouring blocks are of different choices. So choices of one expert
/// read its weights at about the same time.
template <typename T>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks) up_kernel(const MoeDecodeArgs<T> args) {
  const int block = static_cast<int>(blockIdx.x), of_choices = block - args.num_shared * args.blocks_per_part;
  const bool is_shared = of_choices < 0;
  const int choice = is_shared ? 0 : of_choices % args.num_choices;
  const int part = is_shared ? block / args.blocks_per_part : args.num_shared + choice;
  const int block_of_part = is_shared ? block % args.blocks_per_part : of_choices / args.num_choices;
  const std::int64_t f = std::int64_t{block_of_part} * kDotsWarps + threadIdx.x / kWarp;
  // This order matters: down_kernel reads the choices before its own wait. They are complete once this one waited.
  const auto wait = [] {
    wait_for_kernel_before();
    let_next_kernel_begin();
  };
  if (!is_shared) wait();
  if (f >= args.hidden) return;
  const T* const of_part = is_shared ? args.shared_w13 + part * args.hidden * args.dim
                                     : args.w13 + args.ids[choice] * 2 * args.hidden * args.dim;
  const std::int64_t gate_rows = is_shared ? args.num_shared * args.hidden : args.hidden;
  const T* const gate_D = of_part + f * args.dim;
  const T* const w[2] = {gate_D, gate_D + gate_rows * args.dim};
  const T* const y[1] = {args.y + choice / args.top_k * args.dim};
  DotsOfWarp<T, 2, 16 / sizeof(T)> dots(w, args.dim);
  if (is_shared) wait();
  float h[2][1];
  dots.with(y, h);
  const float gate = rounded<T>(h[0][0]), up = rounded<T>(h[1][0]);
  if (threadIdx.x % kWarp != 0) return;
  args.a[part * args.hidden + f] = from_float<T>(swiglu_of(gate, up));
}

/// Computes kDownRows numbers of token blockIdx.x. Its parts are distributed over the block's warps.
template <typename T>
__global__ void __launch_bounds__(kDownWarps* kWarp, kDotsBlocks) down_kernel(const MoeDecodeArgs<T> args) {
  extern __shared__ float products[];  // [num_shared + K, kDownRows]
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = blockIdx.x, d = std::int64_t{blockIdx.y} * kDownRows;
  let_next_kernel_begin();
  for (int part = warp; part < args.num_shared + args.top_k; part += kDownWarps) {
    const T* of_part = args.shared_w2 + part * args.hidden;
    std::int64_t stride = args.num_shared * args.hidden, input = part;
    if (part >= args.num_shared) {
      input += token * args.top_k;
      // A cache of the SM may still have other choices, since this kernel may not have waited.
      of_part = args.w2 + __ldcg(args.ids + input - args.num_shared) * args.dim * args.hidden;
      stride = args.hidden;
    }
    const T* w[kDownRows];
#pragma unroll
    for (int r = 0; r < kDownRows; ++r) w[r] = of_part + (d + r) * stride;
    const T* const a[1] = {args.a + input * args.hidden};
    DotsOfWarp<T, kDownRows> dots(w, args.hidden);
    wait_for_kernel_before();
    float sums[kDownRows][1];
    dots.with(a, sums);
#pragma unroll
    for (int r = 0; r < kDownRows; ++r) {
      if (lane == r) products[part * kDownRows + r] = sums[r][0];
    }
  }
  __syncthreads();
  if (threadIdx.x >= kDownRows) return;
  const std::int64_t i = token * args.dim + d + threadIdx.x;
  float shared = 0.0f, routed = 0.0f;
  for (int part = 0; part < args.num_shared; ++part) shared += products[part * kDownRows + threadIdx.x];
  for (int k = 0; k < args.top_k; ++k) {
    routed +=
        args.weights[token * args.top_k + k] * rounded<T>(products[(args.num_shared + k) * kDownRows + threadIdx.x]);
  }
  shared = args.shared != nullptr ? to_float(args.shared[i]) : rounded<T>(shared);
  args.out[i] = from_float<T>(to_float(args.x[i]) + (rounded<T>(routed) + shared));
}

}  // namespace

void moe_decode(const Context& op, const Tensor& x_TD, const Tensor& y_TD, const MoeDecodeOperands& experts,
                const Tensor& out_TD) {
  const std::int64_t num_tokens = y_TD.dim(0), dim = y_TD.dim(1), hidden = experts.w2_EDF.dim(2);
  const bool has_shared = experts.shared_w2_DI.defined();
  const bool fits = dim % kLanes == 0 && hidden % kLanes == 0 && in_lanes(y_TD, experts.w13_E2FD, experts.w2_EDF) &&
                    (!has_shared || in_lanes(experts.shared_w13_2ID, experts.shared_w2_DI));
  if (num_tokens > kMostTokens || !fits) return moe_decode_by_operators(op, x_TD, y_TD, experts, out_TD);
  const ArenaScope scope(*op.arena);
  Tensor shared_TD;
  if (has_shared && num_tokens > 1) {
    shared_TD = op.arena->allocate(y_TD.shape(), y_TD.dtype());
    shared_experts_by_operators(op, y_TD, experts, shared_TD);
  }
  const std::int64_t top_k = experts.expert_ids_TK.dim(1);
  const std::int64_t num_shared = has_shared && num_tokens == 1 ? experts.shared_w2_DI.dim(1) / hidden : 0;
  const std::int64_t num_choices = num_tokens * top_k, num_parts = num_shared + num_choices;
  const Tensor a = op.arena->allocate({num_parts, hidden}, y_TD.dtype());
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
                                .num_choices = static_cast<int>(num_choices),
                                .top_k = static_cast<int>(top_k),
                                .num_shared = static_cast<int>(num_shared),
                                .blocks_per_part = static_cast<int>(dots_blocks(hidden)),
                                .shared = numbers<const T>(shared_TD),
                                .a = numbers<T>(a),
                                .out = numbers<T>(out_TD)};
    const auto up_blocks = static_cast<unsigned>(num_parts) * dots_blocks(hidden);
    launch_early(op, up_kernel<T>, up_blocks, kDotsThreads, 0, args);
    const dim3 down_blocks(static_cast<unsigned>(num_tokens), static_cast<unsigned>(dim / kDownRows));
    const std::size_t shared_bytes = static_cast<std::size_t>(num_shared + top_k) * kDownRows * sizeof(float);
    launch_early(op, down_kernel<T>, down_blocks, kDownWarps * kWarp, shared_bytes, args);
  });
}

}  // namespace tessera::cuda
