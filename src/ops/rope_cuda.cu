#include "ops/cuda/launch.cuh"
#include "ops/rope.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct RopeArgs {
  const T* x;
  T* y;
  std::int64_t x_stride, y_stride;
  const std::int32_t* positions;
  const float *cos, *sin;
  float sign;
  std::uint32_t num_heads, head_dim, half;  // half: pairs of a head that are turned
  std::uint32_t num_groups;                 // of kPairs pairs, in all
};

/// kPairs neighbouring pairs of a head a thread: 4, or 1 where these are not in order at multiples of 16 bytes.
template <typename T, int kPairs>
__global__ void rope_kernel(const RopeArgs<T> args) {
  const std::uint32_t per_head = args.half / kPairs, per_token = per_head * args.num_heads;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < args.num_groups; i += gridDim.x * kThreads) {
    const std::uint32_t token = i / per_token, head = i % per_token / per_head, pair = i % per_head * kPairs;
    const std::uint32_t column = head * args.head_dim + args.head_dim - 2 * args.half + 2 * pair;
    const std::int64_t angles = std::int64_t{args.positions[token]} * args.half + pair;
    const T* x = args.x + token * args.x_stride + column;
    T* y = args.y + token * args.y_stride + column;
    float numbers[2 * kPairs];
    if constexpr (kPairs == 1) {
      numbers[0] = to_float(x[0]), numbers[1] = to_float(x[1]);
    } else {
      load_lanes(x, numbers);
    }
    struct alignas(kPairs * sizeof(float)) Angles {
      float x[kPairs];
    };
    const Angles cos = *reinterpret_cast<const Angles*>(args.cos + angles);
    const Angles sin = *reinterpret_cast<const Angles*>(args.sin + angles);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const float even = numbers[2 * p], odd = numbers[2 * p + 1], signed_sin = args.sign * sin.x[p];
      numbers[2 * p] = even * cos.x[p] - odd * signed_sin;
      numbers[2 * p + 1] = odd * cos.x[p] + even * signed_sin;
    }
    if constexpr (kPairs == 1) {
      y[0] = from_float<T>(numbers[0]), y[1] = from_float<T>(numbers[1]);
    } else {
      store_lanes(numbers, y);
    }
  }
}

}  // namespace

void rope(const Context& op, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PN, const Tensor& sin_PN, RopeDirection direction,
          const Tensor& y_TN) {
  const std::int64_t num_tokens = x_TN.dim(0), head_dim = x_TN.dim(1) / num_heads, num_pairs = rope_dim / 2;
  if (op.measuring() || num_tokens == 0 || num_pairs == 0) return;
  const bool lanes = in_lanes(x_TN, y_TN, cos_PN, sin_PN) && head_dim % kLanes == 0 && rope_dim % kLanes == 0;
  TESSERA_CHECK(num_tokens * num_heads * num_pairs < std::int64_t{1} << 32, "{}", x_TN.shape().to_string());
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    for_lanes(lanes, [&](auto count) {
      constexpr int kPairs = decltype(count)::value == 1 ? 1 : kLanes / 2;
      const auto num_groups = static_cast<std::uint32_t>(num_tokens * num_heads * num_pairs / kPairs);
      rope_kernel<T, kPairs><<<grid_for(op, num_groups, kThreads), kThreads, 0, stream_of(op)>>>(
          {.x = numbers<T>(x_TN),
           .y = numbers<T>(y_TN),
           .x_stride = x_TN.stride(),
           .y_stride = y_TN.stride(),
           .positions = numbers<const std::int32_t>(positions_T),
           .cos = numbers<const float>(cos_PN),
           .sin = numbers<const float>(sin_PN),
           .sign = direction == RopeDirection::kForward ? 1.0f : -1.0f,
           .num_heads = static_cast<std::uint32_t>(num_heads),
           .head_dim = static_cast<std::uint32_t>(head_dim),
           .half = static_cast<std::uint32_t>(num_pairs),
           .num_groups = num_groups});
    });
  });
}

}  // namespace tessera::cuda
