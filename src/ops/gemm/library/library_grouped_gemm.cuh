// CUTLASS's kernel for groups in bfloat16, and its set-up, for both architectures (library_grouped_gemm.h). They share
// all but the names of CUTLASS's schedules. So tests on Hopper also check Blackwell's sizes, addresses and strides.
#pragma once

#include <algorithm>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "ops/gemm/library/cutlass_groups.cuh"
#include "ops/gemm/library/library_grouped_gemm.h"

namespace tessera::cuda::library {

using namespace cutlass_groups;

// Tiles of 128 × 256, 64 numbers along the contraction at a time. On Blackwell this is the largest tile of one SM's
// tensor core. Two SMs could share a tile of 256 rows, but groups of few rows would not fill it.
using Tile = cute::Shape<Int<128>, Int<256>, Int<64>>;
using Element = cutlass::bfloat16_t;
constexpr int kAligned = 8;

/// Names CUTLASS's schedules of an architecture.
template <typename Arch>
struct Schedules;
template <>
struct Schedules<cutlass::arch::Sm90> {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
template <>
struct Schedules<cutlass::arch::Sm100> {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmSm100;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm;
};

/// Defines the types of a grouped product d = a · b. kProduct says how its operands lie in memory.
template <typename Arch, LibraryProduct kProduct>
struct GroupedGemm {
  static constexpr bool kIsWgrad = kProduct == LibraryProduct::kWgrad;
  using LayoutA = std::conditional_t<kIsWgrad, Columns, Rows>;                              // d_y is [k, m]
  using LayoutB = std::conditional_t<kProduct == LibraryProduct::kForward, Columns, Rows>;  // w is [n, k]
  using C = std::conditional_t<kIsWgrad, float, void>;                                      // the addend
  using D = std::conditional_t<kIsWgrad, float, Element>;
  static constexpr int kAlignedD = 16 / static_cast<int>(sizeof(D));
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
      float, C, Rows*, kAlignedD, D, Rows*, kAlignedD, typename Schedules<Arch>::Epilogue>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAligned, Element, LayoutB*, kAligned, float, Tile,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedules<Arch>::Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  /// Holds what the kernel reads of every group. It is in the scratch.
  struct Groups {
    Problem::UnderlyingProblemShape shapes[kLibraryMaxExperts];
    const Element* a[kLibraryMaxExperts];
    const Element* b[kLibraryMaxExperts];
    D* d[kLibraryMaxExperts];
    typename Kernel::InternalStrideA stride_a[kLibraryMaxExperts];
    typename Kernel::InternalStrideB stride_b[kLibraryMaxExperts];
    typename Kernel::InternalStrideD stride_d[kLibraryMaxExperts];
  };
};

/// Sets the stride of a matrix between its rows or, if numbers of a row are not neighbours, between its columns.
template <typename Stride>
__device__ void set_stride(Stride& stride, std::int64_t numbers) {
  if constexpr (std::is_same_v<std::remove_cvref_t<decltype(cute::get<1>(stride))>, Int<1>>) {
    cute::get<0>(stride) = numbers;
  } else {
    cute::get<1>(stride) = numbers;
  }
}

template <typename G, LibraryProduct kProduct>
__global__ void set_up_kernel(LibraryGrouped args, typename G::Groups* groups) {
  const int e = static_cast<int>(blockIdx.x * kSetUpThreads + threadIdx.x);
  if (e >= args.num_experts) return;
  const int m = args.m, n = args.n;
  const std::int64_t first = args.offsets_E1[e], weight = std::int64_t{e} * m * n;
  const int rows = args.offsets_E1[e + 1] - args.offsets_E1[e];
  const auto* a = reinterpret_cast<const Element*>(args.a);
  const auto* b = reinterpret_cast<const Element*>(args.b);
  auto* d = static_cast<typename G::D*>(args.c);
  if constexpr (kProduct == LibraryProduct::kWgrad) {
    // Without rows, m is 0, so the product has no tiles. CUTLASS 4.2 cannot sum over nothing (k = 0).
    groups->shapes[e] = {rows == 0 ? 0 : m, n, rows};
    groups->a[e] = a + first * m;
    groups->b[e] = b + first * n;
    groups->d[e] = d + weight;
    set_stride(groups->stride_a[e], m);
    set_stride(groups->stride_b[e], n);
    set_stride(groups->stride_d[e], n);
  } else {
    const int width = kProduct == LibraryProduct::kForward ? m : n,
              depth = kProduct == LibraryProduct::kForward ? n : m;
    groups->shapes[e] = {rows, width, depth};
    groups->a[e] = a + first * depth;
    groups->b[e] = b + weight;
    groups->d[e] = d + first * width;
    set_stride(groups->stride_a[e], depth);
    set_stride(groups->stride_b[e], n);
    set_stride(groups->stride_d[e], width);
  }
}

template <typename Arch, LibraryProduct kProduct>
void multiply(const LibraryGrouped& args, cudaStream_t stream) {
  using G = GroupedGemm<Arch, kProduct>;
  // The groups are in device memory. The host only takes addresses.
  auto* groups = reinterpret_cast<typename G::Groups*>(args.scratch);
  set_up_kernel<G, kProduct><<<set_up_blocks(args.num_experts), kSetUpThreads, 0, stream>>>(args, groups);
  TESSERA_CUDA(cudaGetLastError());
  typename G::Gemm::Arguments arguments;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {args.num_experts, groups->shapes, nullptr};
  arguments.mainloop.ptr_A = const_cast<const Element**>(groups->a);
  arguments.mainloop.dA = groups->stride_a;
  arguments.mainloop.ptr_B = const_cast<const Element**>(groups->b);
  arguments.mainloop.dB = groups->stride_b;
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = args.accumulate ? 1.0f : 0.0f;
  if constexpr (G::kIsWgrad) {
    arguments.epilogue.ptr_C = const_cast<const float**>(groups->d);
    arguments.epilogue.dC = groups->stride_d;
  }
  arguments.epilogue.ptr_D = groups->d;
  arguments.epilogue.dD = groups->stride_d;
  arguments.hw_info.sm_count = args.num_sms;
  run<G>(arguments, args.scratch, stream);
}

template <typename Arch>
std::size_t scratch_bytes(int num_sms) {
  return std::max({cutlass_groups::scratch_bytes<GroupedGemm<Arch, LibraryProduct::kForward>>(num_sms),
                   cutlass_groups::scratch_bytes<GroupedGemm<Arch, LibraryProduct::kDgrad>>(num_sms),
                   cutlass_groups::scratch_bytes<GroupedGemm<Arch, LibraryProduct::kWgrad>>(num_sms)});
}

template <typename Arch>
void multiply(const LibraryGrouped& args, cudaStream_t stream) {
  TESSERA_CHECK(args.num_experts > 0 && args.num_experts <= kLibraryMaxExperts, "{} experts", args.num_experts);
  TESSERA_CHECK(args.m > 0 && args.n > 0 && args.m % kAligned == 0 && args.n % kAligned == 0, "m {}, n {}", args.m,
                args.n);
  switch (args.product) {
    case LibraryProduct::kForward:
      return multiply<Arch, LibraryProduct::kForward>(args, stream);
    case LibraryProduct::kDgrad:
      return multiply<Arch, LibraryProduct::kDgrad>(args, stream);
    case LibraryProduct::kWgrad:
      if (!args.accumulate) {
        zero_empty(args.offsets_E1, args.num_experts, std::int64_t{args.m} * args.n, static_cast<float*>(args.c),
                   stream);
      }
      return multiply<Arch, LibraryProduct::kWgrad>(args, stream);
  }
}

}  // namespace tessera::cuda::library
