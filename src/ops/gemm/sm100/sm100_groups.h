// Where the operands of one expert are, for the grouped GEMMs of ops/gemm/sm100/sm100_block_scaled.h. A small kernel
// writes this for every expert from the offsets, which are on the device.
#pragma once

#include <cstdint>

#include "mx/scale_layout.h"

namespace tessera::cuda {

/// d [m, n] = a [m, k] · b [n, k]ᵀ: places count numbers from the start of each operand, and bytes of packed scales.
struct Sm100Group {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t a = 0, b = 0, d = 0, a_scales = 0, b_scales = 0;
};

/// y rows [first, last) = x rows · w_eᵀ, w_e [m, n].
TESSERA_HOST_DEVICE constexpr Sm100Group sm100_forward_group(std::int64_t expert, std::int64_t first, std::int64_t last,
                                                             std::int64_t m, std::int64_t n) {
  const std::int64_t tile_bytes = mx::packed_bytes_per_tile(n);
  return {.m = last - first,
          .n = m,
          .k = n,
          .a = first * n,
          .b = expert * m * n,
          .d = first * m,
          .a_scales = mx::packed_group_tile(first, expert) * tile_bytes,
          .b_scales = mx::packed_group_tile(expert * m, expert) * tile_bytes};
}

/// d_w_e [m, n] from columns [first, last) of d_yᵀ [m, R] and xᵀ [n, R]. An expert without rows has m = 0: its product
/// has no tiles then, while CUTLASS 4.2 has no sums over nothing (k = 0).
TESSERA_HOST_DEVICE constexpr Sm100Group sm100_wgrad_group(std::int64_t expert, std::int64_t first, std::int64_t last,
                                                           std::int64_t m, std::int64_t n) {
  return {.m = first == last ? 0 : m,
          .n = n,
          .k = last - first,
          .a = first,
          .b = first,
          .d = expert * m * n,
          .a_scales = mx::packed_group_tile(first, expert) * mx::packed_bytes_per_tile(m),
          .b_scales = mx::packed_group_tile(first, expert) * mx::packed_bytes_per_tile(n)};
}

}  // namespace tessera::cuda
