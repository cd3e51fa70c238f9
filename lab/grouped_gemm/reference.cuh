// Computes the harness's inputs and the results to compare with. One output is one warp's dot product in float64.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace lab {

enum class Kind { kForward, kDgrad, kWgrad };

struct Problem {
  Kind kind = Kind::kForward;
  int num_experts = 0, num_rows = 0, m = 0, n = 0;
  const std::int32_t* offsets = nullptr;
  const __nv_bfloat16* x = nullptr;    // [rows, n]
  const __nv_bfloat16* d_y = nullptr;  // [rows, m]
  const __nv_bfloat16* w = nullptr;    // [experts, m, n]
};

__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 31) * 0x7fb5d329728ea185u;
  x = (x ^ x >> 27) * 0x81dadef4bc2dd44du;
  return x ^ x >> 33;
}

/// Fills with almost normal numbers: the sum of 4 uniform ones.
template <typename T>
__global__ void fill_normal(T* out, std::int64_t count, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t bits = mix(mix(seed) + i);
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(bits >> 16 * j & 0xffff) * 0x1p-16f - 0.5f;
    out[i] = static_cast<T>(sum * 1.7320508f * scale);
  }
}

/// Computes every output if `samples` is 0, otherwise that many: sample i is output mix(i) % count. Rows of no expert
/// give NaN.
static __global__ void reference(Problem p, double* out, std::int64_t count, std::int64_t samples) {
  const std::int64_t total = samples ? samples : count;
  const int lane = threadIdx.x % 32;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x / 32} + threadIdx.x / 32; i < total;
       i += std::int64_t{gridDim.x} * (blockDim.x / 32)) {
    const std::int64_t at = samples ? static_cast<std::int64_t>(mix(i) % count) : i;
    const int columns = p.kind == Kind::kForward ? p.m : p.n;
    const std::int64_t row = at / columns, column = at % columns;
    double sum = 0;
    if (p.kind == Kind::kWgrad) {
      const std::int64_t e = row / p.m, m = row % p.m;
      for (std::int64_t r = p.offsets[e] + lane; r < p.offsets[e + 1]; r += 32) {
        sum += double{__bfloat162float(p.d_y[r * p.m + m])} * double{__bfloat162float(p.x[r * p.n + column])};
      }
    } else {
      std::int64_t e = 0;
      while (e < p.num_experts && row >= p.offsets[e + 1]) ++e;
      if (e == p.num_experts) {
        sum = NAN;
      } else if (p.kind == Kind::kForward) {
        const __nv_bfloat16 *x = p.x + row * p.n, *w = p.w + (e * p.m + column) * p.n;
        for (int k = lane; k < p.n; k += 32) sum += double{__bfloat162float(x[k])} * double{__bfloat162float(w[k])};
      } else {
        const __nv_bfloat16 *d_y = p.d_y + row * p.m, *w = p.w + e * p.m * std::int64_t{p.n} + column;
        for (std::int64_t k = lane; k < p.m; k += 32) {
          sum += double{__bfloat162float(d_y[k])} * double{__bfloat162float(w[k * p.n])};
        }
      }
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) out[i] = sum;
  }
}

struct Difference {
  double squares = 0, reference_squares = 0;
  unsigned long long count = 0, written_outside = 0, outliers = 0;
};

/// Compares with the reference plus `base`, which the output held before (null: nothing). Rows of no expert must still
/// hold `poison`. An outlier is further off than the rounding of one number allows: relative · |ref| + absolute.
template <typename T>
__global__ void compare(const T* out, const float* base, const double* expected, std::int64_t count,
                        std::int64_t samples, double relative, double absolute, Difference* difference) {
  const std::int64_t total = samples ? samples : count;
  Difference mine;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t at = samples ? static_cast<std::int64_t>(mix(i) % count) : i;
    if (isnan(expected[i])) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(out + at);
      for (int b = 0; b < static_cast<int>(sizeof(T)); ++b) mine.written_outside += bytes[b] != 0xff;
      continue;
    }
    const double ref = expected[i] + (base ? base[at] : 0), got = static_cast<float>(out[at]);
    mine.squares += (got - ref) * (got - ref);
    mine.reference_squares += ref * ref;
    mine.outliers += !(fabs(got - ref) <= relative * fabs(ref) + absolute);
    ++mine.count;
  }
  atomicAdd(&difference->squares, mine.squares);
  atomicAdd(&difference->reference_squares, mine.reference_squares);
  atomicAdd(&difference->count, mine.count);
  atomicAdd(&difference->written_outside, mine.written_outside);
  atomicAdd(&difference->outliers, mine.outliers);
}

}  // namespace lab
