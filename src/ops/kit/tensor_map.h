// Tensor maps, which describe to TMA a tensor in device memory and the boxes that it copies. This is code for the host.
// Kernels take tensor maps as __grid_constant__ parameters. Source: CUDA Driver API, "Tensor Map Object Management".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::cuda {

/// Describes a tensor of rank 2 or 3, and the box of one copy. Sizes are listed innermost dim first. The innermost dim
/// is contiguous. Outside of the tensor, a box reads zeros and writes nothing.
struct TensorMapSpec {
  static constexpr int kMaxRank = 3;
  const void* data = nullptr;  // its address is a multiple of 16 bytes
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int rank = 2;
  std::uint64_t sizes[kMaxRank] = {};                       // in elements
  std::uint64_t strides_bytes[kMaxRank - 1] = {};           // strides of dims 1 and 2; they are multiples of 16
  std::uint32_t box[kMaxRank] = {1, 1, 1};                  // in elements, at most 256 each
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;  // with this swizzle, box[0] is at most 128 bytes
};

/// Throws InternalError if the driver rejects the description.
CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace tessera::cuda
