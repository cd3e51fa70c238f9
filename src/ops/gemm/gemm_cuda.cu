// GEMMs by cuBLASLt. It stores matrices by columns, so it computes the transpose c_MNᵀ = op(b)ᵀ · op(a)ᵀ. The operands
// of that product are the same memory. The products of a few rows, as in decoding, have kernels here.
#include <bit>

#include "ops/gemm/gemm.h"
#include "ops/kit/dots.cuh"
#include "ops/kit/launch.cuh"
#include "ops/runtime/blas_gemm.h"
#include "ops/runtime/libraries.h"

namespace tessera::cuda {
namespace {

/// Returns the largest power of two that divides the addresses of all matrices of a batch, which lie `step` numbers
/// apart, up to the largest one that the library's kernels distinguish. A tensor that is being measured has the same
/// alignment, because arenas start at a multiple of all of them.
unsigned alignment_of(const Tensor& x, std::int64_t step) {
  constexpr std::uintptr_t kWidestAccess = 16;
  const std::uintptr_t step_bytes = static_cast<std::uintptr_t>(step) * size_of(x.dtype());
  return static_cast<unsigned>(
      std::uintptr_t{1} << std::countr_zero(reinterpret_cast<std::uintptr_t>(x.raw()) | step_bytes | kWidestAccess));
}

constexpr int kThreads = 256;

// A float32 operand is multiplied by a bfloat16 one on the tensor cores as follows. It is split into three bfloat16
// numbers that add up to it, with 8 bits each. Their products are exact.
constexpr int kParts = 3;

/// Splits x [R, C] into parts [R, kParts · C]. A row has its first parts, then its second ones, then its third ones.
__global__ void split_kernel(const float* x, std::int64_t num_rows, std::int64_t num_columns, std::int64_t stride,
                             __nv_bfloat16* parts) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_rows * num_columns;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / num_columns, column = i % num_columns;
    float left = x[row * stride + column];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const __nv_bfloat16 number = __float2bfloat16_rn(left);
      parts[(row * kParts + part) * num_columns + column] = number;
      left -= __bfloat162float(number);
    }
  }
}

/// Copies x kParts times, either by rows (one copy below the other) or by columns (side by side).
__global__ void repeat_kernel(const __nv_bfloat16* x, std::int64_t num_rows, std::int64_t num_columns,
                              std::int64_t stride, bool by_rows, __nv_bfloat16* copies) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_rows * num_columns;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / num_columns, column = i % num_columns;
    const __nv_bfloat16 number = x[row * stride + column];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      copies[by_rows ? (part * num_rows + row) * num_columns + column : (row * kParts + part) * num_columns + column] =
          number;
    }
  }
}

/// Assigns or adds to c [M, N] the sum of the parts [kParts · M, N].
template <typename T>
__global__ void sum_parts_kernel(const float* parts, std::int64_t m, std::int64_t n, std::int64_t stride,
                                 bool accumulates, T* c) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < m * n;
       i += std::int64_t{gridDim.x} * kThreads) {
    T& target = c[i / n * stride + i % n];
    float sum = accumulates ? to_float(target) : 0.0f;
#pragma unroll
    for (int part = kParts - 1; part >= 0; --part) sum += parts[part * m * n + i];
    target = from_float<T>(sum);
  }
}

/// Describes c [m, n] = a · b or a · bᵀ of contraction k, for products of a batch along y of the grid.
template <typename T, typename Out>
struct FewRows {
  const T *a, *b;
  Out* c;
  std::int64_t m, n, k, stride_a, stride_b, stride_c;
  bool accumulates;
  GemmBatch batch;

  __device__ const T* row_of_a(std::int64_t r) const {
    return a + blockIdx.y * batch.step_a + min(r, m - 1) * stride_a;  // rows that do not exist repeat the last
  }
  __device__ const T* row_of_b(std::int64_t i) const { return b + blockIdx.y * batch.step_b + i * stride_b; }
  __device__ Out& at(std::int64_t row, std::int64_t column) const {
    return c[blockIdx.y * batch.step_c + row * stride_c + column];
  }
};

/// Computes a · bᵀ, a column per warp. m is at most kRows.
template <typename T, typename Out, int kRows>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks) few_rows_transposed_kernel(const FewRows<T, Out> product) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kDotsWarps + threadIdx.x / kWarp;
  if (column >= product.n) return;
  const T* const of_column[1] = {product.row_of_b(column)};
  const T* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = product.row_of_a(r);
  let_next_kernel_begin();
  DotsOfWarp<T, 1> dots(of_column, product.k);
  wait_for_kernel_before();
  float sums[1][kRows];
  dots.with(rows, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (threadIdx.x % kWarp != r || r >= product.m) continue;
    Out& target = product.at(r, column);
    target = from_float<Out>(product.accumulates ? to_float(target) + sums[0][r] : sums[0][r]);
  }
}

constexpr int kPlainWarps = 8, kPlainColumns = kWarp * kLanes;

/// Computes a · b, kPlainColumns columns per block. The block's warps take rows of b in turn, and each lane has kLanes
/// columns. m is at most kRows.
template <typename T, typename Out, int kRows>
__global__ void __launch_bounds__(kPlainWarps* kWarp) few_rows_plain_kernel(const FewRows<T, Out> product) {
  constexpr int kAhead = 16 / sizeof(T);  // rows of b that are loaded before the first is used
  __shared__ float parts[kPlainWarps][kPlainColumns];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t first_column = std::int64_t{blockIdx.x} * kPlainColumns, column = first_column + lane * kLanes;
  PackedLanes<T> weights[kAhead];
  const auto load = [&](std::int64_t first) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t i = first + step * kPlainWarps;
      weights[step].load(product.row_of_b(i) + column, i < product.k && column < product.n);
    }
  };
  let_next_kernel_begin();
  load(warp);
  wait_for_kernel_before();
  float sums[kRows][kLanes] = {};
  for (std::int64_t first = warp; first < product.k; first += kAhead * kPlainWarps) {
    if (first > warp) load(first);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t i = first + step * kPlainWarps;
      if (i >= product.k) continue;
      float of_row[kLanes];
      weights[step].unpack(of_row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float x = to_float(product.row_of_a(r)[i]);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) sums[r][l] += x * of_row[l];
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
    for (int i = threadIdx.x; i < kPlainColumns && first_column + i < product.n; i += kPlainWarps * kWarp) {
      float sum = 0.0f;
      for (int w = 0; w < kPlainWarps; ++w) sum += parts[w][i];
      Out& target = product.at(r, first_column + i);
      target = from_float<Out>(product.accumulates ? to_float(target) + sum : sum);
    }
  }
}

/// Computes the products with these kernels, which read b faster than the library's, and returns true. Returns false if
/// they do not take the operands. One product of a plain b has too few blocks for them.
bool few_rows_gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                   const Tensor& c, Write write, const GemmBatch& batch) {
  const auto step_fits = [](const Tensor& x, std::int64_t step) {
    return step * static_cast<std::int64_t>(size_of(x.dtype())) % 16 == 0;
  };
  const std::int64_t m = c.dim(0), n = c.dim(1);
  const bool fits = m <= kFewRows && !transpose_a && in_lanes(b) && step_fits(b, batch.step_b) &&
                    (transpose_b ? in_lanes(a) && step_fits(a, batch.step_a) : batch.count > 1);
  if (!fits || op.measuring()) return fits;
  const unsigned num_blocks =
      transpose_b ? dots_blocks(n) : static_cast<unsigned>((n + kPlainColumns - 1) / kPlainColumns);
  const dim3 grid(num_blocks, static_cast<unsigned>(batch.count));
  for_float_type(a.dtype(), [&]<typename T>(T) {
    for_float_type(c.dtype(), [&]<typename Out>(Out) {
      if constexpr (sizeof(Out) < sizeof(T)) return;  // no such product: see gemm.h
      const FewRows<T, Out> product{.a = numbers<const T>(a),
                                    .b = numbers<const T>(b),
                                    .c = numbers<Out>(c),
                                    .m = m,
                                    .n = n,
                                    .k = a.dim(1),
                                    .stride_a = a.stride(),
                                    .stride_b = b.stride(),
                                    .stride_c = c.stride(),
                                    .accumulates = write == Write::kAccumulate,
                                    .batch = batch};
      const auto launch = [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        if (transpose_b) {
          launch_early(op, few_rows_transposed_kernel<T, Out, kRows>, grid, kDotsThreads, 0, product);
        } else {
          launch_early(op, few_rows_plain_kernel<T, Out, kRows>, grid, kPlainWarps * kWarp, 0, product);
        }
      };
      if (m == 1) {
        launch(std::integral_constant<int, 1>{});
      } else if (m <= 4) {
        launch(std::integral_constant<int, 4>{});
      } else {
        launch(std::integral_constant<int, kFewRows>{});
      }
    });
  });
  return true;
}

/// Multiplies a float32 a by a bfloat16 b.
void gemm_in_parts(Context op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
                   Write write) {
  op.weights_are_constant = false;  // the products' operands are copies that are made here
  const ArenaScope scope(*op.arena);
  const Tensor parts = op.arena->allocate({a.dim(0), kParts * a.dim(1)}, DType::kBFloat16);
  if (!op.measuring()) {
    split_kernel<<<grid_for(op, a.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
        numbers<const float>(a), a.dim(0), a.dim(1), a.stride(), numbers<__nv_bfloat16>(parts));
  }
  // One contraction is three times as long.
  if (!transpose_a) {
    const Tensor copies = op.arena->allocate(
        transpose_b ? Shape{b.dim(0), kParts * b.dim(1)} : Shape{kParts * b.dim(0), b.dim(1)}, DType::kBFloat16);
    if (!op.measuring()) {
      repeat_kernel<<<grid_for(op, b.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const __nv_bfloat16>(b), b.dim(0), b.dim(1), b.stride(), !transpose_b,
          numbers<__nv_bfloat16>(copies));
    }
    return tessera::gemm(op, parts, false, copies, transpose_b, c, write);
  }
  const std::int64_t m = c.dim(0), n = c.dim(1);
  const Tensor products = op.arena->allocate({kParts * m, n}, DType::kFloat32);
  tessera::gemm(op, parts, true, b, transpose_b, products, Write::kAssign);
  if (op.measuring()) return;
  for_float_type(c.dtype(), [&]<typename T>(T) {
    sum_parts_kernel<T><<<grid_for(op, m * n, kThreads), kThreads, 0, stream_of(op)>>>(
        numbers<const float>(products), m, n, c.stride(), write == Write::kAccumulate, numbers<T>(c));
  });
}

}  // namespace

void blas_gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
               Write write, const BlasScales& scales, const GemmBatch& batch) {
  const ArenaScope scope(*op.arena);
  std::byte* workspace = op.arena->allocate_bytes(kBlasWorkspace);
  // On a machine without a GPU, only the workspace is measured.
  if (op.cuda == nullptr) return;
  GemmKey key(a, transpose_a, b, transpose_b, c, write);
  key.batch = batch;
  key.alignment_a = alignment_of(a, batch.step_a);
  key.alignment_b = alignment_of(b, batch.step_b);
  key.alignment_c = alignment_of(c, batch.step_c);
  const BlasPlan& plan = op.cuda->libraries().plan_for(key, scales);
  if (op.measuring()) return;
  const float alpha = 1.0f, beta = key.accumulate ? 1.0f : 0.0f;
  TESSERA_BLAS(cublasLtMatmul, op.cuda->libraries().blas(), plan.operation, &alpha, b.raw(), plan.b, a.raw(), plan.a,
               &beta, c.raw(), plan.c, c.raw(), plan.c, &plan.algorithm, workspace, kBlasWorkspace,
               op.cuda->stream().handle());
}

void gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  if (a.dtype() != b.dtype()) return gemm_in_parts(op, a, transpose_a, b, transpose_b, c, write);
  if (few_rows_gemm(op, a, transpose_a, b, transpose_b, c, write, {})) return;
  blas_gemm(op, a, transpose_a, b, transpose_b, c, write);
}

void batched_gemm(const Context& op, const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c,
                  const GemmBatch& batch) {
  if (few_rows_gemm(op, a, false, b, transpose_b, c, Write::kAssign, batch)) return;
  blas_gemm(op, a, false, b, transpose_b, c, Write::kAssign, {}, batch);
}

}  // namespace tessera::cuda
