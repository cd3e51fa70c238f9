// Matrix products cut into parts that threads take; for the operators that are made of them.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "ops/runtime/context.h"

namespace tessera::cpu {

/// Computes what gemm (ops/gemm/gemm.h) does, but c may be bfloat16 whatever a and b are.
void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write);

/// The sizes of a part of c. They follow from the product's size alone, so that results do not depend on the number of
/// threads.
struct GemmParts {
  std::int64_t rows, columns;
  std::int64_t num_row_parts, num_column_parts;

  GemmParts(std::int64_t m, std::int64_t n, bool transpose_a);
  std::int64_t count() const { return num_row_parts * num_column_parts; }
};

/// The largest part, for its scratch memory.
Gemm largest_part(Gemm product, const GemmParts& parts);

/// Part `idx` of [0, parts.count()).
Gemm part_of(Gemm product, const GemmParts& parts, std::int64_t idx);

/// The number that is `count` behind x.
inline const void* advance(const void* x, Element element, std::int64_t count) {
  return static_cast<const std::byte*>(x) + count * (element == Element::kFloat32 ? 4 : 2);
}

}  // namespace tessera::cpu
