// A matrix of 8-bit elements with the scales of its blocks. Blocks and memory run along the last dim, which is the
// contraction of the GEMM that reads the matrix. A matrix that is contracted along its first dim is stored transposed.
#pragma once

#include "mx/block.h"
#include "tensor/tensor.h"

namespace tessera::mx {

/// Views a quantized matrix, and owns nothing. `elements` are [..., M, K], float8_e4m3. `scales` are [..., ceil(M /
/// scale_height), ceil(K / scale_width)] of the format, float8_e8m0 or float32. If K cuts off the last block, its
/// missing numbers count as zeros.
struct Quantized {
  Tensor elements, scales;
  Format format;

  bool defined() const { return elements.defined(); }
  std::uint8_t* element_bytes() const { return static_cast<std::uint8_t*>(elements.raw()); }
  std::uint8_t* scale_bytes() const { return static_cast<std::uint8_t*>(scales.raw()); }
  /// Returns matrix i of a stack.
  Quantized operator[](std::int64_t i) const { return {elements[i], scales[i], format}; }
};

/// Returns the shape of the scales of a matrix, or of a stack of matrices, of this shape.
inline Shape scales_shape(const Shape& shape, const Format& format) {
  const int last = shape.num_dims() - 1;
  TESSERA_CHECK(last == 1 || last == 2, "{}", shape.to_string());
  const auto blocks = [](std::int64_t size, std::int64_t block) { return (size + block - 1) / block; };
  const std::int64_t rows = blocks(shape[last - 1], format.scale_height()),
                     columns = blocks(shape[last], format.scale_width());
  return last == 1 ? Shape{rows, columns} : Shape{shape[0], rows, columns};
}

/// Returns the shape of the transposed matrix, or of a stack of transposed matrices.
inline Shape transposed(const Shape& shape) {
  TESSERA_CHECK(shape.num_dims() == 2 || shape.num_dims() == 3, "{}", shape.to_string());
  return shape.num_dims() == 2 ? Shape{shape[1], shape[0]} : Shape{shape[0], shape[2], shape[1]};
}

inline DType scales_dtype(const Format& format) {
  return format.scale_type == ScaleType::kE8M0 ? DType::kFloat8E8M0 : DType::kFloat32;
}

/// Allocates the elements and the scales of a matrix by calls of `allocate(shape, dtype)`.
template <typename Allocate>
Quantized allocate_quantized(const Shape& shape, const Format& format, Allocate&& allocate) {
  return {allocate(shape, DType::kFloat8E4M3), allocate(scales_shape(shape, format), scales_dtype(format)), format};
}

}  // namespace tessera::mx
