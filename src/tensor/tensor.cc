#include "tensor/tensor.h"

namespace tessera {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E8M0:
      return 1;
  }
  TESSERA_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kFloat8E8M0:
      return "float8_e8m0";
  }
  return "unknown";
}

Shape::Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const std::int64_t> dims) : num_dims_(static_cast<int>(dims.size())) {
  TESSERA_CHECK(dims.size() <= kMaxDims, "{} dims", dims.size());
  std::size_t i = 0;
  for (const std::int64_t dim : dims) {
    TESSERA_CHECK(dim >= 0, "dim {} is {}", i, dim);
    dims_[i++] = dim;
  }
}

std::int64_t Shape::num_elements() const {
  std::int64_t product = 1;
  for (int i = 0; i < num_dims_; ++i) product *= dims_[static_cast<std::size_t>(i)];
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < num_dims_; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", (*this)[i]);
  return text + "]";
}

Tensor::Tensor(void* data, Shape shape, DType dtype, Device device)
    : data_(data), shape_(shape), dtype_(dtype), device_(device) {
  TESSERA_CHECK(shape.num_dims() >= 1);
  TESSERA_CHECK(data != nullptr || device == Device::kMeta || shape.num_elements() == 0, "shape {}", shape.to_string());
  stride_ = shape[0] == 0 ? 0 : shape.num_elements() / shape[0];
}

bool Tensor::is_contiguous() const { return shape_[0] <= 1 || stride_ * shape_[0] == shape_.num_elements(); }

Tensor Tensor::rows(std::int64_t begin, std::int64_t end) const {
  TESSERA_CHECK(0 <= begin && begin <= end && end <= shape_[0], "[{}, {}) of {}", begin, end, shape_.to_string());
  Tensor view = *this;
  view.shape_.dims_[0] = end - begin;
  if (data_ != nullptr) {
    view.data_ = static_cast<std::byte*>(data_) + static_cast<std::size_t>(begin * stride_) * size_of(dtype_);
  }
  return view;
}

Tensor Tensor::columns(std::int64_t begin, std::int64_t end) const {
  TESSERA_CHECK(num_dims() == 2 && 0 <= begin && begin <= end && end <= shape_[1], "[{}, {}) of {}", begin, end,
                shape_.to_string());
  Tensor view = *this;
  view.shape_.dims_[1] = end - begin;
  if (data_ != nullptr) {
    view.data_ = static_cast<std::byte*>(data_) + static_cast<std::size_t>(begin) * size_of(dtype_);
  }
  return view;
}

Tensor Tensor::reshape(Shape shape) const {
  TESSERA_CHECK(is_contiguous() && shape.num_elements() == num_elements(), "{} to {}", shape_.to_string(),
                shape.to_string());
  return Tensor(data_, shape, dtype_, device_);
}

Tensor Tensor::operator[](std::int64_t i) const {
  TESSERA_CHECK(num_dims() >= 2, "{}", shape_.to_string());
  const Tensor row = rows(i, i + 1);
  Shape shape;
  shape.num_dims_ = num_dims() - 1;
  for (int d = 0; d < shape.num_dims_; ++d) shape.dims_[static_cast<std::size_t>(d)] = shape_[d + 1];
  return Tensor(row.data_, shape, dtype_, device_);
}

}  // namespace tessera
