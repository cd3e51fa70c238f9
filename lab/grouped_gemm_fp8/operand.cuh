// Operands of 8-bit products for the harness: e4m3 with scales.
#pragma once

#include <cstdint>

#include "../products.cuh"
#include "mx/block.h"

namespace lab {

namespace mx = tessera::mx;

/// Rows of quantized numbers, with k contiguous, as in mx::Quantized. A stack of matrices follows matrix after matrix.
struct Matrix {
  std::uint8_t* bytes = nullptr;
  void* scales = nullptr;
  std::int64_t rows = 0;
  int k = 0;
  int matrix_rows = 0;  // rows of one matrix of the stack
  bool is_float = false;
  int along = 128, across = 1;  // how many numbers share a scale

  __host__ __device__ int scales_per_row() const { return (k + scale_width() - 1) / scale_width(); }
  __host__ __device__ int scale_width() const { return is_float ? along : mx::kBlock; }
  __host__ __device__ int scale_height() const { return is_float ? across : 1; }
  __host__ __device__ std::int64_t scale_rows() const {
    return rows / matrix_rows * ((matrix_rows + scale_height() - 1) / scale_height());
  }
  __device__ std::int64_t scale_row(std::int64_t row) const {
    const std::int64_t matrix = row / matrix_rows;
    return matrix * ((matrix_rows + scale_height() - 1) / scale_height()) + row % matrix_rows / scale_height();
  }
  __device__ double value(std::int64_t matrix, std::int64_t row_of_matrix, std::int64_t i) const {
    return value(matrix * matrix_rows + row_of_matrix, i);
  }
  __device__ double value(std::int64_t row, std::int64_t i) const {
    const std::int64_t at = scale_row(row) * scales_per_row() + i / scale_width();
    const float scale = is_float ? static_cast<const float*>(scales)[at]
                                 : mx::value_of_scale(static_cast<const std::uint8_t*>(scales)[at]);
    return double{mx::value_of<mx::E4M3>(bytes[row * k + i])} * double{scale};
  }
};

/// Fills with normal numbers as e4m3. One in `small` of them is among the subnormal ones (0: none).
static __global__ void fill_elements(Matrix x, std::uint64_t seed, int small) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < x.rows * x.k;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t bits = mix(mix(seed) + i);
    const float size = small != 0 && mix(bits) % small == 0 ? 0.01f : 150.0f;
    x.bytes[i] = mx::cast_to<mx::E4M3>(almost_normal(bits) * size);
  }
}

/// Writes one scale for each block of along × across, around 2^-8. It is stored as often as the format requires.
static __global__ void fill_scales(Matrix x, std::uint64_t seed) {
  const std::int64_t count = x.scale_rows() * x.scales_per_row();
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t stored = i / x.scales_per_row(), per_matrix = x.scale_rows() / (x.rows / x.matrix_rows);
    const std::int64_t row = stored / per_matrix * x.matrix_rows + stored % per_matrix * x.scale_height() / x.across;
    const std::int64_t column = i % x.scales_per_row() * x.scale_width() / x.along;
    const std::uint64_t bits = mix(mix(seed + row * 0x10001) + column);
    if (x.is_float) {
      static_cast<float*>(x.scales)[i] = (1 + (bits & 0xff) / 256.0f) / (128 << (bits >> 8) % 3);
    } else {
      static_cast<std::uint8_t*>(x.scales)[i] = 118 + bits % 4;
    }
  }
}

/// Writes the numbers of x to `wide` [rows, k up to a multiple of 64], in the order of ops/gemm/sm90/sm90_widen.cuh.
static __global__ void widen(Matrix x, __nv_bfloat16* wide) {
  const std::int64_t length = (x.k + 63) / 64 * 64;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < x.rows * length;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t row = i / length, k = i % length;
    const int t = k / 16 % 4, j = k / 4 % 4, pair = k / 2 % 2;
    const std::int64_t place = k / 64 * 64 + 16 * j + 8 * pair + 2 * t + k % 2;
    wide[row * length + place] = __double2bfloat16(k < x.k ? x.value(row, k) : 0.0);
  }
}

/// Writes NaN, to scales too, in rows or in columns of k, from `first` on.
static __global__ void poison_after(Matrix x, bool columns, std::int64_t first) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t start = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  for (std::int64_t i = start; i < x.rows * x.k; i += stride) {
    if ((columns ? i % x.k : i / x.k) >= first) x.bytes[i] = 0x7f;
  }
  for (std::int64_t i = start; i < x.scale_rows() * x.scales_per_row(); i += stride) {
    const std::int64_t at = columns ? i % x.scales_per_row() * x.scale_width() : i / x.scales_per_row();
    if (at < first) continue;
    if (x.is_float) {
      static_cast<std::uint32_t*>(x.scales)[i] = 0x7fc00000;
    } else {
      static_cast<std::uint8_t*>(x.scales)[i] = 0xff;
    }
  }
}

}  // namespace lab
