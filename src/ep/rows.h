// Rows as they cross from rank to rank, and what their receiver makes of them.
#pragma once

#include <array>
#include <span>

#include "ep/dispatcher.h"

namespace tessera::ep {

/// Rows [.., D] as they are, or quantized along D: one of the two.
struct Payload {
  Tensor plain;
  mx::Quantized packed;

  /// What it is made of; the second may be undefined.
  std::array<Tensor, 2> parts() const {
    return plain.defined() ? std::array{plain, Tensor()} : std::array{packed.elements, packed.scales};
  }
  Payload first_rows(std::int64_t count) const;
};

/// `allocate(shape, dtype)` gives the tensors.
template <typename Allocate>
Payload allocate_payload(std::int64_t num_rows, std::int64_t dim, DType dtype, PayloadPrecision precision,
                         Allocate&& allocate) {
  if (precision == PayloadPrecision::kDefault) return {.plain = allocate(Shape{num_rows, dim}, dtype), .packed = {}};
  return {.plain = {}, .packed = mx::allocate_quantized({num_rows, dim}, mx::Format{}, allocate)};
}

/// y_tD itself, or quantized: as it is given, or into scratch memory.
Payload make_payload(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision);

/// x_RD (=), in its defined forms: row r is row source_of_row_R[r] (int32) of `received`, 0 for -1; up to num_rows_1[0]
/// rows. `dtype`: of the numbers. On a CPU x_RD.plain may be received.plain: then a row that is its own source stays,
/// and a source must be its own source.
void deliver_rows(const Context& op, const Payload& received, DType dtype, const Tensor& source_of_row_R,
                  const Tensor& num_rows_1, const GemmOperand& x_RD);

/// y (= or +=) sum of weights[i] · rows[i] in this order, in float32, rounded once; without weights all are 1. y and
/// the rows: `length` numbers of `dtype`. In the calling thread.
void sum_rows(DType dtype, std::span<const void* const> rows, const float* weights, std::int64_t length, Write write,
              void* y);

inline std::size_t bytes_of_row(const Tensor& x) { return static_cast<std::size_t>(x.dim(1)) * size_of(x.dtype()); }
inline std::byte* row_bytes(const Tensor& x, std::int64_t i) {
  return static_cast<std::byte*>(x.raw()) + static_cast<std::size_t>(i) * bytes_of_row(x);
}

/// Tokens per task of what is done for every token.
inline constexpr std::int64_t kTokensPerTask = 16;

}  // namespace tessera::ep
