#include <bit>
#include <cstring>

#include "ops/attention/rope.h"
#include "ops/cpu/types.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

struct Pair {
  float even, odd;
};

// If a pair of numbers is one word, it is loaded and stored as one, so that the loop over pairs becomes vector code.
Pair load_pair(const float* x) { return {x[0], x[1]}; }
Pair load_pair(const BFloat16* x) {
  std::uint32_t word = 0;
  std::memcpy(&word, x, sizeof(word));
  return {std::bit_cast<float>(word << 16), std::bit_cast<float>(word & 0xffff0000u)};
}
void store_pair(float* y, Pair pair) {
  y[0] = pair.even;
  y[1] = pair.odd;
}
void store_pair(BFloat16* y, Pair pair) {
  const std::uint32_t word = BFloat16(pair.even).bits | std::uint32_t{BFloat16(pair.odd).bits} << 16;
  std::memcpy(y, &word, sizeof(word));
}

template <typename T>
void rotate(const T* x, const float* cos, const float* signed_sin, std::int64_t num_pairs, T* y) {
#pragma GCC ivdep  // y is x itself or does not overlap x
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    const Pair pair = load_pair(x + 2 * i);
    store_pair(y + 2 * i,
               {pair.even * cos[i] - pair.odd * signed_sin[i], pair.odd * cos[i] + pair.even * signed_sin[i]});
  }
}

}  // namespace

void rope(const Context& context, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PM, const Tensor& sin_PM, RopeDirection direction,
          const Tensor& y_TN) {
  const std::int64_t num_tokens = x_TN.dim(0), head_dim = x_TN.dim(1) / num_heads, half = rope_dim / 2;
  constexpr std::int64_t kMaxPairs = 512;
  require(half <= kMaxPairs, "model.args.qk_rope_head_dim is {}; expected at most {} on a CPU", rope_dim,
          2 * kMaxPairs);
  if (context.measuring()) return;
  const float sign = direction == RopeDirection::kForward ? 1.0f : -1.0f;
  constexpr std::int64_t kTokensPerTask = 32;
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    parallel_ranges(num_tokens, kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int32_t position = positions_T.data<std::int32_t>()[t];
        const float* cos = row_of<float>(cos_PM, position);
        const float* sin = row_of<float>(sin_PM, position);
        float signed_sin[kMaxPairs];
        for (std::int64_t i = 0; i < half; ++i) signed_sin[i] = sign * sin[i];
        for (std::int64_t head = 0; head < num_heads; ++head) {
          const std::int64_t offset = head * head_dim + head_dim - rope_dim;
          rotate(row_of<T>(x_TN, t) + offset, cos, signed_sin, half, row_of<T>(y_TN, t) + offset);
        }
      }
    });
  });
}

}  // namespace tessera::cpu
