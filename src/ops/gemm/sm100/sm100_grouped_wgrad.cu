#include "ops/gemm/sm100/sm100_block_scaled.cuh"

namespace tessera::cuda {
namespace {

using Wgrad = sm100::GroupedGemm<float, float>;
}  // namespace

std::size_t sm100_wgrad_scratch_bytes(int num_sms) { return sm100::scratch_bytes<Wgrad>(num_sms); }

void sm100_grouped_wgrad(const Sm100GroupedWgrad& args, cudaStream_t stream) {
  TESSERA_CHECK(args.num_rows % mx::kBlock == 0, "{} rows", args.num_rows);
  if (!args.accumulate) {
    cutlass_groups::zero_empty(args.offsets_E1, args.num_experts, std::int64_t{args.m} * args.n, args.d_w_EMN, stream);
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
