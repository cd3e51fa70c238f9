// GEMMs by cuBLASLt. It stores matrices by columns, so it computes the transpose c_MNᵀ = op(b)ᵀ · op(a)ᵀ. The operands
// of that product are the same memory. The products of a few rows, as in decoding, have kernels here.
#include <bit>

#include "ops/gemm/few_rows.cuh"
#include "ops/gemm/gemm.h"
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

/// Holds one or two products. The second one's blocks follow those of the first.
template <typename T, typename Out>
struct FewRowsPair {
  FewRows<T, Out> of[2];
  unsigned first_blocks;
};

template <typename T, typename Out, int kRows>
__global__ void __launch_bounds__(kDotsThreads, kDotsBlocks)
    few_rows_transposed_kernel(const FewRowsPair<T, Out> products) {
  const bool is_second = blockIdx.x >= products.first_blocks;
  few_rows_transposed<kRows>(products.of[is_second], blockIdx.x - (is_second ? products.first_blocks : 0), blockIdx.y);
}

template <typename T, typename Out, int kRows>
__global__ void __launch_bounds__(kUntransposedThreads) few_rows_untransposed_kernel(const FewRows<T, Out> product) {
  few_rows_untransposed<kRows>(product, blockIdx.x, blockIdx.y);
}

/// Computes the products with these kernels, and returns true. Returns false if they do not take the operands.
bool few_rows_gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                   const Tensor& c, Write write, const GemmBatch& batch) {
  const bool fits = !transpose_a && is_few_rows(a, b, transpose_b, c, batch);
  if (!fits || op.measuring()) return fits;
  const unsigned num_blocks = transpose_b ? transposed_blocks(c.dim(1)) : untransposed_blocks(c.dim(1));
  const dim3 grid(num_blocks, static_cast<unsigned>(batch.count));
  for_float_type(a.dtype(), [&]<typename T>(T) {
    for_float_type(c.dtype(), [&]<typename Out>(Out) {
      if constexpr (sizeof(Out) < sizeof(T)) return;  // no such product: see gemm.h
      const FewRows<T, Out> product(a, b, c, write, batch);
      for_few_rows(c.dim(0), [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        if (transpose_b) {
          launch_early(op, few_rows_transposed_kernel<T, Out, kRows>, grid, kDotsThreads, 0,
                       FewRowsPair<T, Out>{{product, product}, num_blocks});
        } else {
          launch_early(op, few_rows_untransposed_kernel<T, Out, kRows>, grid, kUntransposedThreads, 0, product);
        }
      });
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
  // The parts lie side by side along the contraction. So one product that is three times as long also adds them up.
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

void linear_pair_forward(const Context& op, const Tensor& x_TN, const std::array<Tensor, 2>& weights,
                         const std::array<Tensor, 2>& outputs) {
  const auto fits = [&](int i) { return is_few_rows(x_TN, weights[i], /*transpose_b=*/true, outputs[i], {}); };
  if (!fits(0) || !fits(1)) {
    for (int i = 0; i < 2; ++i) linear_forward(op, x_TN, weights[i], outputs[i]);
    return;
  }
  if (op.measuring()) return;
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    const auto product = [&](int i) { return FewRows<T, T>(x_TN, weights[i], outputs[i], Write::kAssign, {}); };
    const unsigned first_blocks = transposed_blocks(weights[0].dim(0));
    for_few_rows(x_TN.dim(0), [&](auto rows) {
      launch_early(op, few_rows_transposed_kernel<T, T, decltype(rows)::value>,
                   first_blocks + transposed_blocks(weights[1].dim(0)), kDotsThreads, 0,
                   FewRowsPair<T, T>{{product(0), product(1)}, first_blocks});
    });
  });
}

}  // namespace tessera::cuda
