// A batch of GEMMs, and the key under which a GEMM library's kernel is stored. The key holds everything that the choice
// of the kernel depends on.
#pragma once

#include <cstdint>

#include "base/hash.h"
#include "tensor/tensor.h"

namespace tessera {

/// Describes `count` products of one shape. The operands of product i begin i · step numbers behind those of the first.
struct GemmBatch {
  std::int64_t count = 1, step_a = 0, step_b = 0, step_c = 0;
  bool operator==(const GemmBatch&) const = default;
};

struct GemmKey {
  GemmKey(const Tensor& a, bool transpose_a_, const Tensor& b, bool transpose_b_, const Tensor& c, Write write)
      : m(c.dim(0)),
        n(c.dim(1)),
        k(a.dim(transpose_a_ ? 0 : 1)),
        stride_a(a.stride()),
        stride_b(b.stride()),
        stride_c(c.stride()),
        transpose_a(transpose_a_),
        transpose_b(transpose_b_),
        accumulate(write == Write::kAccumulate),
        dtype(a.dtype()),
        dtype_c(c.dtype()) {}

  std::int64_t m, n, k, stride_a, stride_b, stride_c;
  GemmBatch batch;
  bool transpose_a, transpose_b, accumulate;
  DType dtype, dtype_c;
  /// These are powers of two that divide the operands' addresses, in bytes. blas_gemm (ops/runtime/blas_gemm.h) sets
  /// them.
  unsigned alignment_a = 0, alignment_b = 0, alignment_c = 0;
  bool operator==(const GemmKey&) const = default;
};

struct GemmKeyHash {
  std::size_t operator()(const GemmKey& key) const {
    return hash_of(
        {key.m, key.n, key.k, key.stride_a, key.stride_b, key.stride_c, key.batch.count, key.batch.step_a,
         key.batch.step_b, key.batch.step_c,
         std::int64_t{key.transpose_a} * 8 + std::int64_t{key.transpose_b} * 4 + std::int64_t{key.accumulate} * 2,
         static_cast<std::int64_t>(key.dtype) * 4 + static_cast<std::int64_t>(key.dtype_c),
         (std::int64_t{key.alignment_a} << 32) + (std::int64_t{key.alignment_b} << 16) + key.alignment_c});
  }
};

}  // namespace tessera
