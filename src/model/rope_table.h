// What the positions of tokens do to attention. RopeTable holds the cosines and sines of RoPE's angles. YaRN scales the
// frequencies (Peng et al., arXiv 2309.00071) when the sequence is longer than the model's original one. LayerRope
// turns a layer's queries and keys by them.
#pragma once

#include "model/config.h"
#include "ops/attention/mla_decode.h"
#include "ops/attention/rope.h"
#include "tensor/mirrored.h"

namespace tessera {

class RopeTable {
 public:
  /// `seq_len` is the training length, which decides whether YaRN applies. `num_positions` is the number of rows of the
  /// table. 0 means seq_len. On kMeta the table has no numbers.
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

/// Says how one attention layer reads the table.
class LayerRope {
 public:
  /// `layer` counts from 0. The blocks of MTP modules follow those of the model. DeepSeek-V3's layers are all alike; in
  /// other models they are not.
  LayerRope(const ModelConfig& config, [[maybe_unused]] std::int64_t layer) : rope_dim_(config.qk_rope_head_dim) {}

  /// Turns the last qk_rope_head_dim numbers of each head by its token's position. x, y and positions_T are those of
  /// the operator (ops/attention/rope.h). kBackward gives the gradient.
  void turn(const Context& op, const RopeTable& table, const Tensor& x, std::int64_t num_heads,
            const Tensor& positions_T, RopeDirection direction, const Tensor& y) const {
    rope(op, x, num_heads, rope_dim_, positions_T, table.cos(op.device()), table.sin(op.device()), direction, y);
  }

  /// Makes new tokens ready for decoding (ops/attention/mla_decode.h). Sets what they have of the table.
  void prepare_decode(const Context& op, const RopeTable& table, MlaNewTokens tokens, const Tensor& slot_T,
                      const Tensor& positions_T, const Tensor& cache_SPN) const {
    tokens.rope_dim = rope_dim_;
    tokens.cos_PM = table.cos(op.device());
    tokens.sin_PM = table.sin(op.device());
    prepare_mla_decode(op, tokens, slot_T, positions_T, cache_SPN);
  }

  /// Returns the factor of the attention's scores.
  float softmax_scale(const ModelConfig& config, const RopeTable& table) const {
    return config.softmax_scale(table.seq_len());
  }

 private:
  std::int64_t rope_dim_;
};

}  // namespace tessera
