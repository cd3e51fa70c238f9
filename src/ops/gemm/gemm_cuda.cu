// GEMMs by cuBLASLt. It stores matrices by columns, so it computes the transpose c_MNᵀ = op(b)ᵀ · op(a)ᵀ. The operands
// of that product are the same memory.
#include <bit>

#include "ops/gemm/gemm.h"
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

/// Multiplies a float32 a by a bfloat16 b.
void gemm_in_parts(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                   const Tensor& c, Write write) {
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
  // The GEMM is measured on a machine without a GPU.
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
  blas_gemm(op, a, transpose_a, b, transpose_b, c, write);
}

void batched_gemm(const Context& op, const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c,
                  const GemmBatch& batch) {
  blas_gemm(op, a, false, b, transpose_b, c, Write::kAssign, {}, batch);
}

}  // namespace tessera::cuda
