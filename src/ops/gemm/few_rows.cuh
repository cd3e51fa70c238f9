// Products of matrices of a few rows, as in decoding, for kernels. They read the weights b faster than a library's.
#pragma once

#include "ops/kit/dots.cuh"
#include "ops/runtime/gemm_key.h"

namespace tessera::cuda {

/// Describes c [m, n] = a · b or a · bᵀ of contraction k, for each product of a batch.
template <typename T, typename Out>
struct FewRows {
  const T *a, *b;
  Out* c;
  std::int64_t m, n, k, stride_a, stride_b, stride_c;
  bool accumulates;
  GemmBatch batch;

  /// The tensors are those of the first product.
  FewRows(const Tensor& of_a, const Tensor& of_b, const Tensor& of_c, Write write, const GemmBatch& products)
      : a(numbers<const T>(of_a)),
        b(numbers<const T>(of_b)),
        c(numbers<Out>(of_c)),
        m(of_c.dim(0)),
        n(of_c.dim(1)),
        k(of_a.dim(1)),
        stride_a(of_a.stride()),
        stride_b(of_b.stride()),
        stride_c(of_c.stride()),
        accumulates(write == Write::kAccumulate),
        batch(products) {}

  __device__ const T* row_of_a(unsigned index, std::int64_t r) const {
    return a + index * batch.step_a + min(r, m - 1) * stride_a;  // rows that do not exist repeat the last
  }
  __device__ const T* row_of_b(unsigned index, std::int64_t i) const { return b + index * batch.step_b + i * stride_b; }
  __device__ Out& at(unsigned index, std::int64_t row, std::int64_t column) const {
    return c[index * batch.step_c + row * stride_c + column];
  }
};

/// Returns true if the functions below take the operands. A single product with a b that is not transposed is left to
/// the library: its blocks would be too few to fill a GPU.
inline bool is_few_rows(const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c, const GemmBatch& batch) {
  const auto step_fits = [](const Tensor& x, std::int64_t step) {
    return step * static_cast<std::int64_t>(size_of(x.dtype())) % 16 == 0;
  };
  return c.dim(0) <= kFewRows && in_lanes(b) && step_fits(b, batch.step_b) &&
         (transpose_b ? in_lanes(a) && step_fits(a, batch.step_a) : batch.count > 1);
}

/// Calls body(kRows) with the kRows of the functions below for `rows` rows.
template <typename Body>
void for_few_rows(std::int64_t rows, Body&& body) {
  if (rows == 1) return body(std::integral_constant<int, 1>{});
  if (rows <= 4) return body(std::integral_constant<int, 4>{});
  body(std::integral_constant<int, kFewRows>{});
}

inline constexpr int kTransposedColumns = 2;  // per warp

/// Returns the number of blocks that compute a product of a transposed b with n columns.
inline unsigned transposed_blocks(std::int64_t n) {
  return dots_blocks((n + kTransposedColumns - 1) / kTransposedColumns);
}

/// Computes a · bᵀ: block x of product `index` has kDotsWarps · kTransposedColumns columns. m is at most kRows.
template <int kRows, typename T, typename Out>
__device__ void few_rows_transposed(const FewRows<T, Out>& product, unsigned x, unsigned index) {
  const std::int64_t first = (std::int64_t{x} * kDotsWarps + threadIdx.x / kWarp) * kTransposedColumns;
  if (first >= product.n) return;
  const T *columns[kTransposedColumns], *rows[kRows];
#pragma unroll
  for (int c = 0; c < kTransposedColumns; ++c) columns[c] = product.row_of_b(index, min(first + c, product.n - 1));
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = product.row_of_a(index, r);
  let_next_kernel_begin();
  DotsOfWarp<T, kTransposedColumns, (kRows == 1 ? 16 : 8) / sizeof(T)> dots(columns, product.k);
  wait_for_kernel_before();
  float sums[kTransposedColumns][kRows];
  dots.with(rows, sums);
#pragma unroll
  for (int c = 0; c < kTransposedColumns; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (threadIdx.x % kWarp != c * kRows + r || r >= product.m || first + c >= product.n) continue;
      Out& target = product.at(index, r, first + c);
      target = from_float<Out>(product.accumulates ? to_float(target) + sums[c][r] : sums[c][r]);
    }
  }
}

inline constexpr int kUntransposedWarps = 8, kUntransposedThreads = kUntransposedWarps * kWarp,
                     kUntransposedColumns = kWarp * kLanes;

/// Returns the number of blocks that compute a product of an untransposed b with n columns.
inline unsigned untransposed_blocks(std::int64_t n) {
  return static_cast<unsigned>((n + kUntransposedColumns - 1) / kUntransposedColumns);
}

/// Computes a · b: block x of product `index` has kUntransposedColumns columns. The block's warps take rows of b in
/// turn, and each lane has kLanes columns. m is at most kRows. Blocks have kUntransposedThreads threads.
template <int kRows, typename T, typename Out>
__device__ void few_rows_untransposed(const FewRows<T, Out>& product, unsigned x, unsigned index) {
  constexpr int kAhead = 32 / sizeof(T);  // rows of b that are loaded before the first is used
  __shared__ float parts[kUntransposedWarps][kUntransposedColumns];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t first_column = std::int64_t{x} * kUntransposedColumns, column = first_column + lane * kLanes;
  PackedLanes<T> weights[kAhead];
  const auto load = [&](std::int64_t first) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t i = first + step * kUntransposedWarps;
      weights[step].load(product.row_of_b(index, i) + column, i < product.k && column < product.n);
    }
  };
  let_next_kernel_begin();
  load(warp);
  wait_for_kernel_before();
  float sums[kRows][kLanes] = {};
  for (std::int64_t first = warp; first < product.k; first += kAhead * kUntransposedWarps) {
    if (first > warp) load(first);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t i = first + step * kUntransposedWarps;
      if (i >= product.k) continue;
      float of_row[kLanes];
      weights[step].unpack(of_row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float number = to_float(product.row_of_a(index, r)[i]);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) sums[r][l] += number * of_row[l];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= product.m) continue;
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kLanes; ++l) parts[warp][lane * kLanes + l] = sums[r][l];
    __syncthreads();
    for (int i = threadIdx.x; i < kUntransposedColumns && first_column + i < product.n; i += kUntransposedThreads) {
      float sum = 0.0f;
      for (int w = 0; w < kUntransposedWarps; ++w) sum += parts[w][i];
      Out& target = product.at(index, r, first_column + i);
      target = from_float<Out>(product.accumulates ? to_float(target) + sum : sum);
    }
  }
}

}  // namespace tessera::cuda
