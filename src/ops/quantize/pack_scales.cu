#include <algorithm>

#include "device/cuda_check.h"
#include "ops/quantize/pack_scales.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void pack_scales_kernel(PackScales args) {
  const std::int64_t words_per_row = args.words_per_row();
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.num_rows * words_per_row;
       i += std::int64_t{gridDim.x} * kThreads) {
    pack_scales_word(args, i / words_per_row, i % words_per_row);
  }
}

}  // namespace

void pack_scales(const PackScales& args, cudaStream_t stream) {
  TESSERA_CHECK(args.num_groups > 0 && args.grouped_size() % (args.offsets == nullptr ? args.num_groups : 1) == 0,
                "{} in {} groups", args.grouped_size(), args.num_groups);
  TESSERA_CUDA(cudaMemsetAsync(args.packed, 0, static_cast<std::size_t>(args.bytes()), stream));
  constexpr std::int64_t kMaxBlocks = 2048;
  const std::int64_t blocks = (args.num_rows * args.words_per_row() + kThreads - 1) / kThreads;
  pack_scales_kernel<<<static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, kMaxBlocks)), kThreads, 0, stream>>>(
      args);
  TESSERA_CUDA(cudaGetLastError());
}

}  // namespace tessera::cuda
