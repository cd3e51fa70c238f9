#include "ops/gemm/sm100/sm100_block_scaled.cuh"

namespace tessera::cuda {
namespace {

using Wgrad = sm100::GroupedGemm<float, float>;
constexpr int kThreads = 128;

/// Writes zeros for the experts without rows.
__global__ void zero_empty_kernel(const std::int32_t* offsets_E1, std::int64_t size, float* d_w) {
  const std::int64_t e = blockIdx.y;
  if (offsets_E1[e] != offsets_E1[e + 1]) return;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    d_w[e * size + i] = 0.0f;
  }
}

}  // namespace

std::size_t sm100_wgrad_scratch_bytes(int num_sms) { return sm100::scratch_bytes<Wgrad>(num_sms); }

void sm100_grouped_wgrad(const Sm100GroupedWgrad& args, cudaStream_t stream) {
  TESSERA_CHECK(args.num_rows % mx::kBlock == 0, "{} rows", args.num_rows);
  if (!args.accumulate) {
    constexpr unsigned kBlocksPerExpert = 64;
    zero_empty_kernel<<<dim3(kBlocksPerExpert, static_cast<unsigned>(args.num_experts)), kThreads, 0, stream>>>(
        args.offsets_E1, std::int64_t{args.m} * args.n, args.d_w_EMN);
  }
  sm100::multiply<Wgrad, true>(sm100::Operands<float>{.a = args.d_y_MR,
                                                      .b = args.x_NR,
                                                      .a_scales = args.d_y_scales,
                                                      .b_scales = args.x_scales,
                                                      .d = args.d_w_EMN,
                                                      .stride_ab = args.num_rows,
                                                      .offsets_E1 = args.offsets_E1,
                                                      .num_experts = args.num_experts,
                                                      .m = args.m,
                                                      .n = args.n},
                               args.accumulate, args.scratch, args.num_sms, stream);
}

}  // namespace tessera::cuda
