// Rows as they cross from rank to rank, and how their receiver delivers them.
#pragma once

#include <array>
#include <span>

#include "ep/dispatcher.h"

namespace tessera::ep {

/// Holds rows [.., D], either unchanged or quantized along D. The other form is undefined.
struct Payload {
  Tensor plain;
  mx::Quantized packed;

  /// Returns the tensors that the payload consists of. The second one may be undefined.
  std::array<Tensor, 2> parts() const {
    return plain.defined() ? std::array{plain, Tensor()} : std::array{packed.elements, packed.scales};
  }
  Payload first_rows(std::int64_t count) const;
};

/// Allocates a payload by calls of `allocate(shape, dtype)`.
template <typename Allocate>
Payload allocate_payload(std::int64_t num_rows, std::int64_t dim, DType dtype, PayloadPrecision precision,
                         Allocate&& allocate) {
  if (precision == PayloadPrecision::kDefault) return {.plain = allocate(Shape{num_rows, dim}, dtype), .packed = {}};
  return {.plain = {}, .packed = mx::allocate_quantized({num_rows, dim}, mx::Format{}, allocate)};
}

/// Allocates a payload in scratch memory.
Payload allocate_payload(const Context& op, std::int64_t num_rows, std::int64_t dim, DType dtype,
                         PayloadPrecision precision);

/// Returns y_tD as a payload of this precision. A quantized payload is made from y_tD.plain, in scratch memory, if that
/// is defined. Otherwise it is y_tD.rows.
Payload make_payload(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision);

/// Records a call of a dry run, which transfers nothing.
void record_call(const Context& op, const char* call, const DispatchOptions& options, int num_ranks,
                 PayloadPrecision precision, const TokenRouting& routing, const DispatchLayer& layer);

/// Assigns row source_of_row_R[r] (int32) of `received` to row r of x_RD, in its defined forms, and 0 where the source
/// is -1. It delivers num_rows_1[0] rows. `dtype` is the type of the numbers. On a CPU, x_RD.plain may be
/// received.plain. Then a row that is its own source stays, and every source must be its own source.
void deliver_rows(const Context& op, const Payload& received, DType dtype, const Tensor& source_of_row_R,
                  const Tensor& num_rows_1, const GemmOperand& x_RD);

/// Assigns or adds to y the sum of weights[i] · rows[i]. It sums in this order, in float32, and rounds once. If
/// `weights` is null, all weights are 1. y and the rows have `length` numbers of `dtype`. It runs in the calling
/// thread.
void sum_rows(DType dtype, std::span<const void* const> rows, const float* weights, std::int64_t length, Write write,
              void* y);

inline std::size_t bytes_of_row(const Tensor& x) { return static_cast<std::size_t>(x.dim(1)) * size_of(x.dtype()); }
inline std::byte* row_bytes(const Tensor& x, std::int64_t i) {
  return static_cast<std::byte*>(x.raw()) + static_cast<std::size_t>(i) * bytes_of_row(x);
}

/// The number of tokens that one parallel task handles, for work that is done for every token.
inline constexpr std::int64_t kTokensPerTask = 16;

}  // namespace tessera::ep
