// The cosines and sines of RoPE's angles. YaRN scales the frequencies (Peng et al., arXiv 2309.00071) when the sequence
// is longer than the model's original one.
#pragma once

#include "model/config.h"
#include "tensor/mirrored.h"

namespace tessera {

class RopeTable {
 public:
  /// `seq_len` is the training length, which decides whether YaRN applies. `num_positions` is the number of rows of the
  /// table. 0 means seq_len.
  RopeTable(const ModelConfig& config, std::int64_t seq_len, std::int64_t num_positions = 0,
            Device target = Device::kCpu);

  std::int64_t seq_len() const { return seq_len_; }
  /// Return the table of cosines or sines: [num_positions, qk_rope_head_dim / 2], float32.
  Tensor cos(Device device) const { return view(cos_, device); }
  Tensor sin(Device device) const { return view(sin_, device); }

 private:
  Tensor view(const Mirrored<float>& values, Device device) const;

  std::int64_t seq_len_, num_positions_;
  Mirrored<float> cos_, sin_;
};

}  // namespace tessera
