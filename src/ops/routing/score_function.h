// The functions that turn a router's logits into scores (ops/routing/router.h).
#pragma once

#include <cstdint>

namespace tessera {

enum class ScoreFunction : std::uint8_t { kSoftmax, kSigmoid };

}  // namespace tessera
