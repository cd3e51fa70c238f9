#include <cuda_bf16.h>
#include <nccl_device.h>

#include <algorithm>

#include "comm/gpu_group_kernels.h"
#include "comm/nccl_library.h"
#include "device/cuda_check.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 264;

__global__ void note_kernel(std::uint32_t value, std::uint32_t* count, volatile std::uint64_t* target) {
  *target = std::uint64_t{++*count} << 32 | value;
}

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const T* x, T* out, std::int64_t count) {
  constexpr int kLanes = sizeof(uint4) / sizeof(T);
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const auto* wide_x = reinterpret_cast<const uint4*>(x);
  auto* wide_out = reinterpret_cast<uint4*>(out);
  for (std::int64_t i = first; i < count / kLanes; i += stride) {
    const uint4 a = wide_x[i];
    uint4 b = wide_out[i];
    const T* added = reinterpret_cast<const T*>(&a);
    T* sums = reinterpret_cast<T*>(&b);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = T(to_float(sums[lane]) + to_float(added[lane]));
    wide_out[i] = b;
  }
  const std::int64_t rest = count / kLanes * kLanes + first;
  if (rest < count) out[rest] = T(to_float(out[rest]) + to_float(x[rest]));
}

template <typename T>
void put_sum_of(const Stream& stream, const Tensor& x, const Tensor& out) {
  const std::int64_t count = x.num_elements(), wide = count * static_cast<std::int64_t>(sizeof(T)) / 16;
  const auto blocks = std::clamp<std::int64_t>((wide + kThreads - 1) / kThreads, 1, kMaxBlocks);
  sum_kernel<<<static_cast<int>(blocks), kThreads, 0, stream.handle()>>>(static_cast<const T*>(x.raw()),
                                                                         static_cast<T*>(out.raw()), count);
  TESSERA_CUDA(cudaGetLastError());
}

__global__ void peers_kernel(ncclWindow_t window, void** peers) {
  peers[threadIdx.x] = ncclGetLsaPointer(window, 0, static_cast<int>(threadIdx.x));
}

}  // namespace

void Note::put(const Stream& stream, std::uint32_t value) const {
  note_kernel<<<1, 1, 0, stream.handle()>>>(value, count_, reinterpret_cast<std::uint64_t*>(word_.data()));
  TESSERA_CUDA(cudaGetLastError());
}

void put_sum(const Stream& stream, const Tensor& x, const Tensor& out) {
  const auto is_aligned = [](const Tensor& t) {
    return reinterpret_cast<std::uintptr_t>(t.raw()) % sizeof(uint4) == 0;
  };
  TESSERA_CHECK(is_aligned(x) && is_aligned(out) && x.num_elements() == out.num_elements() && x.dtype() == out.dtype());
  if (x.dtype() == DType::kFloat32) return put_sum_of<float>(stream, x, out);
  TESSERA_CHECK(x.dtype() == DType::kBFloat16, "a sum of {}", name_of(x.dtype()));
  put_sum_of<__nv_bfloat16>(stream, x, out);
}

std::vector<std::byte*> peers_of_window(const Stream& stream, ncclWindow_t window, int size) {
  const Buffer peers = Buffer::pinned(static_cast<std::size_t>(size) * sizeof(void*));
  auto** pointers = reinterpret_cast<void**>(peers.data());
  peers_kernel<<<1, static_cast<unsigned>(size), 0, stream.handle()>>>(window, pointers);
  TESSERA_CUDA(cudaGetLastError());
  stream.synchronize();
  std::vector<std::byte*> result;
  for (int rank = 0; rank < size; ++rank) result.push_back(static_cast<std::byte*>(pointers[rank]));
  return result;
}

int num_reachable(ncclComm_t communicator) {
  static const auto team_of = reinterpret_cast<ncclTeam_t (*)(ncclComm_t)>(nccl_symbol("ncclTeamLsa"));
  return team_of(communicator).nRanks;
}

}  // namespace tessera::cuda
