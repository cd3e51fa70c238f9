// Helpers of CPU operators for float types. They call a template for the float type of a tensor, and load and store its
// numbers as float32.
#pragma once

#include <type_traits>

#include "ops/cpu/kernels.h"
#include "ops/runtime/context.h"
#include "tensor/parallel.h"
#include "tensor/tensor.h"

namespace tessera::cpu {

/// Calls body(T{}) with T = float or BFloat16, the type of dtype.
template <typename Body>
void for_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      break;
  }
  TESSERA_CHECK(false, "{} is no floating-point type", name_of(dtype));
}

inline float load(float value) { return value; }
inline float load(BFloat16 value) { return static_cast<float>(value); }
inline void store(float& target, float value) { target = value; }
inline void store(BFloat16& target, float value) { target = BFloat16(value); }

/// Returns a pointer to row i of a tensor. There may be gaps between its rows.
template <typename T>
T* row_of(const Tensor& tensor, std::int64_t i) {
  return tensor.data<T>() + i * tensor.stride();
}

inline Element element_of(DType dtype) {
  TESSERA_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16, "{}", name_of(dtype));
  return dtype == DType::kFloat32 ? Element::kFloat32 : Element::kBFloat16;
}

/// Holds scratch memory of the same size for every thread. It comes from the arena, and is released at the end of the
/// enclosing block.
class ThreadScratch {
 public:
  ThreadScratch(const Context& context, std::size_t bytes_per_thread)
      : scope_(*context.arena),
        bytes_per_thread_((bytes_per_thread + kAlignment - 1) / kAlignment * kAlignment),
        base_(context.arena->allocate_bytes(bytes_per_thread_ * static_cast<std::size_t>(num_threads()))) {}

  /// Returns the calling thread's memory.
  std::byte* mine() const { return base_ + bytes_per_thread_ * static_cast<std::size_t>(thread_idx()); }

 private:
  ArenaScope scope_;
  std::size_t bytes_per_thread_;
  std::byte* base_;
};

}  // namespace tessera::cpu
