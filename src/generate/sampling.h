// Chooses the next token from its logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

struct SamplingOptions {
  double temperature = 1.0;  // 0: always the most likely token
  std::int64_t top_k = 0;    // only the k most likely tokens; 0: all
  double top_p = 1.0;        // only the most likely tokens that together have this probability (nucleus sampling,
                             // arXiv 1904.09751), one at least; after temperature and top_k
};

/// Draws a token from softmax(logits / temperature), cut by top_k and top_p, with `uniform` in (0, 1). Ties go to the
/// lower token. -inf is never drawn. Throws Error for NaN, for inf, and if all logits are -inf. `order` is scratch
/// memory that calls may share.
std::int32_t sample(std::span<const float> logits, const SamplingOptions& options, double uniform,
                    std::vector<std::int32_t>& order);

}  // namespace tessera
