#include <algorithm>

#include "device/cuda_check.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.cuh"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
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
  spec.box[1] = sm90::kPiece;
  return make_tensor_map(spec);
}
template <Product kProduct>
CUtensorMap mn_major(TensorMapSpec spec) {
  spec.box[0] = sm90::kChunk;
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
  for (std::uint64_t& stride : spec.strides_bytes) stride *= 2;
  spec.box[0] = spec.box[1] = sm90::kGradientBox;
  return make_tensor_map(spec);
}

/// Launches at most one block on each of num_sms SMs, and at most as many clusters as the GPU holds at once.
template <Product kProduct, bool kTransposed>
void launch(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& out, const sm90::Params& params, int num_sms,
            cudaStream_t stream) {
  constexpr auto kernel = sm90::grouped_gemm<kProduct, kTransposed>;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sizeof(sm90::Shared<kProduct>);
  config.stream = stream;
  // The attribute must be set on each GPU of the process. All GPUs hold the same number of clusters.
  TESSERA_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(sm90::Shared<kProduct>)));
  static const int num_clusters = [&config] {
    cudaLaunchConfig_t any = config;
    any.gridDim = dim3(sm90::kCluster);
    int clusters = 0;
    TESSERA_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &any));
    return clusters;
  }();
  config.gridDim = dim3(static_cast<unsigned>(std::min(num_clusters, num_sms / sm90::kCluster) * sm90::kCluster));
  TESSERA_CUDA(cudaLaunchKernelEx(&config, kernel, a, b, out, params));
}

void check(int num_experts, int num_rows, int m, int n) {
  TESSERA_CHECK(num_experts > 0 && num_experts <= kSm90MaxExperts, "{} experts", num_experts);
  TESSERA_CHECK(num_rows > 0 && m > 0 && n > 0 && m % 8 == 0 && n % 8 == 0, "rows {}, m {}, n {}", num_rows, m, n);
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
  const auto [x_RN, w_EMN, offsets_E1, y_RM, num_experts, num_rows, m, n, num_sms] = args;
  check(num_experts, num_rows, m, n);
  const CUtensorMap x = k_major<Product::kForward>(matrix(x_RN, 0, num_rows, n));
  const CUtensorMap w = k_major<Product::kForward>(matrix(w_EMN, num_experts, m, n));
  const CUtensorMap y = output_map(y_RM, num_rows, m);
  const sm90::Params params{.offsets_E1 = offsets_E1, .num_experts = num_experts, .m = m, .n = n, .output = y_RM};
  if (transpose_rows(num_experts, num_rows, m)) {
    launch<Product::kForward, true>(w, x, y, params, num_sms, stream);
  } else {
    launch<Product::kForward, false>(x, w, y, params, num_sms, stream);
  }
}

void sm90_grouped_dgrad(const Sm90GroupedDgrad& args, cudaStream_t stream) {
  const auto [d_y_RM, w_EMN, offsets_E1, d_x_RN, num_experts, num_rows, m, n, num_sms] = args;
  check(num_experts, num_rows, m, n);
  const CUtensorMap d_y = k_major<Product::kDgrad>(matrix(d_y_RM, 0, num_rows, m));
  const CUtensorMap w = mn_major<Product::kDgrad>(matrix(w_EMN, num_experts, m, n));
  const CUtensorMap d_x = output_map(d_x_RN, num_rows, n);
  const sm90::Params params{.offsets_E1 = offsets_E1, .num_experts = num_experts, .m = m, .n = n, .output = d_x_RN};
  if (transpose_rows(num_experts, num_rows, n)) {
    launch<Product::kDgrad, true>(w, d_y, d_x, params, num_sms, stream);
  } else {
    launch<Product::kDgrad, false>(d_y, w, d_x, params, num_sms, stream);
  }
}

void sm90_grouped_wgrad(const Sm90GroupedWgrad& args, cudaStream_t stream) {
  const auto [d_y_RM, x_RN, offsets_E1, d_w_EMN, scratch, accumulate, num_experts, num_rows, m, n, num_sms] = args;
  check(num_experts, num_rows, m, n);
  TESSERA_CUDA(cudaMemsetAsync(scratch, 0, kSm90WgradScratchBytes, stream));
  const CUtensorMap d_y = mn_major<Product::kWgrad>(matrix(d_y_RM, 0, num_rows, m));
  const CUtensorMap x = mn_major<Product::kWgrad>(matrix(x_RN, 0, num_rows, n));
  const CUtensorMap d_w = gradient_map(d_w_EMN, num_experts, m, n);
  const sm90::Params params{.offsets_E1 = offsets_E1,
                            .num_experts = num_experts,
                            .m = m,
                            .n = n,
                            .parts_done = static_cast<std::int32_t*>(scratch),
                            .accumulate = accumulate};
  if (padded(m, sm90::kTileB) * padded(n, sm90::kTileA) < padded(m, sm90::kTileA) * padded(n, sm90::kTileB)) {
    launch<Product::kWgrad, true>(x, d_y, d_w, params, num_sms, stream);
  } else {
    launch<Product::kWgrad, false>(d_y, x, d_w, params, num_sms, stream);
  }
}

}  // namespace tessera::cuda
