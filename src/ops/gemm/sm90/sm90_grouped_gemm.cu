#include "ops/gemm/sm90/sm90_grouped_gemm.cuh"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_launch.cuh"
#include "ops/kit/tensor_map.h"

namespace tessera::cuda {

namespace {

using sm90::Product;

/// Describes a bfloat16 operand [experts, rows, columns], or [rows, columns] if `experts` is 0.
TensorMapSpec matrix(const __nv_bfloat16* data, int experts, int rows, int columns) {
  TensorMapSpec spec{.data = data, .rank = experts == 0 ? 2 : 3};
  spec.sizes[0] = columns;
  spec.sizes[1] = rows;
  spec.sizes[2] = experts;
  spec.strides_bytes[0] = std::uint64_t{2} * columns;
  spec.strides_bytes[1] = spec.strides_bytes[0] * rows;
  return spec;
}

/// Return the map of an operand of this product whose contiguous dim is K (k_major) or not K (mn_major).
template <Product kProduct>
CUtensorMap k_major(TensorMapSpec spec) {
  spec.box[0] = sm90::Sizes<kProduct>::kStepK;
  spec.box[1] = sm90::kBox;
  return make_tensor_map(spec);
}
template <Product kProduct>
CUtensorMap mn_major(TensorMapSpec spec) {
  spec.box[0] = sm90::kAtom;
  spec.box[1] = sm90::Sizes<kProduct>::kStepK;
  return make_tensor_map(spec);
}

CUtensorMap output_map(__nv_bfloat16* data, int rows, int columns) {
  TensorMapSpec spec = matrix(data, 0, rows, columns);
  spec.box[0] = spec.box[1] = sm90::kOutputBox;
  return make_tensor_map(spec);
}

CUtensorMap gradient_map(float* data, int experts, int rows, int columns) {
  TensorMapSpec spec = matrix(nullptr, experts, rows, columns);
  spec.data = data;
  spec.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  // matrix() counts 2 bytes per number.
  for (std::uint64_t& stride : spec.strides_bytes) stride *= 2;
  spec.box[0] = spec.box[1] = sm90::kGradientBox;
  return make_tensor_map(spec);
}

template <Product kProduct, bool kTransposed>
void launch(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& out, const sm90::Params& params, int num_sms,
            cudaStream_t stream) {
  sm90::launch<sm90::grouped_gemm<kProduct, kTransposed>, sm90::Shared<kProduct>>(num_sms, stream, a, b, out, params);
}

double padded(int size, int tile) { return static_cast<double>(sm90::ceil_div(size, tile)) * tile; }

/// Returns whether tiles of 256 rows × 128 columns compute less than tiles of 128 × 256, padding included. Groups end
/// half a tile early on average.
bool transpose_rows(int num_experts, int num_rows, int columns) {
  const double group_ends = 0.5 * num_experts;
  return padded(columns, sm90::kTileA) * (num_rows + group_ends * sm90::kTileB) <
         padded(columns, sm90::kTileB) * (num_rows + group_ends * sm90::kTileA);
}

}  // namespace

void sm90_grouped_forward(const Sm90GroupedForward& args, cudaStream_t stream) {
  sm90::check_sizes(args, 8);
  const CUtensorMap x = k_major<Product::kForward>(matrix(args.x_RN, 0, args.num_rows, args.n));
  const CUtensorMap w = k_major<Product::kForward>(matrix(args.w_EMN, args.num_experts, args.m, args.n));
  const CUtensorMap y = output_map(args.y_RM, args.num_rows, args.m);
  const sm90::Params params{
      .offsets_E1 = args.offsets_E1, .num_experts = args.num_experts, .m = args.m, .n = args.n, .output = args.y_RM};
  if (transpose_rows(args.num_experts, args.num_rows, args.m)) {
    launch<Product::kForward, true>(w, x, y, params, args.num_sms, stream);
  } else {
    launch<Product::kForward, false>(x, w, y, params, args.num_sms, stream);
  }
}

void sm90_grouped_dgrad(const Sm90GroupedDgrad& args, cudaStream_t stream) {
  sm90::check_sizes(args, 8);
  const CUtensorMap d_y = k_major<Product::kDgrad>(matrix(args.d_y_RM, 0, args.num_rows, args.m));
  const CUtensorMap w = mn_major<Product::kDgrad>(matrix(args.w_EMN, args.num_experts, args.m, args.n));
  const CUtensorMap d_x = output_map(args.d_x_RN, args.num_rows, args.n);
  const sm90::Params params{
      .offsets_E1 = args.offsets_E1, .num_experts = args.num_experts, .m = args.m, .n = args.n, .output = args.d_x_RN};
  if (transpose_rows(args.num_experts, args.num_rows, args.n)) {
    launch<Product::kDgrad, true>(w, d_y, d_x, params, args.num_sms, stream);
  } else {
    launch<Product::kDgrad, false>(d_y, w, d_x, params, args.num_sms, stream);
  }
}

void sm90_grouped_wgrad(const Sm90GroupedWgrad& args, cudaStream_t stream) {
  sm90::check_sizes(args, 8);
  TESSERA_CUDA(cudaMemsetAsync(args.scratch, 0, kSm90PartsBytes, stream));
  const CUtensorMap d_y = mn_major<Product::kWgrad>(matrix(args.d_y_RM, 0, args.num_rows, args.m));
  const CUtensorMap x = mn_major<Product::kWgrad>(matrix(args.x_RN, 0, args.num_rows, args.n));
  const CUtensorMap d_w = gradient_map(args.d_w_EMN, args.num_experts, args.m, args.n);
  const sm90::Params params{.offsets_E1 = args.offsets_E1,
                            .num_experts = args.num_experts,
                            .m = args.m,
                            .n = args.n,
                            .parts_done = static_cast<std::int32_t*>(args.scratch),
                            .accumulate = args.accumulate};
  if (padded(args.m, sm90::kTileB) * padded(args.n, sm90::kTileA) <
      padded(args.m, sm90::kTileA) * padded(args.n, sm90::kTileB)) {
    launch<Product::kWgrad, true>(x, d_y, d_w, params, args.num_sms, stream);
  } else {
    launch<Product::kWgrad, false>(d_y, x, d_w, params, args.num_sms, stream);
  }
}

}  // namespace tessera::cuda
