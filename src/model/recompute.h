// Activation recomputation ([activation_checkpoint] mode).
#pragma once

#include <cstdint>

namespace tessera {

/// Says which activations the forward keeps for the backward. The results are the same bit for bit in all modes. The
/// same operators compute again from the same numbers what is not kept.
enum class Recompute : std::uint8_t {
  kNone,       // keep everything
  kSelective,  // recompute norms, MLA's up-projections, RoPE and routed rows (DeepSeek-V3, sec. 3.2.3)
  kFull,       // keep only each block's input
};

}  // namespace tessera
