// Inputs and float64 results of grouped products, for the programs that check them. One result is one warp's dot
// product.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "harness.cuh"

namespace lab {

// --- Shapes --------------------------------------------------------------------------------------------------------

struct Shape {
  int m, n, num_rows;  // num_rows is the allocated number of rows, at least that of the groups
  std::vector<int> groups;
  int experts() const { return static_cast<int>(groups.size()); }
  int longest() const { return *std::max_element(groups.begin(), groups.end()); }
  std::vector<std::int32_t> offsets() const {
    std::vector<std::int32_t> all{0};
    for (const int rows : groups) all.push_back(all.back() + rows);
    return all;
  }
  int used() const { return offsets().back(); }
};

/// Returns `total` units of rows in `experts` groups of random sizes.
inline std::vector<int> skewed(int total, int experts, int unit = 1) {
  std::exponential_distribution<double> distribution;
  std::vector<double> weights(experts);
  double sum = 0;
  for (double& w : weights) sum += w = distribution(random_bits);
  std::vector<int> groups(experts);
  int left = total;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(total * weights[e] / sum);
  for (; left > 0; --left) ++groups[random_bits() % experts];
  for (int& rows : groups) rows *= unit;
  return groups;
}

/// Returns groups of whole units, of equal sizes or of sizes that differ by up to 8 to 1. With units of 128 they are
/// those of bench/peers/grouped_mm.py.
inline std::vector<int> bench_groups(int rows, int experts, bool skew, int unit) {
  std::vector<int> groups(experts, rows / experts);
  if (!skew) return groups;
  const auto weight = [](int e) { return std::int64_t{1 + (5 * e + 3) % 8}; };
  std::int64_t sum = 0;
  for (int e = 0; e < experts; ++e) sum += weight(e);
  int left = rows;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(rows / unit * weight(e) / sum) * unit;
  groups.back() += left;
  return groups;
}

// --- Inputs --------------------------------------------------------------------------------------------------------

__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 31) * 0x7fb5d329728ea185u;
  x = (x ^ x >> 27) * 0x81dadef4bc2dd44du;
  return x ^ x >> 33;
}

/// Returns an almost normal number: the sum of 4 uniform ones.
__device__ inline float almost_normal(std::uint64_t bits) {
  float sum = 0;
  for (int j = 0; j < 4; ++j) sum += static_cast<float>(bits >> 16 * j & 0xffff) * 0x1p-16f - 0.5f;
  return sum * 1.7320508f;
}

template <typename T>
__global__ void fill_normal_kernel(T* out, std::int64_t count, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    out[i] = static_cast<T>(almost_normal(mix(mix(seed) + i)) * scale);
  }
}

template <typename T>
void fill_normal(const Buffer<T>& out, float scale) {
  fill_normal_kernel<<<1024, 256>>>(out.get(), out.count(), scale, random_bits());
  TESSERA_CUDA(cudaGetLastError());
}

// --- Results -------------------------------------------------------------------------------------------------------

/// Describes a product. Of rows: out[r, j] = Σ_k a[r, k] · b[expert of r][j, k]. wgrad: out[e, i, j] = Σ_r a[i, r] ·
/// b[j, r] over e's rows. Operands are objects with value(matrix, row, k).
struct Product {
  bool wgrad = false;
  int num_experts = 0;
  int rows = 0, columns = 0;  // wgrad: of one expert's output
  int k = 0;                  // not of wgrad
  const std::int32_t* offsets = nullptr;
};

/// A bfloat16 operand. Strides are in numbers.
struct Bf16Operand {
  const __nv_bfloat16* data = nullptr;
  std::int64_t matrix_stride = 0, row_stride = 0, k_stride = 1;
  __device__ double value(std::int64_t matrix, std::int64_t row, std::int64_t k) const {
    return double{__bfloat162float(data[matrix * matrix_stride + row * row_stride + k * k_stride])};
  }
};

/// Computes every output if `samples` is 0, otherwise that many: sample i is output mix(i) % count. Rows of no expert
/// give NaN.
template <typename A, typename B>
__global__ void reference(Product p, A a, B b, double* out, std::int64_t count, std::int64_t samples) {
  const std::int64_t total = samples ? samples : count;
  const int lane = threadIdx.x % 32;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x / 32} + threadIdx.x / 32; i < total;
       i += std::int64_t{gridDim.x} * (blockDim.x / 32)) {
    const std::int64_t at = samples ? static_cast<std::int64_t>(mix(i) % count) : i;
    const std::int64_t row = at / p.columns, column = at % p.columns;
    double sum = 0;
    if (p.wgrad) {
      const std::int64_t e = row / p.rows;
      for (std::int64_t r = p.offsets[e] + lane; r < p.offsets[e + 1]; r += 32) {
        sum += a.value(0, row % p.rows, r) * b.value(0, column, r);
      }
    } else {
      std::int64_t e = 0;
      while (e < p.num_experts && row >= p.offsets[e + 1]) ++e;
      if (e == p.num_experts) {
        sum = NAN;
      } else {
        for (int k = lane; k < p.k; k += 32) sum += a.value(0, row, k) * b.value(e, column, k);
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
/// be poisoned. An outlier is further off than the rounding of one number allows: relative · |ref| + absolute.
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

/// Says how far a result may be off. `error` limits its root mean square error, as a part of the reference's root mean
/// square. `outlier` limits the error of a single number beyond its rounding, as a part of a typical number.
struct Tolerance {
  double error, outlier;
};

/// Checks a product against float64 and prints a line, for samples only if it is wrong. Returns whether it is right.
template <typename A, typename B, typename T>
bool check_product(const std::string& what, const Product& product, const Shape& shape, const A& a, const B& b,
                   const Buffer<T>& out, const float* added, std::int64_t samples, const Tolerance& allowed) {
  finish_kernels();
  const Buffer<double> expected(samples ? samples : out.count());
  const Buffer<Difference> result(1);
  reference<<<4096, 256>>>(product, a, b, expected.get(), out.count(), samples);
  Difference d;
  double typical = 0;
  for (int pass = 0; pass < 2; ++pass) {  // the first pass finds the typical number
    TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Difference)));
    compare<<<512, 256>>>(out.get(), added, expected.get(), out.count(), samples, product.wgrad ? 1e-5 : 0x1p-8,
                          allowed.outlier * typical, result.get());
    d = result.on_host().front();
    // With wgrad, a typical number is one of the longest group.
    const double larger =
        product.wgrad ? static_cast<double>(shape.longest()) * shape.experts() / std::max(1, shape.used()) : 1;
    typical = std::sqrt(d.reference_squares / std::max(1.0, static_cast<double>(d.count)) * larger);
  }
  const double error = d.reference_squares > 0 ? std::sqrt(d.squares / d.reference_squares) : std::sqrt(d.squares);
  const bool right = error < allowed.error && d.outliers == 0 && d.written_outside == 0;
  const char* line = verdict(right);
  if (!right || !samples) {
    std::printf("%s%s %-26s m %5d n %5d rows %6d experts %3d: error %.2e outliers %llu outside %llu of %llu\n",
                samples ? "\n" : "", line, what.c_str(), shape.m, shape.n, shape.num_rows, shape.experts(), error,
                d.outliers, d.written_outside, d.count);
    std::fflush(stdout);
  }
  return right;
}

/// Checks that two runs give the same bits. `reset` restores what a run adds to.
template <typename T>
void check_same_bits(const std::string& what, const Buffer<T>& out, const std::function<void()>& reset,
                     const std::function<void()>& run) {
  std::vector<T> results[2];
  for (std::vector<T>& result : results) {
    reset();
    run();
    finish_kernels();
    result = out.on_host();
  }
  const bool same = std::equal(results[0].begin(), results[0].end(), results[1].begin(), [](const T& a, const T& b) {
    return std::equal(reinterpret_cast<const char*>(&a), reinterpret_cast<const char*>(&a + 1),
                      reinterpret_cast<const char*>(&b));
  });
  const char* line = verdict(same);
  if (!same) std::printf("%s %s differs between two runs\n", line, what.c_str());
}

}  // namespace lab
