// Computes the training forward's logits, for tests.
#pragma once

#include <span>
#include <vector>

#include "model/model.h"

namespace tessera {

/// Returns the logits [num_seqs · S, V] of tokens [num_seqs, S]. The model's weights must be allocated.
inline std::vector<float> forward_logits(Model& model, std::span<const std::int32_t> tokens,
                                         std::int64_t num_seqs = 1) {
  const auto num_tokens = static_cast<std::int64_t>(tokens.size()), seq_len = num_tokens / num_seqs;
  Batch batch(model.config(), num_seqs, seq_len);
  std::vector<std::int32_t> rows;  // each sequence and one more label, which does not affect logits
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    rows.insert(rows.end(), tokens.begin() + b * seq_len, tokens.begin() + (b + 1) * seq_len);
    rows.push_back(0);
  }
  batch.fill(rows);
  const Shape shape{num_tokens, model.config().vocab_size};
  std::vector<float> logits(static_cast<std::size_t>(shape.num_elements()));
  Arena measuring;
  model.evaluate({.arena = &measuring}, batch, {}, Tensor(nullptr, shape, DType::kFloat32, Device::kMeta));
  Arena arena(measuring.peak());
  model.evaluate({.arena = &arena}, batch, {}, Tensor(logits.data(), shape, DType::kFloat32, Device::kCpu));
  return logits;
}

}  // namespace tessera
