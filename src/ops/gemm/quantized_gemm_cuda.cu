#include <cuda_fp8.h>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/grouped_simt.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/gemm/sm100/sm100_block_scaled.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_grouped_gemm_fp8.h"
#include "ops/kit/launch.cuh"
#include "ops/quantize/pack_scales.h"
#include "ops/quantize/quantize.h"
#include "ops/runtime/blas_gemm.h"

// On Hopper, operands whose scales cover 128 or 256 numbers along the contraction use the FP8 tensor cores. Blocks of
// 32 use the bfloat16 tensor cores, which hold their numbers exactly, with weights in the wide form. A dense product is
// a grouped one with one group.
//
// On Blackwell, MXFP8 uses the block-scaled tensor cores for any block size, because memory holds a scale per row and
// 32 numbers. cuBLASLt computes dense products, and CUTLASS's kernel computes grouped ones.
//
// Operands that these kernels do not accept are widened in memory, as on a CPU. The operators of ops/gemm/gemm.h
// multiply them.
namespace tessera::cuda {
namespace {

bool is_e8m0(const mx::Quantized& x) { return x.format.scale_type == mx::ScaleType::kE8M0; }
/// Returns whether each 128 numbers of a row share a scale.
bool is_wide_block(const mx::Quantized& x) { return x.format.along % mx::kWideBlock == 0; }

int to_int(std::int64_t size) { return static_cast<int>(size); }

enum class Kernel { kBlockwise, kBlockScaled, kNone };

/// Returns whether the GPU is a Blackwell. Measuring without a GPU does not assume one.
bool is_blackwell(const Context& op) { return op.cuda != nullptr && op.cuda->compute_capability() == 10; }

/// Returns whether the block-scaled tensor cores can compute y [R, M] = x [R, N] · w [M, N]ᵀ or, for groups, w [E, M,
/// N]. cuBLASLt needs whole blocks, and the rows of all three matrices must be multiples of 16 bytes.
bool is_block_scaled(const Context& op, const mx::Quantized& x, const mx::Quantized& w, const Tensor& y) {
  const int last = w.elements.num_dims() - 1;
  const std::int64_t m = w.elements.dim(last - 1), n = w.elements.dim(last);
  if (!is_blackwell(op) || !is_e8m0(x) || m % 16 != 0 || n % 16 != 0) return false;
  if (last == 1) return n % mx::kBlock == 0 && y.dim(0) % 16 == 0 && y.stride() % 16 == 0;
  return y.dtype() == DType::kBFloat16 && y.is_contiguous() && w.elements.dim(0) <= kSm100MaxExperts;
}

/// Returns the kernel for y [R, M] = x [R, N] · w [E, M, N]ᵀ.
Kernel kernel_for(const Context& op, const mx::Quantized& x, const mx::Quantized& w, std::int64_t experts,
                  const Tensor& y) {
  const int last = w.elements.num_dims() - 1;
  const std::int64_t m = w.elements.dim(last - 1), n = w.elements.dim(last);
  if (is_block_scaled(op, x, w, y)) return Kernel::kBlockScaled;
  if (!may_be_hopper(op) || y.dtype() != DType::kBFloat16 || !y.is_contiguous() || m % 16 != 0 || n % 16 != 0 ||
      experts > kSm90MaxExperts) {
    return Kernel::kNone;
  }
  // The kernel reads one scale of w for 128 rows of it, and float32 scales of x by the row.
  const bool is_blockwise =
      is_wide_block(x) && is_wide_block(w) && w.format.square() && (is_e8m0(x) || x.format.across == 1);
  return is_blockwise ? Kernel::kBlockwise : Kernel::kNone;
}

__global__ void one_group_kernel(std::int32_t num_rows, std::int32_t* offsets) {
  offsets[threadIdx.x] = threadIdx.x == 0 ? 0 : num_rows;
}

/// Returns the offsets, or those of one group of num_rows rows if they are undefined.
Tensor offsets_of_groups(const Context& op, const Tensor& offsets_E1, std::int64_t num_rows) {
  if (offsets_E1.defined()) return offsets_E1;
  const Tensor offsets_2 = op.arena->allocate({2}, DType::kInt32);
  if (!op.measuring()) {
    one_group_kernel<<<1, 2, 0, stream_of(op)>>>(static_cast<std::int32_t>(num_rows), numbers<std::int32_t>(offsets_2));
  }
  return offsets_2;
}

/// Returns the packed scales of x, in groups of rows or of columns.
Tensor packed_scales(const Context& op, const mx::Quantized& x, std::int64_t num_groups, const Tensor& offsets_E1 = {},
                     bool groups_of_columns = false) {
  const int last = x.elements.num_dims() - 1;
  PackScales args{.scales = x.scale_bytes(),
                  .num_rows = x.elements.num_elements() / x.elements.dim(last),
                  .num_columns = x.elements.dim(last),
                  .groups_of_columns = groups_of_columns,
                  .num_groups = num_groups,
                  .offsets = numbers<const std::int32_t>(offsets_E1)};
  const Tensor packed = op.arena->allocate({args.bytes()}, DType::kFloat8E8M0);
  args.packed = numbers<std::uint8_t>(packed);
  if (!op.measuring()) pack_scales(args, stream_of(op));
  return packed;
}

/// Assigns or adds to c [M, N] the product a [M, K] · b [N, K]ᵀ on Blackwell's tensor cores.
void multiply_block_scaled(const Context& op, const mx::Quantized& a, const mx::Quantized& b, const Tensor& c,
                           Write write) {
  const BlasScales scales{.a = packed_scales(op, a, 1), .b = packed_scales(op, b, 1)};
  blas_gemm(op, a.elements, false, b.elements, true, c, write, scales);
}

/// Computes y rows = x rows · w_eᵀ on Blackwell's tensor cores.
void run_block_scaled(const Context& op, const mx::Quantized& x, const mx::Quantized& w, const Tensor& offsets_E1,
                      const Tensor& y) {
  const std::int64_t experts = w.elements.dim(0);
  const Tensor x_scales = packed_scales(op, x, experts, offsets_E1), w_scales = packed_scales(op, w, experts);
  std::byte* scratch = op.arena->allocate_bytes(sm100_forward_scratch_bytes(op.cuda->num_sms()));
  if (op.measuring()) return;
  sm100_grouped_forward({.x_RN = x.element_bytes(),
                         .x_scales = numbers<const std::uint8_t>(x_scales),
                         .w_EMN = w.element_bytes(),
                         .w_scales = numbers<const std::uint8_t>(w_scales),
                         .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                         .y_RM = numbers<__nv_bfloat16>(y),
                         .scratch = scratch,
                         .num_experts = to_int(experts),
                         .m = to_int(w.elements.dim(1)),
                         .n = to_int(w.elements.dim(2)),
                         .num_sms = op.cuda->num_sms()},
                        stream_of(op));
}

/// Assigns or adds to d_w_EMN[e] the product d_yᵀ · x on Blackwell's tensor cores.
void wgrad_block_scaled(const Context& op, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                        const Tensor& offsets_E1, std::int64_t experts, const Tensor& d_w, Write write) {
  const Tensor d_y_scales = packed_scales(op, d_y_MR, experts, offsets_E1, true),
               x_scales = packed_scales(op, x_NR, experts, offsets_E1, true);
  std::byte* scratch = op.arena->allocate_bytes(sm100_wgrad_scratch_bytes(op.cuda->num_sms()));
  if (op.measuring()) return;
  sm100_grouped_wgrad({.d_y_MR = d_y_MR.element_bytes(),
                       .d_y_scales = numbers<const std::uint8_t>(d_y_scales),
                       .x_NR = x_NR.element_bytes(),
                       .x_scales = numbers<const std::uint8_t>(x_scales),
                       .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                       .d_w_EMN = numbers<float>(d_w),
                       .scratch = scratch,
                       .accumulate = write == Write::kAccumulate,
                       .num_experts = to_int(experts),
                       .num_rows = to_int(x_NR.elements.dim(1)),
                       .m = to_int(d_y_MR.elements.dim(0)),
                       .n = to_int(x_NR.elements.dim(0)),
                       .num_sms = op.cuda->num_sms()},
                      stream_of(op));
}

/// Computes y rows = x rows · w_eᵀ on Hopper's FP8 tensor cores.
void run_blockwise(const Context& op, const mx::Quantized& x, const mx::Quantized& w, std::int64_t experts,
                   const Tensor& offsets_E1, const Tensor& y) {
  if (op.measuring()) return;
  sm90_blockwise_forward({.x_RN = x.element_bytes(),
                          .x_scales = x.scale_bytes(),
                          .w_EMN = w.element_bytes(),
                          .w_scales = w.scale_bytes(),
                          .scale_type = x.format.scale_type,
                          .has_widest_blocks = x.format.along == mx::kWidestBlock && w.format.along == mx::kWidestBlock,
                          .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                          .y_RM = numbers<__nv_bfloat16>(y),
                          .num_experts = to_int(experts),
                          .num_rows = to_int(y.dim(0)),
                          .m = to_int(y.dim(1)),
                          .n = to_int(x.elements.dim(1)),
                          .num_sms = op.cuda->num_sms()},
                         stream_of(op));
}

/// Computes y rows = x rows · w_eᵀ with a wide weight on Hopper's bfloat16 tensor cores.
void run_exact(const Context& op, const mx::Quantized& x, const Tensor& wide, std::int64_t experts,
               const Tensor& offsets_E1, const Tensor& y) {
  if (op.measuring()) return;
  sm90_exact_forward({.x_RN = x.element_bytes(),
                      .x_scales = x.scale_bytes(),
                      .w_wide = numbers<const __nv_bfloat16>(wide),
                      .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                      .y_RM = numbers<__nv_bfloat16>(y),
                      .num_experts = to_int(experts),
                      .num_rows = to_int(y.dim(0)),
                      .m = to_int(y.dim(1)),
                      .n = to_int(x.elements.dim(1)),
                      .num_sms = op.cuda->num_sms()},
                     stream_of(op));
}

/// Assigns or adds to c the result of run(target), which assigns it.
template <typename Run>
void assign_or_add(const Context& op, const Tensor& c, Write write, Run&& run) {
  const Tensor target = write == Write::kAssign ? c : op.arena->allocate(c.shape(), c.dtype());
  run(target);
  if (write == Write::kAccumulate) tessera::add(op, c, target, c);
}

/// Assigns or adds to c the product a · bᵀ, with b quantized or wide.
void multiply(const Context& op, const mx::Quantized& a, const mx::Quantized& b, const Tensor& wide, const Tensor& c,
              Write write) {
  const ArenaScope scope(*op.arena);
  if (wide.defined()) {
    return assign_or_add(op, c, write,
                         [&](const Tensor& y) { run_exact(op, a, wide, 1, offsets_of_groups(op, {}, y.dim(0)), y); });
  }
  const Kernel kernel = kernel_for(op, a, b, 1, c);
  if (kernel == Kernel::kBlockScaled) return multiply_block_scaled(op, a, b, c, write);
  if (kernel == Kernel::kBlockwise) {
    return assign_or_add(op, c, write, [&](const Tensor& y) { run_blockwise(op, a, b, 1, {}, y); });
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

/// Computes y rows = x rows · w_eᵀ, with w quantized or wide.
void multiply_grouped(const Context& op, const mx::Quantized& x, const mx::Quantized& w, const Tensor& wide,
                      const Tensor& offsets_E1, const Tensor& y) {
  if (wide.defined()) return run_exact(op, x, wide, wide.dim(0), offsets_E1, y);
  const ArenaScope scope(*op.arena);
  const Kernel kernel = kernel_for(op, x, w, w.elements.dim(0), y);
  if (kernel == Kernel::kBlockScaled) return run_block_scaled(op, x, w, offsets_E1, y);
  if (kernel == Kernel::kBlockwise) return run_blockwise(op, x, w, w.elements.dim(0), offsets_E1, y);
  const DType dtype = y.dtype() == DType::kFloat32 ? DType::kFloat32 : wide_type(x);
  const Tensor x_wide = widened(op, x, dtype), w_wide = widened(op, w, dtype);
  const Tensor target = y.dtype() == dtype ? y : op.arena->allocate(y.shape(), dtype);
  tessera::grouped_linear_forward(op, x_wide, w_wide, offsets_E1, target);
  if (y.dtype() != dtype) tessera::convert(op, target, y);
}

// A tile of kTileM × kTileR numbers is transposed in shared memory. A word of it holds two numbers with neighbouring m.
constexpr int kTileM = 64, kTileR = 128, kTurnThreads = 256;

/// Writes x [M, R] widened and transposed to y [R, M]. M is a multiple of 16, and R is a multiple of 32.
__global__ void __launch_bounds__(kTurnThreads)
    widen_transposed_kernel(const std::uint8_t* elements, const std::uint8_t* scales, std::int64_t m,
                            std::int64_t num_rows, __nv_bfloat16* y) {
  constexpr int kPairs = kTileM / 2, kBytes = 16;
  static_assert(kPairs * (kTileR / kBytes) == kTurnThreads);
  __shared__ std::uint32_t tile[kTileR][kPairs + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t r0 = std::int64_t{blockIdx.x} * kTileR, m0 = std::int64_t{blockIdx.y} * kTileM;
  // A warp reads 32 neighbouring bytes of 16 pairs of rows, and therefore writes to 32 different banks.
  const int pair = thread % 16 + thread / 32 % 2 * 16, chunk = thread / 16 % 2 + thread / 64 * 2;
  const std::int64_t r = r0 + chunk * kBytes, row = m0 + 2 * pair;
  if (row < m && r < num_rows) {
    std::uint32_t words[2][kBytes / 4];
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(elements + (row + i) * num_rows + r);
      memcpy(words[i], &bytes, sizeof bytes);
      scale[i] = mx::value_of_scale(scales[(row + i) * (num_rows / mx::kBlock) + r / mx::kBlock]);
    }
#pragma unroll
    for (int at = 0; at < kBytes; at += 2) {
      float2 numbers[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto two = static_cast<__nv_fp8x2_storage_t>(words[i][at / 4] >> at % 4 * 8);
        numbers[i] = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
      }
      const __nv_bfloat162 first = __floats2bfloat162_rn(numbers[0].x * scale[0], numbers[1].x * scale[1]);
      const __nv_bfloat162 second = __floats2bfloat162_rn(numbers[0].y * scale[0], numbers[1].y * scale[1]);
      memcpy(&tile[chunk * kBytes + at][pair], &first, sizeof first);
      memcpy(&tile[chunk * kBytes + at + 1][pair], &second, sizeof second);
    }
  }
  __syncthreads();
  const int lane = thread % kWarp;
  if (m0 + 2 * lane >= m) return;
  for (int i = thread / kWarp; i < kTileR && r0 + i < num_rows; i += kTurnThreads / kWarp) {
    reinterpret_cast<std::uint32_t*>(y + (r0 + i) * m + m0)[lane] = tile[i][lane];
  }
}

Tensor widened_transposed(const Context& op, const mx::Quantized& x) {
  const std::int64_t m = x.elements.dim(0), num_rows = x.elements.dim(1);
  const Tensor wide = op.arena->allocate({num_rows, m}, DType::kBFloat16);
  if (op.measuring()) return wide;
  const dim3 grid(static_cast<unsigned>((num_rows + kTileR - 1) / kTileR),
                  static_cast<unsigned>((m + kTileM - 1) / kTileM));
  widen_transposed_kernel<<<grid, kTurnThreads, 0, stream_of(op)>>>(x.element_bytes(), x.scale_bytes(), m, num_rows,
                                                                    numbers<__nv_bfloat16>(wide));
  return wide;
}

/// Assigns or adds to d_w_EMN[e] the product d_yᵀ · x. Without offsets, one expert has all rows.
void wgrad(const Context& op, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR, const Tensor& offsets_E1,
           std::int64_t experts, const Tensor& d_w, Write write) {
  const std::int64_t m = d_y_MR.elements.dim(0), n = x_NR.elements.dim(0), num_rows = x_NR.elements.dim(1);
  const bool are_whole = m % 16 == 0 && n % 16 == 0 && num_rows % x_NR.format.along == 0;
  if (is_blackwell(op) && are_whole && is_e8m0(x_NR) && experts <= kSm100MaxExperts) {
    const Tensor offsets = offsets_of_groups(op, offsets_E1, num_rows);
    return wgrad_block_scaled(op, d_y_MR, x_NR, offsets, experts, d_w, write);
  }
  const bool fits = may_be_hopper(op) && are_whole && experts <= kSm90MaxExperts;
  const bool has_scales_of_rows = is_e8m0(x_NR) || (x_NR.format.across == 1 && d_y_MR.format.across == 1);
  if (fits && is_wide_block(d_y_MR) && is_wide_block(x_NR) && has_scales_of_rows) {
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
                                 .x_is_square = x_NR.format.square(),
                                 .num_experts = to_int(experts),
                                 .num_rows = to_int(num_rows),
                                 .m = to_int(m),
                                 .n = to_int(n),
                                 .num_sms = op.cuda->num_sms()},
                                stream_of(op));
  }
  const Tensor offsets = offsets_of_groups(op, offsets_E1, num_rows);
  if (fits && is_e8m0(x_NR)) {
    const Tensor d_y = widened_transposed(op, d_y_MR), x = widened_transposed(op, x_NR);
    return tessera::grouped_linear_wgrad(op, d_y, x, offsets, d_w.reshape({experts, m, n}), write);
  }
  if (op.measuring() && op.cuda != nullptr) {
    op.cuda->add_slow_operator(fmt::format(
        "weights' gradients of {} experts, {} x {}, in 8 bits run without tensor cores: these take up to {} "
        "experts, and sizes that are multiples of 16",
        experts, m, n, kSm90MaxExperts));
  }
  const DType dtype = wide_type(x_NR);
  const Tensor d_y = widened(op, d_y_MR, dtype), x = widened(op, x_NR, dtype);
  grouped_simt(op, GroupedKind::kWgradOfColumns, d_y, x, offsets, d_w.reshape({experts, m, n}), write);
}

}  // namespace

WeightForm weight_form(const Context& op, const Shape& shape, const mx::Format& format, DType dtype) {
  const int last = shape.num_dims() - 1;
  const bool is_wide = may_be_hopper(op) && dtype == DType::kBFloat16 && format.scale_type == mx::ScaleType::kE8M0 &&
                       format.along == mx::kBlock && shape[last - 1] % 16 == 0 && shape[last] % 16 == 0 &&
                       (last == 1 || shape[0] <= kSm90MaxExperts);
  return is_wide ? WeightForm::kWide : WeightForm::kRowsAndColumns;
}

void linear_forward(const Context& op, const mx::Quantized& x_TN, const QuantizedWeight& w_MN, const Tensor& y_TM,
                    Write write) {
  multiply(op, x_TN, w_MN.rows, w_MN.wide_rows, y_TM, write);
}

void linear_dgrad(const Context& op, const mx::Quantized& d_y_TM, const QuantizedWeight& w_MN, const Tensor& d_x_TN,
                  Write write) {
  TESSERA_CHECK(w_MN.columns.defined() || w_MN.wide_columns.defined());
  multiply(op, d_y_TM, w_MN.columns, w_MN.wide_columns, d_x_TN, write);
}

void linear_wgrad(const Context& op, const mx::Quantized& d_y_MT, const mx::Quantized& x_NT, const Tensor& d_w_MN,
                  Write write) {
  TESSERA_CHECK(d_w_MN.is_contiguous(), "a gradient with stride {} on a GPU", d_w_MN.stride());
  const ArenaScope scope(*op.arena);
  if (is_block_scaled(op, d_y_MT, x_NT, d_w_MN)) return multiply_block_scaled(op, d_y_MT, x_NT, d_w_MN, write);
  wgrad(op, d_y_MT, x_NT, {}, 1, d_w_MN, write);
}

void grouped_linear_forward(const Context& op, const mx::Quantized& x_RN, const QuantizedWeight& w_EMN,
                            const Tensor& offsets_E1, const Tensor& y_RM) {
  multiply_grouped(op, x_RN, w_EMN.rows, w_EMN.wide_rows, offsets_E1, y_RM);
}

void grouped_linear_dgrad(const Context& op, const mx::Quantized& d_y_RM, const QuantizedWeight& w_EMN,
                          const Tensor& offsets_E1, const Tensor& d_x_RN) {
  TESSERA_CHECK(w_EMN.columns.defined() || w_EMN.wide_columns.defined());
  multiply_grouped(op, d_y_RM, w_EMN.columns, w_EMN.wide_columns, offsets_E1, d_x_RN);
}

void grouped_linear_wgrad(const Context& op, const mx::Quantized& d_y_MR, const mx::Quantized& x_NR,
                          const Tensor& offsets_E1, const Tensor& d_w_EMN, Write write) {
  const ArenaScope scope(*op.arena);
  wgrad(op, d_y_MR, x_NR, offsets_E1, d_w_EMN.dim(0), d_w_EMN, write);
}

}  // namespace tessera::cuda
