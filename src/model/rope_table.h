// Cosines and sines of RoPE's angles, with YaRN's scaling of the frequencies (Peng et al., arXiv 2309.00071) when the
// sequence is longer than the model's original one.
#pragma once

#include <vector>

#include "model/config.h"

namespace tessera {

class RopeTable {
 public:
  RopeTable(const ModelConfig& config, std::int64_t seq_len);

  /// [seq_len, qk_rope_head_dim / 2] float32.
  Tensor cos(Device device) const { return view(cos_, device); }
  Tensor sin(Device device) const { return view(sin_, device); }

 private:
  Tensor view(const std::vector<float>& values, Device device) const;

  std::int64_t seq_len_;
  std::vector<float> cos_, sin_;
};

}  // namespace tessera
