// Helpers for launches. They choose a kernel's instance by dtype and alignment, the size of its grid, and when it may
// begin.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/cuda_check.h"
#include "ops/kit/vec.cuh"
#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"

namespace tessera::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
/// The most bytes of dynamic shared memory that a block here may take. Hopper has 227 KiB per block. The rest is left
/// for variables.
inline constexpr std::size_t kMostDynamicShared = 226 << 10;

inline cudaStream_t stream_of(const Context& op) { return op.cuda->stream().handle(); }

/// Returns whether Hopper's kernels are chosen. Measuring without a GPU assumes Hopper.
inline bool may_be_hopper(const Context& op) { return op.cuda == nullptr || op.cuda->compute_capability() == 9; }

/// Calls body(T{}) with T = float or __nv_bfloat16.
template <typename Body>
void for_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
    default:
      break;
  }
  TESSERA_CHECK(false, "{} is no floating-point type", name_of(dtype));
}

/// Calls body(std::integral_constant<int, N>) with N = kLanes if in_lanes is true, or else 1.
template <typename Body>
void for_lanes(bool in_lanes, Body&& body) {
  if (in_lanes) {
    body(std::integral_constant<int, kLanes>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

/// Returns a tensor's numbers as kernels see them. T is checked by its size only.
template <typename T>
T* numbers(const Tensor& x) {
  TESSERA_CHECK(!x.defined() || size_of(x.dtype()) == sizeof(T), "{}", name_of(x.dtype()));
  return static_cast<T*>(x.raw());
}

/// The most items for which a kernel's loop may have a 32-bit index. The index grows by less than 2^20 at a time, and
/// so it does not wrap. Loops with 64-bit indices are slower.
inline constexpr std::int64_t kMost32BitItems = (std::int64_t{1} << 32) - (std::int64_t{1} << 20);

/// Returns the number of blocks of `threads` threads for `items` of work. The kernel's threads must step by the size of
/// the grid. The blocks fill the GPU if there is enough work. There is at least one.
inline int grid_for(const Context& op, std::int64_t items, int threads) {
  constexpr std::int64_t kBlocksPerSm = 16;
  const std::int64_t blocks = (items + threads - 1) / threads;
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, op.cuda->num_sms() * kBlocksPerSm));
}

// Programmatic dependent launch (CUDA C++ Programming Guide). A kernel that is launched early may begin as soon as each
// block of the kernel in front has ended or has called let_next_kernel_begin(), however that one was launched. So it
// must wait_for_kernel_before(), which returns when the kernel in front has ended and all that it wrote can be seen.
// Kernels that are launched in the usual way begin when all work in front has ended, and do not wait there.
__device__ inline void let_next_kernel_begin() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ inline void wait_for_kernel_before() { cudaGridDependencySynchronize(); }

/// Launches a kernel that calls wait_for_kernel_before(). Before that call the kernel may read weights, but no other
/// results. The launch is early where weights are constant, as in decoding. Some kernels also read other data early,
/// and say why that is safe: kernels of attention read slots, positions and older rows of the cache, and down_kernel
/// (ops/routing/moe_decode_cuda.cu) reads the chosen experts.
template <typename... Params, typename... Args>
void launch_early(const Context& op, void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
                  const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = op.weights_are_constant ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_of(op);
  config.attrs = &attribute;
  config.numAttrs = 1;
  TESSERA_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

}  // namespace tessera::cuda
