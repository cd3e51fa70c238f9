#include "ops/cpu/gemm.h"
#include "ops/gemm/gemm.h"

namespace tessera::cpu {
namespace {

/// The largest size of a part. Its packed operands fit into the L2 cache.
constexpr std::int64_t kRows = 256, kColumns = 128;
/// A transposed left operand costs more to pack. So wider parts share it, if there are enough of them.
constexpr std::int64_t kWideColumns = 2 * kColumns;
/// With fewer parts, threads would wait for the last ones. So a small product is cut into smaller parts, but not below
/// these sizes: parts pack their left operands anew.
constexpr std::int64_t kEnoughParts = 12, kLeastRows = 128, kLeastColumns = 64;
/// The columns that one task packs for all parts.
constexpr std::int64_t kPackedColumns = 2 * kColumnStep;
/// The most memory for packed columns that all parts of a product share, unless one part needs more.
constexpr std::int64_t kPackedBytes = 8 << 20;

std::int64_t num_parts(std::int64_t size, std::int64_t most) { return (size + most - 1) / most; }
std::int64_t whole_steps(std::int64_t columns) { return num_parts(columns, kColumnStep) * kColumnStep; }

/// Returns the product's columns [begin, begin + count), or those that it has of them.
Gemm columns_of(Gemm product, std::int64_t begin, std::int64_t count) {
  if (product.is_b_packed) {
    product.b = static_cast<const std::byte*>(product.b) + begin * kernels().packed_column(product);
  } else {
    product.b = advance(product.b, product.element_b, product.transpose_b ? begin * product.stride_b : begin);
  }
  product.c = const_cast<void*>(advance(product.c, product.element_c, begin));
  product.n = std::min(count, product.n - begin);
  return product;
}

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
  columns = std::min(n, whole_steps(num_parts(n, num_column_parts)));
  num_column_parts = num_parts(n, columns);  // Wider ones may be fewer.
}

Gemm largest_part(Gemm product, const GemmParts& parts) {
  product.m = parts.rows;
  product.n = parts.columns;
  return product;
}

Gemm part_of(Gemm product, const GemmParts& parts, std::int64_t idx) {
  const std::int64_t row = idx / parts.num_column_parts * parts.rows;
  product.a = advance(product.a, product.element_a, product.transpose_a ? row : row * product.stride_a);
  product.c = const_cast<void*>(advance(product.c, product.element_c, row * product.stride_c));
  product.m = std::min(parts.rows, product.m - row);
  return columns_of(product, idx % parts.num_column_parts * parts.columns, parts.columns);
}

namespace {

/// Computes a product whose row parts read the same columns of b. These are packed once for all of them.
void multiply_sharing_b(const Context& context, const Gemm& product, const GemmParts& parts) {
  const std::int64_t bytes_of_column = kernels().packed_column(product);
  // A part that is not whole steps wide is the only one, or the last.
  const std::int64_t bytes_of_part = bytes_of_column * whole_steps(parts.columns);
  const std::int64_t at_once = std::clamp<std::int64_t>(kPackedBytes / bytes_of_part, 1, parts.num_column_parts);
  const ArenaScope scope(*context.arena);
  std::byte* packed = context.arena->allocate_bytes(static_cast<std::size_t>(at_once * bytes_of_part));
  Gemm part = largest_part(product, parts);
  part.is_b_packed = true;
  const ThreadScratch scratch(context, kernels().gemm_scratch(part));
  if (context.measuring()) return;
  for (std::int64_t first = 0; first < parts.num_column_parts; first += at_once) {
    GemmParts of_columns = parts;
    of_columns.num_column_parts = std::min(at_once, parts.num_column_parts - first);
    Gemm columns = columns_of(product, first * parts.columns, of_columns.num_column_parts * parts.columns);
    parallel_ranges(columns.n, kPackedColumns, [&](std::int64_t begin, std::int64_t end) {
      kernels().pack_right(columns_of(columns, begin, end - begin), packed + begin * bytes_of_column);
    });
    columns.b = packed;
    columns.is_b_packed = true;
    parallel_for(of_columns.count(),
                 [&](std::int64_t idx) { kernels().gemm(part_of(columns, of_columns, idx), scratch.mine()); });
  }
}

Gemm product_of(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c, Write write) {
  return {.m = c.dim(0),
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
}

/// Computes a batch of products, `first` and those behind it. Each part packs its operands.
void multiply(const Context& context, const Gemm& first, const GemmParts& parts, const GemmBatch& batch) {
  const ThreadScratch scratch(context, kernels().gemm_scratch(largest_part(first, parts)));
  if (context.measuring()) return;
  parallel_for(batch.count * parts.count(), [&](std::int64_t idx) {
    const std::int64_t i = idx / parts.count();
    Gemm product = first;
    product.a = advance(first.a, first.element_a, i * batch.step_a);
    product.b = advance(first.b, first.element_b, i * batch.step_b);
    product.c = const_cast<void*>(advance(first.c, first.element_c, i * batch.step_c));
    kernels().gemm(part_of(product, parts, idx % parts.count()), scratch.mine());
  });
}

}  // namespace

void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  const Gemm product = product_of(a, transpose_a, b, transpose_b, c, write);
  const GemmParts parts(product.m, product.n, transpose_a, 1);
  if (parts.num_row_parts > 1) return multiply_sharing_b(context, product, parts);
  multiply(context, product, parts, {});
}

void batched_gemm(const Context& context, const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c,
                  const GemmBatch& batch) {
  const Gemm first = product_of(a, false, b, transpose_b, c, Write::kAssign);
  multiply(context, first, GemmParts(first.m, first.n, false, batch.count), batch);
}

void linear_pair_forward(const Context& context, const Tensor& x_TN, const std::array<Tensor, 2>& weights,
                         const std::array<Tensor, 2>& outputs) {
  for (std::size_t i = 0; i < 2; ++i) linear_forward(context, x_TN, weights[i], outputs[i]);
}

}  // namespace tessera::cpu
