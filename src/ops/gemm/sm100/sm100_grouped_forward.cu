#include "ops/gemm/sm100/sm100_block_scaled.cuh"

namespace tessera::cuda {

using Forward = sm100::GroupedGemm<void, cutlass::bfloat16_t>;

std::size_t sm100_forward_scratch_bytes(int num_sms) { return sm100::scratch_bytes<Forward>(num_sms); }

void sm100_grouped_forward(const Sm100GroupedForward& args, cudaStream_t stream) {
  sm100::multiply<Forward, false>(
      sm100::Operands<cutlass::bfloat16_t>{.a = args.x_RN,
                                           .b = args.w_EMN,
                                           .a_scales = args.x_scales,
                                           .b_scales = args.w_scales,
                                           .d = reinterpret_cast<cutlass::bfloat16_t*>(args.y_RM),
                                           .stride_ab = args.n,
                                           .offsets_E1 = args.offsets_E1,
                                           .num_experts = args.num_experts,
                                           .m = args.m,
                                           .n = args.n},
      false, args.scratch, args.num_sms, stream);
}

}  // namespace tessera::cuda
