// Tensor: a view of numbers that an Arena or a Buffer owns. It is trivially copyable and owns nothing.
//
// Layout: row-major. The dims after the first are contiguous. Consecutive entries of the first dim are `stride(0)`
// elements apart, so a range of columns of a matrix is a Tensor, too. Suffixes of names: docs/shapes.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/bfloat16.h"
#include "tensor/dtype.h"

namespace tessera {

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kInt32;
};

/// Says whether an operation assigns its output or adds to it, for outputs that allow both.
enum class Write { kAssign, kAccumulate };

class Shape {
 public:
  static constexpr int kMaxDims = 4;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  explicit Shape(std::span<const std::int64_t> dims);

  int num_dims() const { return num_dims_; }
  std::int64_t operator[](int dim) const { return dims_[static_cast<std::size_t>(dim)]; }
  std::int64_t num_elements() const;
  bool operator==(const Shape& other) const = default;
  std::vector<std::int64_t> dims() const { return {dims_.begin(), dims_.begin() + num_dims_}; }
  /// Returns the shape as "[4, 256]".
  std::string to_string() const;

 private:
  friend class Tensor;
  std::array<std::int64_t, kMaxDims> dims_{};
  int num_dims_ = 0;
};

class Tensor {
 public:
  Tensor() = default;
  /// Makes a contiguous tensor. `data` may be null on Device::kMeta, and where there are no elements.
  Tensor(void* data, Shape shape, DType dtype, Device device);

  bool defined() const { return shape_.num_dims() > 0; }
  const Shape& shape() const { return shape_; }
  std::int64_t dim(int i) const { return shape_[i]; }
  int num_dims() const { return shape_.num_dims(); }
  std::int64_t num_elements() const { return shape_.num_elements(); }
  std::int64_t stride() const { return stride_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  std::size_t num_bytes() const { return static_cast<std::size_t>(num_elements()) * size_of(dtype_); }
  bool is_contiguous() const;

  void* raw() const { return data_; }

  /// Returns the numbers and checks that they have type T. A view does not track constness.
  template <typename T>
  T* data() const {
    TESSERA_CHECK(DTypeOf<T>::value == dtype_, "asked for {}, tensor is {}", name_of(DTypeOf<T>::value),
                  name_of(dtype_));
    return static_cast<T*>(data_);
  }

  /// Returns entries [begin, end) of the first dim.
  Tensor rows(std::int64_t begin, std::int64_t end) const;
  /// Returns columns [begin, end) of a matrix.
  Tensor columns(std::int64_t begin, std::int64_t end) const;
  /// Returns the same numbers with other dims. The tensor must be contiguous.
  Tensor reshape(Shape shape) const;
  /// Returns entry `i` of the first dim, which has one dim fewer.
  Tensor operator[](std::int64_t i) const;

 private:
  void* data_ = nullptr;
  Shape shape_;
  std::int64_t stride_ = 0;
  DType dtype_ = DType::kFloat32;
  Device device_ = Device::kCpu;
};

}  // namespace tessera
