// cuBLASLt. It stores matrices by columns, so it is asked for the transpose: c_MNᵀ = op(b)ᵀ · op(a)ᵀ, whose operands
// are the same memory.
#include <bit>

#include "ops/cuda/libraries.h"
#include "ops/gemm.h"

namespace tessera::cuda {
namespace {

/// The largest power of two that the address is a multiple of, as far as the library's kernels tell them apart. The
/// same for a tensor that is being measured: arenas start where every alignment does.
unsigned alignment_of(const Tensor& x) {
  constexpr std::uintptr_t kWidestAccess = 16;
  return static_cast<unsigned>(std::uintptr_t{1}
                               << std::countr_zero(reinterpret_cast<std::uintptr_t>(x.raw()) | kWidestAccess));
}

}  // namespace

void gemm(const Context& op, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  const ArenaScope scope(*op.arena);
  std::byte* workspace = op.arena->allocate_bytes(kBlasWorkspace);
  if (op.cuda == nullptr) return;  // measured where there is no GPU
  GemmKey key(a, transpose_a, b, transpose_b, c, write);
  key.alignment_a = alignment_of(a);
  key.alignment_b = alignment_of(b);
  key.alignment_c = alignment_of(c);
  const BlasPlan& plan = op.cuda->libraries().plan_for(key);
  if (op.measuring()) return;
  const float alpha = 1.0f, beta = key.accumulate ? 1.0f : 0.0f;
  TESSERA_BLAS(cublasLtMatmul, op.cuda->libraries().blas(), plan.operation, &alpha, b.raw(), plan.b, a.raw(), plan.a,
               &beta, c.raw(), plan.c, c.raw(), plan.c, &plan.algorithm, workspace, kBlasWorkspace,
               op.cuda->stream().handle());
}

}  // namespace tessera::cuda
