// Matrix products that are cut into parts, one per task. Operators that consist of matrix products use them.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "ops/runtime/context.h"

namespace tessera::cpu {

/// Computes what gemm (ops/gemm/gemm.h) computes. But c may be bfloat16 for any types of a and b.
void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write);

/// Holds the sizes of the parts of c. They follow from the sizes of the products that are computed together, so results
/// do not depend on the number of threads.
struct GemmParts {
  std::int64_t rows, columns;
  std::int64_t num_row_parts, num_column_parts;

  /// There are `num_products` products of about this size.
  GemmParts(std::int64_t m, std::int64_t n, bool transpose_a, std::int64_t num_products);
  std::int64_t count() const { return num_row_parts * num_column_parts; }
};

/// Returns the largest part, whose scratch memory suffices for every part.
Gemm largest_part(Gemm product, const GemmParts& parts);

/// Returns part `idx`, which is in [0, parts.count()).
Gemm part_of(Gemm product, const GemmParts& parts, std::int64_t idx);

/// Returns the address of the number that is `count` numbers after x.
inline const void* advance(const void* x, Element element, std::int64_t count) {
  return static_cast<const std::byte*>(x) + count * (element == Element::kFloat32 ? 4 : 2);
}

}  // namespace tessera::cpu
