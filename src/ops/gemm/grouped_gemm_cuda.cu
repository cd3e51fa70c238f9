#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/grouped_simt.h"
#include "ops/gemm/library/library_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/kit/launch.cuh"

namespace tessera::cuda {
namespace {

// A block computes a tile of c(i, j) = sum over k of a(i, k) · b(j, k). Each thread computes kPerThread² numbers of it.
constexpr int kTile = 64, kStep = 16, kSide = 16, kPerThread = kTile / kSide, kThreads = kSide * kSide;

/// Describes a product. Strides are in numbers. For a weight's gradient, i and j run over M and N, and k runs over the
/// expert's rows. Otherwise i runs over the expert's rows. `of_expert` strides lead from one expert's numbers to the
/// next one's, and `of_row` strides from one routed row to the next.
struct SimtArgs {
  bool is_wgrad, accumulates;
  int num_experts;
  // The number of rows is at most size_k for a weight's gradient, and at most size_i otherwise.
  std::int64_t size_i, size_j, size_k;
  std::int64_t a_i, a_k, b_j, b_k, b_of_expert, c_i, c_of_expert, a_of_row, b_of_row, c_of_row;
  const std::int32_t* offsets;
};

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads) simt_kernel(SimtArgs args, const T* a, const T* b, Out* c) {
  // Find the expert and the tile. A weight's gradient has a layer of blocks per expert. Otherwise the rows are cut into
  // tiles expert by expert.
  int expert = static_cast<int>(blockIdx.z);
  std::int64_t tile = blockIdx.y;
  if (!args.is_wgrad) {
    for (expert = 0; expert < args.num_experts; ++expert) {
      const std::int64_t tiles = (args.offsets[expert + 1] - args.offsets[expert] + kTile - 1) / kTile;
      if (tile < tiles) break;
      tile -= tiles;
    }
    if (expert == args.num_experts) return;
  }
  const std::int64_t first_row = args.offsets[expert], num_rows = args.offsets[expert + 1] - first_row;
  const std::int64_t size_i = args.is_wgrad ? args.size_i : num_rows, size_k = args.is_wgrad ? num_rows : args.size_k;
  a += first_row * args.a_of_row;
  b += first_row * args.b_of_row + expert * args.b_of_expert;
  c += first_row * args.c_of_row + expert * args.c_of_expert;
  const std::int64_t i0 = tile * kTile, j0 = std::int64_t{blockIdx.x} * kTile;
  const int ti = static_cast<int>(threadIdx.x) / kSide, tj = static_cast<int>(threadIdx.x) % kSide;

  __shared__ float a_tile[kStep][kTile + 1], b_tile[kStep][kTile + 1];
  float sums[kPerThread][kPerThread] = {};
  for (std::int64_t k0 = 0; k0 < size_k; k0 += kStep) {
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
      const int side = at / kStep, step = at % kStep;
      const bool in_k = k0 + step < size_k;
      a_tile[step][side] =
          in_k && i0 + side < size_i ? to_float(a[(i0 + side) * args.a_i + (k0 + step) * args.a_k]) : 0.0f;
      b_tile[step][side] =
          in_k && j0 + side < args.size_j ? to_float(b[(j0 + side) * args.b_j + (k0 + step) * args.b_k]) : 0.0f;
    }
    __syncthreads();
    for (int step = 0; step < kStep; ++step) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          sums[i][j] += a_tile[step][ti + i * kSide] * b_tile[step][tj + j * kSide];
        }
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kPerThread; ++i) {
    for (int j = 0; j < kPerThread; ++j) {
      const std::int64_t row = i0 + ti + i * kSide, column = j0 + tj + j * kSide;
      if (row >= size_i || column >= args.size_j) continue;
      Out& target = c[row * args.c_i + column];
      target = from_float<Out>(args.accumulates ? to_float(target) + sums[i][j] : sums[i][j]);
    }
  }
}

enum class Kernel { kSm90, kLibrary, kSimt };

/// Returns the kernel for products of rows of this type with experts of this shape. Measuring without a GPU assumes
/// Hopper.
Kernel kernel_for(const Context& op, DType dtype, const Shape& shape_EMN) {
  const std::int64_t experts = shape_EMN[0], m = shape_EMN[1], n = shape_EMN[2];
  if (dtype != DType::kBFloat16 || m % 8 != 0 || n % 8 != 0 || experts > kLibraryMaxExperts) return Kernel::kSimt;
  const bool prefers_library = op.cuda != nullptr && op.cuda->prefers_library_grouped_gemm();
  return may_be_hopper(op) && experts <= kSm90MaxExperts && !prefers_library ? Kernel::kSm90 : Kernel::kLibrary;
}

/// Allocates the library's scratch. Measuring without a GPU assumes as many SMs as any GPU has.
std::byte* library_scratch(const Context& op) {
  constexpr int kMostSms = 160;
  if (op.cuda == nullptr) return op.arena->allocate_bytes(sm90_library_scratch_bytes(kMostSms));
  const auto bytes = op.cuda->compute_capability() == 9 ? sm90_library_scratch_bytes : sm100_library_scratch_bytes;
  return op.arena->allocate_bytes(bytes(op.cuda->num_sms()));
}

LibraryProduct library_product(GroupedKind kind) {
  if (kind == GroupedKind::kForward) return LibraryProduct::kForward;
  return kind == GroupedKind::kDgrad ? LibraryProduct::kDgrad : LibraryProduct::kWgrad;
}

/// Computes a product with the library. `a` and `b` are the operands in the order of the operator's.
void run_library(const Context& op, GroupedKind kind, const Tensor& a, const Tensor& b, const Tensor& offsets_E1,
                 const Tensor& out, Write write) {
  const ArenaScope scope(*op.arena);
  std::byte* scratch = library_scratch(op);
  if (op.measuring()) return;
  const Shape& shape_EMN = kind == GroupedKind::kWgrad ? out.shape() : b.shape();
  const auto run = op.cuda->compute_capability() == 9 ? sm90_library_grouped : sm100_library_grouped;
  run({.product = library_product(kind),
       .a = numbers<const __nv_bfloat16>(a),
       .b = numbers<const __nv_bfloat16>(b),
       .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
       .c = out.raw(),
       .scratch = scratch,
       .accumulate = write == Write::kAccumulate,
       .num_experts = static_cast<int>(shape_EMN[0]),
       .m = static_cast<int>(shape_EMN[1]),
       .n = static_cast<int>(shape_EMN[2]),
       .num_sms = op.cuda->num_sms()},
      stream_of(op));
}

/// Reports the product as slow if it has no fast kernel. Float32 is exempt, because it is for comparisons and has no
/// other kernel.
void tell_if_slow(const Context& op, DType dtype, const Shape& shape_EMN) {
  if (!op.measuring() || op.cuda == nullptr || dtype != DType::kBFloat16) return;
  op.cuda->add_slow_operator(
      fmt::format("bfloat16 products of {} experts, {} x {}, run without tensor cores: these take up to {} experts and "
                  "sizes that are multiples of 8",
                  shape_EMN[0], shape_EMN[1], shape_EMN[2], kLibraryMaxExperts));
}

/// Computes a product with a kernel that is not one of Hopper's.
void run_other(const Context& op, Kernel kernel, GroupedKind kind, const Tensor& a, const Tensor& b,
               const Tensor& offsets_E1, const Tensor& out, Write write) {
  if (kernel == Kernel::kLibrary) return run_library(op, kind, a, b, offsets_E1, out, write);
  tell_if_slow(op, a.dtype(), kind == GroupedKind::kWgrad ? out.shape() : b.shape());
  grouped_simt(op, kind, a, b, offsets_E1, out, write);
}

}  // namespace

void grouped_simt(const Context& op, GroupedKind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                  const Tensor& offsets_E1, const Tensor& out, Write write) {
  if (op.measuring()) return;
  const bool of_columns = kind == GroupedKind::kWgradOfColumns, is_wgrad = kind == GroupedKind::kWgrad || of_columns;
  const Tensor& w_EMN = is_wgrad ? out : w_or_x;
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2);
  const std::int64_t rows = x_or_dy.dim(of_columns ? 1 : 0);
  SimtArgs args{.is_wgrad = is_wgrad,
                .accumulates = write == Write::kAccumulate,
                .num_experts = static_cast<int>(experts),
                .size_i = rows,
                .size_j = n,
                .size_k = m,
                .a_i = 1,
                .a_k = 1,
                .b_j = 1,
                .b_k = 1,
                .b_of_expert = 0,
                .c_i = 0,
                .c_of_expert = 0,
                .a_of_row = 0,
                .b_of_row = 0,
                .c_of_row = 0,
                .offsets = numbers<const std::int32_t>(offsets_E1)};
  switch (kind) {
    case GroupedKind::kForward:
      args.size_j = m, args.size_k = n;
      args.a_i = args.a_of_row = args.b_j = n;
      args.b_of_expert = m * n;
      args.c_i = args.c_of_row = m;
      break;
    case GroupedKind::kDgrad:
      args.a_i = args.a_of_row = m;
      args.b_k = args.c_i = args.c_of_row = n;
      args.b_of_expert = m * n;
      break;
    case GroupedKind::kWgrad:
      args.size_i = m, args.size_k = rows;
      args.a_k = args.a_of_row = m;
      args.b_k = args.b_of_row = n;
      args.c_i = n, args.c_of_expert = m * n;
      break;
    case GroupedKind::kWgradOfColumns:
      args.size_i = m, args.size_k = rows;
      args.a_i = args.b_j = rows;
      args.a_of_row = args.b_of_row = 1;
      args.c_i = n, args.c_of_expert = m * n;
      break;
  }
  const auto tiles = [](std::int64_t size) { return static_cast<unsigned>((size + kTile - 1) / kTile); };
  // Each expert may have one tile of rows that is not full.
  const dim3 grid(tiles(args.size_j), is_wgrad ? tiles(m) : tiles(rows) + static_cast<unsigned>(experts),
                  is_wgrad ? static_cast<unsigned>(experts) : 1);
  for_float_type(x_or_dy.dtype(), [&]<typename T>(T) {
    for_float_type(out.dtype(), [&]<typename Out>(Out) {
      simt_kernel<T, Out><<<grid, kThreads, 0, stream_of(op)>>>(args, numbers<const T>(x_or_dy),
                                                                numbers<const T>(w_or_x), numbers<Out>(out));
    });
  });
}

void grouped_linear_forward(const Context& op, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM) {
  const Kernel kernel = kernel_for(op, x_RN.dtype(), w_EMN.shape());
  if (kernel != Kernel::kSm90)
    return run_other(op, kernel, GroupedKind::kForward, x_RN, w_EMN, offsets_E1, y_RM, Write::kAssign);
  if (op.measuring()) return;
  sm90_grouped_forward({.x_RN = numbers<const __nv_bfloat16>(x_RN),
                        .w_EMN = numbers<const __nv_bfloat16>(w_EMN),
                        .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                        .y_RM = numbers<__nv_bfloat16>(y_RM),
                        .num_experts = static_cast<int>(w_EMN.dim(0)),
                        .num_rows = static_cast<int>(x_RN.dim(0)),
                        .m = static_cast<int>(w_EMN.dim(1)),
                        .n = static_cast<int>(w_EMN.dim(2)),
                        .num_sms = op.cuda->num_sms()},
                       stream_of(op));
}

void grouped_linear_dgrad(const Context& op, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  const Kernel kernel = kernel_for(op, d_y_RM.dtype(), w_EMN.shape());
  if (kernel != Kernel::kSm90)
    return run_other(op, kernel, GroupedKind::kDgrad, d_y_RM, w_EMN, offsets_E1, d_x_RN, Write::kAssign);
  if (op.measuring()) return;
  sm90_grouped_dgrad({.d_y_RM = numbers<const __nv_bfloat16>(d_y_RM),
                      .w_EMN = numbers<const __nv_bfloat16>(w_EMN),
                      .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                      .d_x_RN = numbers<__nv_bfloat16>(d_x_RN),
                      .num_experts = static_cast<int>(w_EMN.dim(0)),
                      .num_rows = static_cast<int>(d_y_RM.dim(0)),
                      .m = static_cast<int>(w_EMN.dim(1)),
                      .n = static_cast<int>(w_EMN.dim(2)),
                      .num_sms = op.cuda->num_sms()},
                     stream_of(op));
}

void grouped_linear_wgrad(const Context& op, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN, Write write) {
  const Kernel kernel = kernel_for(op, x_RN.dtype(), d_w_EMN.shape());
  if (kernel != Kernel::kSm90)
    return run_other(op, kernel, GroupedKind::kWgrad, d_y_RM, x_RN, offsets_E1, d_w_EMN, write);
  const ArenaScope scope(*op.arena);
  std::byte* scratch = op.arena->allocate_bytes(kSm90PartsBytes);
  if (op.measuring()) return;
  sm90_grouped_wgrad({.d_y_RM = numbers<const __nv_bfloat16>(d_y_RM),
                      .x_RN = numbers<const __nv_bfloat16>(x_RN),
                      .offsets_E1 = numbers<const std::int32_t>(offsets_E1),
                      .d_w_EMN = numbers<float>(d_w_EMN),
                      .scratch = scratch,
                      .accumulate = write == Write::kAccumulate,
                      .num_experts = static_cast<int>(d_w_EMN.dim(0)),
                      .num_rows = static_cast<int>(x_RN.dim(0)),
                      .m = static_cast<int>(d_w_EMN.dim(1)),
                      .n = static_cast<int>(d_w_EMN.dim(2)),
                      .num_sms = op.cuda->num_sms()},
                     stream_of(op));
}

}  // namespace tessera::cuda
