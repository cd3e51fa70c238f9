#include "ops/gemm/sm90/sm90_grouped_gemm_exact.cuh"
#include "ops/gemm/sm90/sm90_grouped_gemm_fp8.cuh"
#include "ops/gemm/sm90/sm90_grouped_gemm_fp8.h"
#include "ops/gemm/sm90/sm90_launch.cuh"
#include "ops/kit/gemm_operand.h"
#include "ops/kit/tensor_map.h"

namespace tessera::cuda {

namespace {

namespace fp8 = sm90::fp8;
namespace exact = sm90::exact;

constexpr int kBox = 128;  // rows of one copy, for all operands
static_assert(fp8::kBox == kBox && exact::kBox == kBox && sm90::kTileA == kBox);
static_assert(exact::kStep == kWideStep);
// The scratch here is for two steps of k, one tile of m and two tiles of n.
static_assert(sm90_blockwise_scratch_bytes(fp8::kStep + 1, 16, fp8::kLarge + 16) ==
              kSm90PartsBytes + sizeof(float) * 2 * (fp8::arranged_row(16) + fp8::arranged_row(fp8::kLarge + 16)));

/// Returns the map of 8-bit numbers [rows, columns] (experts = 0) or [experts, rows, columns], copied in boxes of
/// kBox × `box_columns`.
CUtensorMap bytes_map(const std::uint8_t* data, int experts, int rows, int columns, int box_columns,
                      CUtensorMapSwizzle swizzle) {
  TensorMapSpec spec{.data = data, .type = CU_TENSOR_MAP_DATA_TYPE_UINT8, .rank = experts == 0 ? 2 : 3};
  spec.sizes[0] = columns;
  spec.sizes[1] = rows;
  spec.sizes[2] = experts;
  spec.strides_bytes[0] = columns;
  spec.strides_bytes[1] = spec.sizes[0] * rows;
  spec.box[0] = box_columns;
  spec.box[1] = kBox;
  spec.swizzle = swizzle;
  return make_tensor_map(spec);
}
CUtensorMap operand_map(const std::uint8_t* data, int experts, int rows, int columns) {
  return bytes_map(data, experts, rows, columns, fp8::kStep, CU_TENSOR_MAP_SWIZZLE_128B);
}

/// Describes the scales of rows of `columns` numbers.
sm90::Scales scales_of(const void* data, int columns, mx::ScaleType type) {
  const bool is_float = type == mx::ScaleType::kFloat32;
  return {
      .data = data, .stride = sm90::ceil_div(columns, is_float ? mx::kWideBlock : mx::kBlock), .is_float = is_float};
}

}  // namespace

void sm90_blockwise_forward(const Sm90BlockwiseForward& args, cudaStream_t stream) {
  sm90::check_sizes(args, 16);
  const CUtensorMap x = operand_map(args.x_RN, 0, args.num_rows, args.n);
  const CUtensorMap w = operand_map(args.w_EMN, args.num_experts, args.m, args.n);
  const fp8::Params params{.offsets_E1 = args.offsets_E1,
                           .num_experts = args.num_experts,
                           .num_rows = args.num_rows,
                           .m = args.m,
                           .n = args.n,
                           .scales_a = scales_of(args.x_scales, args.n, args.scale_type),
                           .scales_b = scales_of(args.w_scales, args.n, args.scale_type),
                           .y_RM = args.y_RM};
  if (args.has_widest_blocks) {
    TESSERA_CHECK(args.scale_type == mx::ScaleType::kE8M0);
    sm90::launch<fp8::blockwise_gemm<false, false, true, 2>, fp8::Shared>(args.num_sms, stream, x, w, params);
  } else {
    sm90::launch<fp8::blockwise_gemm<false, false, true>, fp8::Shared>(args.num_sms, stream, x, w, params);
  }
}

void sm90_blockwise_wgrad(const Sm90BlockwiseWgrad& args, cudaStream_t stream) {
  sm90::check_sizes(args, 16);
  TESSERA_CHECK(args.num_rows % 16 == 0, "{} rows", args.num_rows);
  const int num_steps = sm90::ceil_div(args.num_rows, fp8::kStep);
  auto* parts_done = static_cast<std::int32_t*>(args.scratch);
  auto* arranged = reinterpret_cast<float*>(static_cast<std::byte*>(args.scratch) + kSm90PartsBytes);
  const fp8::ScaleRows a{
      .scales = scales_of(args.d_y_scales, args.num_rows, args.scale_type), .count = args.m, .arranged = arranged};
  const fp8::ScaleRows b{.scales = scales_of(args.x_scales, args.num_rows, args.scale_type),
                         .count = args.n,
                         .arranged = arranged + std::int64_t{num_steps} * fp8::arranged_row(args.m)};
  const dim3 tiles(static_cast<unsigned>(sm90::ceil_div(num_steps, fp8::kArrangeTile)),
                   static_cast<unsigned>((fp8::arranged_row(args.m) + fp8::arranged_row(args.n)) / fp8::kArrangeTile));
  const auto prepare =
      args.scale_type == mx::ScaleType::kFloat32 ? fp8::prepare_wgrad<true> : fp8::prepare_wgrad<false>;
  prepare<<<tiles, dim3(fp8::kArrangeTile, fp8::kArrangeRows), 0, stream>>>(
      a, b, num_steps, parts_done, static_cast<int>(kSm90PartsBytes / sizeof(std::int32_t)));
  TESSERA_CUDA(cudaGetLastError());

  // Tiles of 256 × 128 or of 128 × 256 are chosen, whichever need less padding.
  const auto padded = [](int large, int small) {
    return std::int64_t{sm90::ceil_div(large, fp8::kLarge)} * fp8::kLarge * sm90::ceil_div(small, fp8::kSmall);
  };
  const bool is_wide = padded(args.n, args.m) < padded(args.m, args.n);
  const CUtensorMap d_y = operand_map(args.d_y_MR, 0, args.m, args.num_rows);
  const CUtensorMap x = operand_map(args.x_NR, 0, args.n, args.num_rows);
  const fp8::Params params{.offsets_E1 = args.offsets_E1,
                           .num_experts = args.num_experts,
                           .num_rows = args.num_rows,
                           .m = args.m,
                           .n = args.n,
                           .arranged_large = is_wide ? b.arranged : a.arranged,
                           .arranged_small = is_wide ? a.arranged : b.arranged,
                           .d_w_EMN = args.d_w_EMN,
                           .parts_done = parts_done,
                           .accumulate = args.accumulate};
  const auto launch = [&](auto square) {
    constexpr bool kSquare = decltype(square)::value;
    if (is_wide) {
      sm90::launch<fp8::blockwise_gemm<true, true, kSquare>, fp8::Shared>(args.num_sms, stream, x, d_y, params);
    } else {
      sm90::launch<fp8::blockwise_gemm<true, false, kSquare>, fp8::Shared>(args.num_sms, stream, d_y, x, params);
    }
  };
  args.x_is_square ? launch(std::true_type{}) : launch(std::false_type{});
}

void sm90_exact_forward(const Sm90ExactForward& args, cudaStream_t stream) {
  sm90::check_sizes(args, 16);
  const CUtensorMap x = bytes_map(args.x_RN, 0, args.num_rows, args.n, exact::kStep, CU_TENSOR_MAP_SWIZZLE_NONE);
  TensorMapSpec wide{.data = args.w_wide, .rank = 3};
  wide.sizes[0] = sm90::ceil_div(args.n, exact::kStep) * exact::kStep;
  wide.sizes[1] = args.m;
  wide.sizes[2] = args.num_experts;
  wide.strides_bytes[0] = 2 * wide.sizes[0];
  wide.strides_bytes[1] = wide.strides_bytes[0] * args.m;
  wide.box[0] = exact::kStep;
  wide.box[1] = exact::kBox;
  const exact::Params params{.offsets_E1 = args.offsets_E1,
                             .num_experts = args.num_experts,
                             .num_rows = args.num_rows,
                             .m = args.m,
                             .n = args.n,
                             .x_scales = scales_of(args.x_scales, args.n, mx::ScaleType::kE8M0),
                             .y_RM = args.y_RM};
  sm90::launch<exact::exact_gemm, exact::Shared>(args.num_sms, stream, x, make_tensor_map(wide), params);
}

}  // namespace tessera::cuda
