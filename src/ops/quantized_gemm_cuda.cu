#include "ops/cuda/grouped_simt.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/sm90_grouped_gemm.h"
#include "ops/cuda/sm90_grouped_gemm_fp8.h"
#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/grouped_gemm.h"
#include "ops/quantize.h"
#include "ops/quantized_gemm.h"

// On Hopper, scales that hold for 128 numbers along the contraction go through the FP8 tensor cores, and MXFP8's blocks
// of 32 through the bfloat16 ones, which hold their numbers exactly. A dense product is a grouped one of one group.
// What these kernels do not take is widened in memory, like on a CPU, and multiplied by the operators of ops/gemm.h.
namespace tessera::cuda {
namespace {

bool is_e8m0(const mx::Quantized& x) { return x.format.scale_type == mx::ScaleType::kE8M0; }
bool is_wide_block(const mx::Quantized& x) { return x.format.along == mx::kWideBlock; }

/// The type that an operand is widened to.
DType wide_type(const mx::Quantized& x) { return is_e8m0(x) ? DType::kBFloat16 : DType::kFloat32; }

Tensor widened(const Context& op, const mx::Quantized& x, DType dtype) {
  const Tensor wide = op.arena->allocate(x.elements.shape(), dtype);
  tessera::dequantize(op, x, wide);
  return wide;
}

int to_int(std::int64_t size) { return static_cast<int>(size); }

enum class Kernel { kBlockwise, kExact, kNone };

/// Whether Hopper's kernels are chosen: also when measuring without a GPU, as if it were one.
bool may_be_hopper(const Context& op) { return op.cuda == nullptr || op.cuda->compute_capability() == 9; }

/// The kernel for y [R, M] = x [R, N] · w [E, M, N]ᵀ.
Kernel kernel_for(const Context& op, const mx::Quantized& x, const mx::Quantized& w, std::int64_t experts,
                  const Tensor& y) {
  const int last = w.elements.num_dims() - 1;
  const std::int64_t m = w.elements.dim(last - 1), n = w.elements.dim(last);
  if (!may_be_hopper(op) || y.dtype() != DType::kBFloat16 || !y.is_contiguous() || m % 16 != 0 || n % 16 != 0 ||
      experts > kSm90MaxExperts) {
    return Kernel::kNone;
  }
  if (is_e8m0(x)) return is_wide_block(x) && is_wide_block(w) ? Kernel::kBlockwise : Kernel::kExact;
  const bool is_blockwise =
      is_wide_block(x) && is_wide_block(w) && x.format.across == 1 && w.format.across == mx::kWideBlock;
  return is_blockwise ? Kernel::kBlockwise : Kernel::kNone;
}

__global__ void one_group_kernel(std::int32_t num_rows, std::int32_t* offsets) {
  offsets[threadIdx.x] = threadIdx.x == 0 ? 0 : num_rows;
}

/// The offsets of one group of so many rows.
Tensor one_group(const Context& op, std::int64_t num_rows) {
  const Tensor offsets_2 = op.arena->allocate({2}, DType::kInt32);
  if (!op.measuring()) {
    one_group_kernel<<<1, 2, 0, stream_of(op)>>>(static_cast<std::int32_t>(num_rows), numbers<std::int32_t>(offsets_2));
  }
  return offsets_2;
}

/// y rows = x rows · w_eᵀ by a kernel for Hopper.
void run(const Context& op, Kernel kernel, const mx::Quantized& x, const mx::Quantized& w, std::int64_t experts,
         const Tensor& offsets_E1, const Tensor& y) {
  const int last = w.elements.num_dims() - 1;
  const std::int64_t m = w.elements.dim(last - 1), n = w.elements.dim(last);
  if (kernel == Kernel::kBlockwise) {
    if (op.measuring()) return;
    return sm90_blockwise_forward({.x_RN = x.element_bytes(),
                                   .x_scales = x.scale_bytes(),
                                   .w_EMN = w.element_bytes(),
                                   .w_scales = w.scale_bytes(),
                                   .scale_type = x.format.scale_type,
                                   .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                                   .y_RM = numbers<__nv_bfloat16>(y),
                                   .num_experts = to_int(experts),
                                   .num_rows = to_int(y.dim(0)),
                                   .m = to_int(m),
                                   .n = to_int(n)},
                                  stream_of(op));
  }
  const Tensor wide = op.arena->allocate({experts, m, sm90_wide_row(to_int(n))}, DType::kBFloat16);
  if (op.measuring()) return;
  sm90_widen_weight({.w_EMN = w.element_bytes(),
                     .w_scales = w.scale_bytes(),
                     .wide = numbers<__nv_bfloat16>(wide),
                     .num_experts = to_int(experts),
                     .m = to_int(m),
                     .n = to_int(n)},
                    stream_of(op));
  sm90_exact_forward({.x_RN = x.element_bytes(),
                      .x_scales = x.scale_bytes(),
                      .w_wide = numbers<const __nv_bfloat16>(wide),
                      .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                      .y_RM = numbers<__nv_bfloat16>(y),
                      .num_experts = to_int(experts),
                      .num_rows = to_int(y.dim(0)),
                      .m = to_int(m),
                      .n = to_int(n)},
                     stream_of(op));
}

/// c (= or +=) a · bᵀ.
void multiply(const Context& op, const mx::Quantized& a, const mx::Quantized& b, const Tensor& c, Write write) {
  const ArenaScope scope(*op.arena);
  const Kernel kernel = kernel_for(op, a, b, 1, c);
  if (kernel != Kernel::kNone) {
    const Tensor target = write == Write::kAssign ? c : op.arena->allocate(c.shape(), c.dtype());
    run(op, kernel, a, b, 1, one_group(op, c.dim(0)), target);
    if (write == Write::kAccumulate) tessera::add(op, c, target, c);
    return;
  }
  const DType dtype = wide_type(a);
  const Tensor a_wide = widened(op, a, dtype), b_wide = widened(op, b, dtype);
  if (dtype == DType::kBFloat16 || c.dtype() == DType::kFloat32) {
    return tessera::gemm(op, a_wide, false, b_wide, true, c, write);
  }
  const Tensor product = op.arena->allocate(c.shape(), DType::kFloat32);
  tessera::gemm(op, a_wide, false, b_wide, true, product, Write::kAssign);
  write == Write::kAccumulate ? tessera::add(op, c, product, c) : tessera::convert(op, product, c);
}

/// y rows = x rows · w_eᵀ.
void multiply_grouped(const Context& op, const mx::Quantized& x, const mx::Quantized& w, const Tensor& offsets_E1,
                      const Tensor& y) {
  const ArenaScope scope(*op.arena);
  const Kernel kernel = kernel_for(op, x, w, w.elements.dim(0), y);
  if (kernel != Kernel::kNone) return run(op, kernel, x, w, w.elements.dim(0), offsets_E1, y);
  const DType dtype = y.dtype() == DType::kFloat32 ? DType::kFloat32 : wide_type(x);
  const Tensor x_wide = widened(op, x, dtype), w_wide = widened(op, w, dtype);
  const Tensor target = y.dtype() == dtype ? y : op.arena->allocate(y.shape(), dtype);
  tessera::grouped_linear_forward(op, x_wide, w_wide, offsets_E1, target);
  if (y.dtype() != dtype) tessera::convert(op, target, y);
}

// A tile of kTile × kTile numbers is turned in shared memory.
constexpr int kTile = 32, kTileRows = 8;

/// y [R, M] from x [M, R], widened.
__global__ void widen_transposed_kernel(const std::uint8_t* elements, const std::uint8_t* scales, std::int64_t m,
                                        std::int64_t num_rows, __nv_bfloat16* y) {
  __shared__ float tile[kTile][kTile + 1];
  const std::int64_t r0 = std::int64_t{blockIdx.x} * kTile, m0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t scales_per_row = (num_rows + mx::kBlock - 1) / mx::kBlock, r = r0 + threadIdx.x;
  for (int i = static_cast<int>(threadIdx.y); i < kTile; i += kTileRows) {
    if (m0 + i >= m || r >= num_rows) continue;
    const std::int64_t row = m0 + i;
    tile[i][threadIdx.x] = mx::value_of<mx::E4M3>(elements[row * num_rows + r]) *
                           mx::value_of_scale(scales[row * scales_per_row + r / mx::kBlock]);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y); i < kTile; i += kTileRows) {
    if (r0 + i < num_rows && m0 + threadIdx.x < m) {
      y[(r0 + i) * m + m0 + threadIdx.x] = from_float<__nv_bfloat16>(tile[threadIdx.x][i]);
    }
  }
}

Tensor widened_transposed(const Context& op, const mx::Quantized& x) {
  const std::int64_t m = x.elements.dim(0), num_rows = x.elements.dim(1);
  const Tensor wide = op.arena->allocate({num_rows, m}, DType::kBFloat16);
  if (op.measuring()) return wide;
  const dim3 grid(static_cast<unsigned>((num_rows + kTile - 1) / kTile),
                  static_cast<unsigned>((m + kTile - 1) / kTile));
  widen_transposed_kernel<<<grid, dim3(kTile, kTileRows), 0, stream_of(op)>>>(x.element_bytes(), x.scale_bytes(), m,
                                                                              num_rows, numbers<__nv_bfloat16>(wide));
  return wide;
}

/// d_w_EMN[e] (+= or =) d_yᵀ · x.
void wgrad(const Context& op, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR, const Tensor& offsets_E1,
           std::int64_t experts, const Tensor& d_w, Write write) {
  const std::int64_t m = d_y_MR.elements.dim(0), n = x_NR.elements.dim(0), num_rows = x_NR.elements.dim(1);
  const bool fits = may_be_hopper(op) && m % 16 == 0 && n % 16 == 0 && num_rows % x_NR.format.along == 0 &&
                    experts <= kSm90MaxExperts;
  if (fits && is_wide_block(d_y_MR) && is_wide_block(x_NR)) {
    std::byte* scratch = op.arena->allocate_bytes(sm90_blockwise_scratch_bytes(to_int(num_rows), to_int(m), to_int(n)));
    if (op.measuring()) return;
    return sm90_blockwise_wgrad({.d_y_MR = d_y_MR.element_bytes(),
                                 .d_y_scales = d_y_MR.scale_bytes(),
                                 .x_NR = x_NR.element_bytes(),
                                 .x_scales = x_NR.scale_bytes(),
                                 .scale_type = x_NR.format.scale_type,
                                 .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                                 .d_w_EMN = numbers<float>(d_w),
                                 .scratch = scratch,
                                 .accumulate = write == Write::kAccumulate,
                                 .num_experts = to_int(experts),
                                 .num_rows = to_int(num_rows),
                                 .m = to_int(m),
                                 .n = to_int(n)},
                                stream_of(op));
  }
  if (fits && is_e8m0(x_NR)) {
    const Tensor d_y = widened_transposed(op, d_y_MR), x = widened_transposed(op, x_NR);
    return tessera::grouped_linear_wgrad(op, d_y, x, offsets_E1, d_w.reshape({experts, m, n}), write);
  }
  const DType dtype = wide_type(x_NR);
  const Tensor d_y = widened(op, d_y_MR, dtype), x = widened(op, x_NR, dtype);
  grouped_simt(op, GroupedKind::kWgradOfColumns, d_y, x, offsets_E1, d_w.reshape({experts, m, n}), write);
}

}  // namespace

void linear_forward(const Context& op, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write) {
  multiply(op, x_TN, w_MN.rows, y_TM, write);
}

void linear_dgrad(const Context& op, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN, const Tensor& d_x_TN,
                  Write write) {
  TESSERA_CHECK(w_MN.columns.defined());
  multiply(op, d_y_TM, w_MN.columns, d_x_TN, write);
}

void linear_wgrad(const Context& op, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write) {
  TESSERA_CHECK(d_w_MN.is_contiguous(), "a gradient with stride {} on a GPU", d_w_MN.stride());
  const ArenaScope scope(*op.arena);
  wgrad(op, d_y_MT, x_NT, one_group(op, x_NT.elements.dim(1)), 1, d_w_MN, write);
}

void grouped_linear_forward(const Context& op, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM) {
  multiply_grouped(op, x_RN, w_EMN.rows, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& op, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN) {
  TESSERA_CHECK(w_EMN.columns.defined());
  multiply_grouped(op, d_y_RM, w_EMN.columns, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& op, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write) {
  const ArenaScope scope(*op.arena);
  wgrad(op, d_y_MR, x_NR, offsets_E1, d_w_EMN.dim(0), d_w_EMN, write);
}

}  // namespace tessera::cuda
