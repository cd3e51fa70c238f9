// 16-byte accesses. A thread takes kLanes = 8 neighbouring numbers at a time. These are one 16-byte access of bfloat16
// or two of float32. It takes one number at a time if rows do not start at multiples of 16 bytes. The same holds if
// their length is not a multiple of kLanes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "tensor/tensor.h"

namespace tessera::cuda {

inline constexpr int kLanes = 8;

/// The type that kernels use for a tensor's dtype.
template <typename T>
struct DeviceType {
  using Type = T;
};
template <>
struct DeviceType<BFloat16> {
  using Type = __nv_bfloat16;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T from_float(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}
/// Returns x as it is after being stored as a T.
template <typename T>
__device__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

/// Holds kCount numbers of T. They are accessed 16 bytes at a time, or all at once if they are less.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Lanes {
  static_assert(kCount * sizeof(T) < 16 || kCount * sizeof(T) % 16 == 0);
  T x[kCount];
};

/// Loads numbers without a conversion.
template <int kCount, typename T>
__device__ Lanes<T, kCount> get_lanes(const T* from) {
  return *reinterpret_cast<const Lanes<T, kCount>*>(from);
}
/// Stores numbers to global memory. It uses PTX, because the compiler turns an assignment of bfloat16 into four 4-byte
/// stores.
template <int kCount, typename T>
__device__ void put_lanes(const Lanes<T, kCount>& lanes, T* to) {
  if constexpr (sizeof lanes < sizeof(uint4)) {
    *reinterpret_cast<Lanes<T, kCount>*>(to) = lanes;
  } else {
    uint4 words[sizeof lanes / sizeof(uint4)];
    memcpy(words, &lanes, sizeof lanes);
#pragma unroll
    for (std::size_t i = 0; i < sizeof lanes / sizeof(uint4); ++i) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to) + i * sizeof(uint4)),
                   "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w)
                   : "memory");
    }
  }
}

template <int kCount, typename T>
__device__ void load_lanes(const T* from, float (&x)[kCount]) {
  const Lanes<T, kCount> lanes = get_lanes<kCount>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = to_float(lanes.x[i]);
}

template <int kCount, typename T>
__device__ void store_lanes(const float (&x)[kCount], T* to) {
  Lanes<T, kCount> lanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) lanes.x[i] = from_float<T>(x[i]);
  put_lanes(lanes, to);
}

/// Returns the length of a row. The rows of a vector have one number.
inline std::int64_t row_length(const Tensor& x) {
  return x.dim(0) == 0 || x.num_dims() == 1 ? 1 : x.num_elements() / x.dim(0);
}

/// Returns whether all rows can be read and written kLanes numbers at a time.
template <typename... Tensors>
bool in_lanes(const Tensors&... tensors) {
  const auto fits = [](const Tensor& x) {
    return !x.defined() || (reinterpret_cast<std::uintptr_t>(x.raw()) % 16 == 0 && row_length(x) % kLanes == 0 &&
                            x.stride() * static_cast<std::int64_t>(size_of(x.dtype())) % 16 == 0);
  };
  return (fits(tensors) && ...);
}

}  // namespace tessera::cuda
