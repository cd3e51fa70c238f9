// Continues texts token by token. A prompt runs through the training forward, whose latents fill a cache. After that,
// each text gets one token at a time, which attends to the cache (ops/attention/mla_decode.h). Logits are those of the
// training forward on the whole text, except for rounding.
#pragma once

#include <span>

#include "device/cuda_graph.h"
#include "ep/backends/local_dispatcher.h"
#include "model/model.h"

namespace tessera {

struct DecoderOptions {
  std::int64_t seq_len = 0;        // of training; it decides whether YaRN is used
  std::int64_t num_slots = 1;      // texts that are continued together
  std::int64_t num_positions = 0;  // the most tokens of a text, prompt included
};

class Decoder {
 public:
  /// `model` must outlive the decoder. Its weights may be allocated later, but before use. Allocates the cache: per
  /// layer num_slots · num_positions · (kv_lora_rank + qk_rope_head_dim) numbers of the model's compute type. A GPU's
  /// cache has room for padded prompts, up to 63 positions more. `cuda` is the runtime of the model's GPU, which must
  /// outlive this, or null on a CPU.
  Decoder(const Model& model, const DecoderOptions& options, cuda::Runtime* cuda = nullptr);

  std::size_t cache_bytes() const { return cache_.size(); }

  /// Puts a text's tokens into a slot, which may have been used before. Returns the logits [vocab] after the last
  /// token. They are valid until the next call. Throws InternalError for another slot, for no tokens, and for more than
  /// num_positions.
  std::span<const float> prefill(std::int64_t slot, std::span<const std::int32_t> tokens);

  /// Appends one token to each slot. Returns the logits [num_slots · vocab], which are valid until the next call.
  /// Throws InternalError if a slot has not been filled or is full, and for another number of tokens.
  std::span<const float> decode(std::span<const std::int32_t> tokens);

  /// Returns the number of tokens in a slot.
  std::int64_t length(std::int64_t slot) const { return lengths_[static_cast<std::size_t>(slot)]; }

 private:
  struct DecodeState {
    bool is_reserved = false, has_run = false;
    cuda::Graph graph;  // on a GPU, from the second token on; dropped when arena_ is replaced
  };

  /// Returns the positions of a slot in the cache.
  std::int64_t cache_positions() const;
  Device target() const { return cuda_ == nullptr ? Device::kCpu : Device::kCuda; }
  LayerContext layer_context(const Batch& batch, Arena& arena);
  /// Runs the embedding, run_block(context, block, cache, x, out) for each block, and the logits of rows [first, end).
  template <typename RunBlock>
  void run(Arena& arena, const Batch& batch, std::int64_t first, std::int64_t end, RunBlock&& run_block);
  /// Runs the forward over a text of num_tokens tokens, and stores its latents in the cache. The batch may have more
  /// tokens, whose results are not read. slot_T has the text's slot for each token of the batch.
  void run_prefill(Arena& arena, const Batch& batch, const Mirrored<std::int32_t>& slot_T, std::int64_t num_tokens);
  void run_decode(Arena& arena);
  /// Makes the arena large enough for `body`, which it runs on a measuring arena.
  template <typename Body>
  void reserve(Body&& body);
  /// Waits for a GPU, and returns the first logits, on the host.
  std::span<const float> fetch_logits(std::int64_t num_rows);
  Tensor cache_of(std::size_t layer, Device device) const;

  const Model& model_;
  DecoderOptions options_;
  cuda::Runtime* cuda_;
  RopeTable rope_;
  ep::LocalDispatcher dispatcher_;
  QuantizedWeights unquantized_;  // empty: texts are decoded in the type that layers compute in
  Environment environment_;
  Arena arena_;
  Buffer cache_;  // [layers, slots, cache_positions(), C + R]
  Batch step_;
  std::vector<std::int64_t> lengths_;
  Mirrored<std::int32_t> slots_;         // 0, 1, 2, ...
  std::vector<std::int32_t> positions_;  // positions of the step's tokens
  Mirrored<float> logits_;
  DecodeState decode_;
};

}  // namespace tessera
