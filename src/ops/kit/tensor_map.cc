#include "ops/kit/tensor_map.h"

#include "device/cuda_check.h"

namespace tessera::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Returns the driver's function. It is looked up through the runtime, so the program does not link the driver's library
// and starts without it.
Encode find_encode() {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  TESSERA_CUDA(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &found));
  TESSERA_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kDense[TensorMapSpec::kMaxRank] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, spec.type, static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.data),
                                 spec.sizes, spec.strides_bytes, spec.box, kDense, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 spec.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TESSERA_CHECK(result == CUDA_SUCCESS,
                "cuTensorMapEncodeTiled returned {} for type {}, data {}, rank {}, sizes {} {} {}, strides {} {}, "
                "box {} {} {}",
                static_cast<int>(result), static_cast<int>(spec.type), spec.data, spec.rank, spec.sizes[0],
                spec.sizes[1], spec.sizes[2], spec.strides_bytes[0], spec.strides_bytes[1], spec.box[0], spec.box[1],
                spec.box[2]);
  return map;
}

}  // namespace tessera::cuda
