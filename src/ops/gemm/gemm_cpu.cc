#include "ops/cpu/gemm.h"
#include "ops/gemm/gemm.h"

namespace tessera::cpu {
namespace {

/// The largest size of a part. Its packed operands fit into the L2 cache.
constexpr std::int64_t kRows = 256, kColumns = 128;
/// A transposed left operand costs more to pack. So wider parts share it, if there are enough of them.
constexpr std::int64_t kWideColumns = 2 * kColumns;
/// With fewer parts, threads would wait for the last ones. So a small product is cut into smaller parts, but not below
/// these sizes: each part packs its operands anew.
constexpr std::int64_t kEnoughParts = 12, kLeastRows = 128, kLeastColumns = 64;
/// Parts are a multiple of this many columns wide, so that they have whole panels (ops/cpu/block_gemm.inc).
constexpr std::int64_t kColumnStep = 32;

std::int64_t num_parts(std::int64_t size, std::int64_t most) { return (size + most - 1) / most; }

}  // namespace

GemmParts::GemmParts(std::int64_t m, std::int64_t n, bool transpose_a, std::int64_t num_products) {
  num_row_parts = std::max<std::int64_t>(num_parts(m, kRows), 1);
  const bool wide = transpose_a && num_products * num_row_parts * num_parts(n, kWideColumns) >= kEnoughParts;
  num_column_parts = num_parts(n, wide ? kWideColumns : kColumns);
  const auto too_few = [&] { return num_products * count() < kEnoughParts; };
  while (too_few() && m >= (num_row_parts + 1) * kLeastRows) ++num_row_parts;
  while (too_few() && n >= (num_column_parts + 1) * kLeastColumns) ++num_column_parts;
  // All parts have about the same size.
  rows = num_parts(m, num_row_parts);
  columns = std::min(n, num_parts(num_parts(n, num_column_parts), kColumnStep) * kColumnStep);
  num_column_parts = num_parts(n, columns);  // Wider ones may be fewer.
}

Gemm largest_part(Gemm product, const GemmParts& parts) {
  product.m = parts.rows;
  product.n = parts.columns;
  return product;
}

Gemm part_of(Gemm product, const GemmParts& parts, std::int64_t idx) {
  const std::int64_t row = idx / parts.num_column_parts * parts.rows;
  const std::int64_t column = idx % parts.num_column_parts * parts.columns;
  product.a = advance(product.a, product.element_a, product.transpose_a ? row : row * product.stride_a);
  product.b = advance(product.b, product.element_b, product.transpose_b ? column * product.stride_b : column);
  product.c = const_cast<void*>(advance(product.c, product.element_c, row * product.stride_c + column));
  product.m = std::min(parts.rows, product.m - row);
  product.n = std::min(parts.columns, product.n - column);
  return product;
}

void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  const Gemm product{.m = c.dim(0),
                     .n = c.dim(1),
                     .k = a.dim(transpose_a ? 0 : 1),
                     .a = a.raw(),
                     .b = b.raw(),
                     .c = c.raw(),
                     .stride_a = a.stride(),
                     .stride_b = b.stride(),
                     .stride_c = c.stride(),
                     .transpose_a = transpose_a,
                     .transpose_b = transpose_b,
                     .accumulate = write == Write::kAccumulate,
                     .element_a = element_of(a.dtype()),
                     .element_b = element_of(b.dtype()),
                     .element_c = element_of(c.dtype())};
  const GemmParts parts(product.m, product.n, transpose_a, 1);
  const ThreadScratch scratch(context, kernels().gemm_scratch(largest_part(product, parts)));
  if (context.measuring()) return;
  parallel_for(parts.count(), [&](std::int64_t idx) { kernels().gemm(part_of(product, parts, idx), scratch.mine()); });
}

}  // namespace tessera::cpu
