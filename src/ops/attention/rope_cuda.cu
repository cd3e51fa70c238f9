#include "ops/attention/rope.h"
#include "ops/kit/formulas.cuh"
#include "ops/kit/launch.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// Number of heads that a thread rotates by the same angles.
constexpr int kHeads = 2;

template <typename T>
struct RopeArgs {
  const T* x;
  T* y;
  std::int64_t x_stride, y_stride;
  const std::int32_t* positions;
  const float *cos, *sin;
  float sign;
  std::uint32_t num_tokens, num_heads, head_dim, half;  // half: rotated pairs per head
};

/// Each thread rotates kPairs neighbouring pairs of kHeads heads. kPairs is 4, or 1 if groups of 4 pairs do not lie at
/// multiples of 16 bytes.
template <typename T, int kPairs>
__global__ void rope_kernel(const RopeArgs<T> args) {
  const std::uint32_t per_head = args.half / kPairs, per_token = per_head * ((args.num_heads + kHeads - 1) / kHeads);
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x, token = i / per_token;
  if (token >= args.num_tokens) return;
  const std::uint32_t first_head = i % per_token / per_head * kHeads, pair = i % per_head * kPairs;
  const std::uint32_t first_column = first_head * args.head_dim + args.head_dim - 2 * args.half + 2 * pair;
  const T* x = args.x + token * args.x_stride + first_column;
  T* y = args.y + token * args.y_stride + first_column;
  const std::int64_t angles = std::int64_t{args.positions[token]} * args.half + pair;
  float numbers[kHeads][2 * kPairs];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (first_head + head >= args.num_heads) continue;
    const T* at = x + head * args.head_dim;
    if constexpr (kPairs == 1) {
      numbers[head][0] = to_float(at[0]), numbers[head][1] = to_float(at[1]);
    } else {
      load_lanes(at, numbers[head]);
    }
  }
  struct alignas(kPairs * sizeof(float)) Angles {
    float x[kPairs];
  };
  const Angles cos = *reinterpret_cast<const Angles*>(args.cos + angles);
  const Angles sin = *reinterpret_cast<const Angles*>(args.sin + angles);
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (first_head + head >= args.num_heads) continue;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      rotate_pair(cos.x[p], args.sign * sin.x[p], numbers[head][2 * p], numbers[head][2 * p + 1]);
    }
    T* at = y + head * args.head_dim;
    if constexpr (kPairs == 1) {
      at[0] = from_float<T>(numbers[head][0]), at[1] = from_float<T>(numbers[head][1]);
    } else {
      store_lanes(numbers[head], at);
    }
  }
}

}  // namespace

void rope(const Context& op, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PM, const Tensor& sin_PM, RopeDirection direction,
          const Tensor& y_TN) {
  const std::int64_t num_tokens = x_TN.dim(0), head_dim = x_TN.dim(1) / num_heads, num_pairs = rope_dim / 2;
  if (op.measuring() || num_tokens == 0 || num_pairs == 0) return;
  const bool lanes = in_lanes(x_TN, y_TN, cos_PM, sin_PM) && head_dim % kLanes == 0 && rope_dim % kLanes == 0;
  TESSERA_CHECK(num_tokens * num_heads * num_pairs < std::int64_t{1} << 32, "{}", x_TN.shape().to_string());
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    for_lanes(lanes, [&](auto count) {
      constexpr int kPairs = decltype(count)::value == 1 ? 1 : kLanes / 2;
      const std::int64_t num_threads = num_tokens * ((num_heads + kHeads - 1) / kHeads) * num_pairs / kPairs;
      rope_kernel<T, kPairs>
          <<<static_cast<unsigned>((num_threads + kThreads - 1) / kThreads), kThreads, 0, stream_of(op)>>>(
              {.x = numbers<T>(x_TN),
               .y = numbers<T>(y_TN),
               .x_stride = x_TN.stride(),
               .y_stride = y_TN.stride(),
               .positions = numbers<const std::int32_t>(positions_T),
               .cos = numbers<const float>(cos_PM),
               .sin = numbers<const float>(sin_PM),
               .sign = direction == RopeDirection::kForward ? 1.0f : -1.0f,
               .num_tokens = static_cast<std::uint32_t>(num_tokens),
               .num_heads = static_cast<std::uint32_t>(num_heads),
               .head_dim = static_cast<std::uint32_t>(head_dim),
               .half = static_cast<std::uint32_t>(num_pairs)});
    });
  });
}

}  // namespace tessera::cuda
