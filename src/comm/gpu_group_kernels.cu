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

/// Returns the number of blocks for a loop over 16-byte accesses.
unsigned blocks_for(std::int64_t num_accesses) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((num_accesses + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

template <typename T>
void put_sum_of(const Stream& stream, const Tensor& x, const Tensor& out) {
  const std::int64_t count = x.num_elements(), wide = count * static_cast<std::int64_t>(sizeof(T)) / 16;
  sum_kernel<<<blocks_for(wide), kThreads, 0, stream.handle()>>>(static_cast<const T*>(x.raw()),
                                                                 static_cast<T*>(out.raw()), count);
  TESSERA_CUDA(cudaGetLastError());
}

__device__ std::uint32_t rounded_pair(std::uint32_t low, std::uint32_t high) {
  const std::uint32_t low_bits = __bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(low)));
  const std::uint32_t high_bits = __bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(high)));
  return high_bits << 16 | low_bits;
}

/// Row y of the grid rounds part y. Only the thread that has read a word of the first half writes it. `half` counts
/// 16-byte accesses.
__global__ void __launch_bounds__(kThreads) rounding_kernel(uint4* parts, std::int64_t half) {
  uint4* part = parts + std::int64_t{blockIdx.y} * 2 * half;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < half; i += stride) {
    const uint4 low = part[i], high = part[half + i];
    part[i] = {rounded_pair(low.x, high.x), rounded_pair(low.y, high.y), rounded_pair(low.z, high.z),
               rounded_pair(low.w, high.w)};
  }
}

__device__ float4 low_numbers(uint4 words) {
  return {__uint_as_float(words.x << 16), __uint_as_float(words.y << 16), __uint_as_float(words.z << 16),
          __uint_as_float(words.w << 16)};
}
__device__ float4 high_numbers(uint4 words) {
  constexpr std::uint32_t kHigh = 0xffff0000u;
  return {__uint_as_float(words.x & kHigh), __uint_as_float(words.y & kHigh), __uint_as_float(words.z & kHigh),
          __uint_as_float(words.w & kHigh)};
}
__device__ float4 sum_of(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

__global__ void __launch_bounds__(kThreads)
    rounded_sum_kernel(const uint4* parts, std::int64_t half, int num_parts, int own, bool accumulates, float4* out) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < half; i += stride) {
    float4 low{}, high{};
    for (int rank = 0; rank < num_parts; ++rank) {
      const uint4 words = parts[(2 * rank + (rank == own ? 0 : 1)) * half + i];
      low = rank == 0 ? low_numbers(words) : sum_of(low, low_numbers(words));
      high = rank == 0 ? high_numbers(words) : sum_of(high, high_numbers(words));
    }
    out[i] = accumulates ? sum_of(out[i], low) : low;
    out[half + i] = accumulates ? sum_of(out[half + i], high) : high;
  }
}

bool is_aligned(const Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.raw()) % sizeof(uint4) == 0; }

/// Returns the 16-byte accesses of half a part of `n` float32 numbers.
std::int64_t accesses_of_half(std::int64_t n) {
  constexpr std::int64_t kLanes = sizeof(uint4) / sizeof(float);
  TESSERA_CHECK(n % (2 * kLanes) == 0, "parts of {} numbers", n);
  return n / (2 * kLanes);
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
  TESSERA_CHECK(is_aligned(x) && is_aligned(out) && x.num_elements() == out.num_elements() && x.dtype() == out.dtype());
  if (x.dtype() == DType::kFloat32) return put_sum_of<float>(stream, x, out);
  TESSERA_CHECK(x.dtype() == DType::kBFloat16, "a sum of {}", name_of(x.dtype()));
  put_sum_of<__nv_bfloat16>(stream, x, out);
}

void put_rounding(const Stream& stream, const Tensor& x, int num_parts) {
  TESSERA_CHECK(is_aligned(x) && x.dtype() == DType::kFloat32 && x.num_elements() % num_parts == 0);
  const std::int64_t half = accesses_of_half(x.num_elements() / num_parts);
  const dim3 grid(blocks_for(half), static_cast<unsigned>(num_parts));
  rounding_kernel<<<grid, kThreads, 0, stream.handle()>>>(static_cast<uint4*>(x.raw()), half);
  TESSERA_CUDA(cudaGetLastError());
}

void put_sum_of_rounded(const Stream& stream, const Tensor& x, int own, const Tensor& out, Write write) {
  TESSERA_CHECK(is_aligned(x) && is_aligned(out) && out.dtype() == DType::kFloat32 && out.num_elements() > 0);
  const std::int64_t half = accesses_of_half(out.num_elements());
  rounded_sum_kernel<<<blocks_for(half), kThreads, 0, stream.handle()>>>(
      static_cast<const uint4*>(x.raw()), half, static_cast<int>(x.num_elements() / out.num_elements()), own,
      write == Write::kAccumulate, static_cast<float4*>(out.raw()));
  TESSERA_CUDA(cudaGetLastError());
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
