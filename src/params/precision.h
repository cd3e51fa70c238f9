// The precision of each GEMM of the model. A site is a parameter that is a GEMM's weight. Each site has three GEMMs:
// fprop (y = x · wᵀ), dgrad (d_x = d_y · w) and wgrad (d_w = d_yᵀ · x).
#pragma once

#include <vector>

#include "mx/block.h"
#include "params/parameters.h"

namespace tessera {

enum class Precision : std::uint8_t {
  kHigh,           // the type that layers compute in
  kMxfp8,          // MXFP8 operands
  kMxfp8Emulated,  // kMxfp8 whose blocks stay 1 × 32 on Hopper; the products are the same
  kFp8Blockwise,   // FP8 operands with float32 scales (DeepSeek-V3, arXiv 2412.19437, sec. 3.3)
};

struct SitePrecision {
  Precision fprop = Precision::kHigh, dgrad = Precision::kHigh, wgrad = Precision::kHigh;
  // The formats of the operands. In wgrad they run along the tokens.
  mx::Format input{}, wgrad_input{};
  mx::Format gradient{}, wgrad_gradient{};  // of the output's gradient, in dgrad and in wgrad
  mx::Format weight{};

  /// Returns whether fprop and dgrad read the quantized weight. Either both are in low precision, or neither is.
  bool quantizes_weight() const { return fprop != Precision::kHigh; }
  /// Returns whether any of the three products reads quantized operands.
  bool quantizes() const { return quantizes_weight() || wgrad != Precision::kHigh; }
};

/// Holds one entry per ParamId. Parameters that are no GEMM's weight, and sites without low precision, have
/// SitePrecision{}.
using PrecisionTable = std::vector<SitePrecision>;

}  // namespace tessera
