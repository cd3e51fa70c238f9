// CUTLASS's kernel for groups and its set-up, which the products of ops/gemm/sm100/sm100_block_scaled.h share. Each
// product has a separate source file, because the compiler needs up to 5 GiB for each.
#pragma once

#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "mx/block.h"
#include "ops/gemm/library/cutlass_groups.cuh"
#include "ops/gemm/sm100/sm100_block_scaled.h"
#include "ops/gemm/sm100/sm100_groups.h"

namespace tessera::cuda::sm100 {

using namespace cutlass_groups;

// One SM multiplies tiles of 128 × 256, 128 numbers along the contraction at a time. This is the largest tile of one
// SM's tensor core. Two SMs could share a tile of 256 rows, but groups of few rows would not fill it.
using Tile = cute::Shape<Int<128>, Int<256>, Int<128>>;
using Element = cutlass::float_e4m3_t;
using Operand = cutlass::mx_float8_t<Element>;  // element with its scales
using Scale = cutlass::float_ue8m0_t;
using ScaleConfig = cutlass::detail::Sm1xxBlockScaledConfig<mx::kBlock>;
constexpr int kAlignedBytes = 16;

/// Defines the types of a grouped product. C is the type of the addend, or void if there is none. D is the type of the
/// product.
template <typename C, typename D>
struct GroupedGemm {
  static constexpr int kAligned = kAlignedBytes / static_cast<int>(sizeof(D));
  // The part that is written at once. It has rows of 128 bytes, which is the width of the swizzle in shared memory. The
  // default would leave a float product no room for operands.
  using Part = cute::Shape<Int<128>, Int<128 / static_cast<int>(sizeof(D))>>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, Part, float, float, C, Rows*,
      kAligned, D, Rows*, kAligned, cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Operand, Rows*, kAlignedBytes, Operand, Columns*,
      kAlignedBytes, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  /// Holds what the kernel reads of every group. It is in the scratch.
  struct Groups {
    Problem::UnderlyingProblemShape shapes[kSm100MaxExperts];
    const Element* a[kSm100MaxExperts];
    const Element* b[kSm100MaxExperts];
    const Scale* a_scales[kSm100MaxExperts];
    const Scale* b_scales[kSm100MaxExperts];
    D* d[kSm100MaxExperts];
    typename Kernel::InternalStrideA stride_a[kSm100MaxExperts];
    typename Kernel::InternalStrideB stride_b[kSm100MaxExperts];
    typename Kernel::InternalStrideD stride_d[kSm100MaxExperts];
    typename Mainloop::InternalLayoutSFA layout_a[kSm100MaxExperts];
    typename Mainloop::InternalLayoutSFB layout_b[kSm100MaxExperts];
  };
};

// Returns whether CUTLASS's order of the scales is that of mx/scale_layout.h.
constexpr bool has_our_layout(int rows, int k) {
  const auto layout = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(rows, 1, k, 1));
  for (int r = 0; r < rows; r += 7) {
    for (int i = 0; i < k; i += 16) {
      if (layout(cute::make_coord(r, i, 0)) !=
          mx::packed_scale_offset(r, i / mx::kBlock, (k + mx::kBlock - 1) / mx::kBlock)) {
        return false;
      }
    }
  }
  return true;
}
static_assert(has_our_layout(128, 128) && has_our_layout(300, 416) && has_our_layout(144, 272));

/// Holds a product of groups in the form that the set-up kernel and CUTLASS read.
template <typename D>
struct Operands {
  const std::uint8_t* a = nullptr;
  const std::uint8_t* b = nullptr;
  const std::uint8_t* a_scales = nullptr;
  const std::uint8_t* b_scales = nullptr;
  D* d = nullptr;
  std::int64_t stride_ab = 0;  // stride between rows of a, and between rows of b
  const std::int32_t* offsets_E1 = nullptr;
  int num_experts = 0, m = 0, n = 0;
};

template <typename G, bool kIsWgrad, typename D>
__global__ void set_up_kernel(Operands<D> args, typename G::Groups* groups) {
  const int e = static_cast<int>(blockIdx.x * kSetUpThreads + threadIdx.x);
  if (e >= args.num_experts) return;
  const std::int64_t first = args.offsets_E1[e], last = args.offsets_E1[e + 1];
  const Sm100Group group = kIsWgrad ? sm100_wgrad_group(e, first, last, args.m, args.n)
                                    : sm100_forward_group(e, first, last, args.m, args.n);
  const int m = static_cast<int>(group.m), n = static_cast<int>(group.n), k = static_cast<int>(group.k);
  groups->shapes[e] = {m, n, k};
  groups->a[e] = reinterpret_cast<const Element*>(args.a + group.a);
  groups->b[e] = reinterpret_cast<const Element*>(args.b + group.b);
  groups->a_scales[e] = reinterpret_cast<const Scale*>(args.a_scales + group.a_scales);
  groups->b_scales[e] = reinterpret_cast<const Scale*>(args.b_scales + group.b_scales);
  groups->d[e] = args.d + group.d;
  groups->stride_a[e] = {args.stride_ab, {}, {}};
  groups->stride_b[e] = {args.stride_ab, {}, {}};
  groups->stride_d[e] = {group.n, {}, {}};
  groups->layout_a[e] = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1));
  groups->layout_b[e] = ScaleConfig::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1));
}

template <typename G, bool kIsWgrad, typename D>
typename G::Gemm::Arguments arguments_for(const Operands<D>& args, bool accumulate, std::byte* scratch, int num_sms) {
  // The groups are in device memory. The host only takes addresses.
  auto* groups = reinterpret_cast<typename G::Groups*>(scratch);
  typename G::Gemm::Arguments result;
  result.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  result.problem_shape = {args.num_experts, groups->shapes, nullptr};
  result.mainloop.ptr_A = groups->a;
  result.mainloop.dA = groups->stride_a;
  result.mainloop.ptr_B = groups->b;
  result.mainloop.dB = groups->stride_b;
  result.mainloop.ptr_SFA = groups->a_scales;
  result.mainloop.layout_SFA = groups->layout_a;
  result.mainloop.ptr_SFB = groups->b_scales;
  result.mainloop.layout_SFB = groups->layout_b;
  result.epilogue.thread.alpha = 1.0f;
  result.epilogue.thread.beta = accumulate ? 1.0f : 0.0f;
  if constexpr (kIsWgrad) {
    result.epilogue.ptr_C = const_cast<const D**>(groups->d);
    result.epilogue.dC = groups->stride_d;
  }
  result.epilogue.ptr_D = groups->d;
  result.epilogue.dD = groups->stride_d;
  result.hw_info.sm_count = num_sms;
  return result;
}

template <typename G, bool kIsWgrad, typename D>
void multiply(const Operands<D>& args, bool accumulate, std::byte* scratch, int num_sms, cudaStream_t stream) {
  TESSERA_CHECK(args.num_experts > 0 && args.num_experts <= kSm100MaxExperts, "{} experts", args.num_experts);
  TESSERA_CHECK(args.m > 0 && args.n > 0 && args.m % 16 == 0 && args.n % 16 == 0, "m {}, n {}", args.m, args.n);
  set_up_kernel<G, kIsWgrad><<<set_up_blocks(args.num_experts), kSetUpThreads, 0, stream>>>(
      args, reinterpret_cast<typename G::Groups*>(scratch));
  TESSERA_CUDA(cudaGetLastError());
  const auto arguments = arguments_for<G, kIsWgrad>(args, accumulate, scratch, num_sms);
  run<G>(arguments, scratch, stream);
}

}  // namespace tessera::cuda::sm100
