// Describes where one expert's operands are, for the grouped GEMMs of ops/gemm/sm100/sm100_block_scaled.h. A small
// kernel computes this for every expert from the offsets, which are on the device.
#pragma once

#include <cstdint>

#include "mx/scale_layout.h"

namespace tessera::cuda {

/// Describes d [m, n] = a [m, k] · b [n, k]ᵀ. The positions of a, b and d count numbers from the start of the operand.
/// The positions of scales count bytes of packed scales.
struct Sm100Group {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t a = 0, b = 0, d = 0, a_scales = 0, b_scales = 0;
};

/// Describes y rows [first, last) = x rows · w_eᵀ, where w_e is [m, n].
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

/// Describes d_w_e [m, n], from columns [first, last) of d_yᵀ [m, R] and xᵀ [n, R]. For an expert without rows, m is 0,
/// so the product has no tiles. CUTLASS 4.2 cannot sum over nothing (k = 0).
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
