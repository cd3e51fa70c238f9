// For CPU operators: calls a template for the float type that a tensor holds, and loads and stores it as float32.
#pragma once

#include <type_traits>

#include "tensor/tensor.h"

namespace tessera::cpu {

/// Calls body(T{}) with T = float or BFloat16, as dtype says.
template <typename Body>
void for_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(BFloat16{});
    case DType::kInt32:
      break;
  }
  TESSERA_CHECK(false, "{} is no floating-point type", name_of(dtype));
}

inline float load(float value) { return value; }
inline float load(BFloat16 value) { return static_cast<float>(value); }
inline void store(float& target, float value) { target = value; }
inline void store(BFloat16& target, float value) { target = BFloat16(value); }

/// Pointer to row i of a tensor whose rows may be apart.
template <typename T>
T* row_of(const Tensor& tensor, std::int64_t i) {
  return tensor.data<T>() + i * tensor.stride();
}

}  // namespace tessera::cpu
