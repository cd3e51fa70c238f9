// Tensor maps: what TMA is told about a tensor in device memory and about the boxes that it copies. Host side; kernels
// take them as __grid_constant__ parameters. Source: CUDA Driver API, "Tensor Map Object Management".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::cuda {

/// A tensor of rank 2 or 3, sizes innermost first, and the box of one copy. The innermost dim is contiguous. Boxes that
/// stick out of the tensor read zeros and write nothing there.
struct TensorMapSpec {
  static constexpr int kMaxRank = 3;
  const void* data = nullptr;  // a multiple of 16 bytes
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int rank = 2;
  std::uint64_t sizes[kMaxRank] = {};                       // elements
  std::uint64_t strides_bytes[kMaxRank - 1] = {};           // of dims 1 and 2: multiples of 16
  std::uint32_t box[kMaxRank] = {1, 1, 1};                  // elements, at most 256 each
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;  // then box[0] is at most 128 bytes
};

/// Throws InternalError if the driver refuses.
CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace tessera::cuda
