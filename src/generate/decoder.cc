#include "generate/decoder.h"

#include <algorithm>
#include <numeric>

#include "ops/attention/mla_decode.h"
#include "ops/elementwise/embedding.h"
#include "ops/runtime/runtime.h"

namespace tessera {

namespace {

/// On a GPU a prompt is padded to a multiple of this number of tokens, because cuDNN builds a kernel for each length.
constexpr std::int64_t kPromptStep = 64;

std::int64_t whole_steps(std::int64_t num_tokens) { return (num_tokens + kPromptStep - 1) / kPromptStep * kPromptStep; }

}  // namespace

Decoder::Decoder(const Model& model, const DecoderOptions& options, cuda::Runtime* cuda)
    : model_(model),
      options_(options),
      cuda_(cuda),
      rope_(model.config(), options.seq_len, cache_positions(), target()),
      dispatcher_(
          dispatch_options(model.config(), model.options().compute, std::max(options.num_slots, cache_positions()))),
      environment_{.config = &model.config(),
                   .parameters = &model.parameters(),
                   .quantized = &unquantized_,
                   .rope = &rope_,
                   .dispatcher = &dispatcher_},
      step_(model.config(), options.num_slots, 1, {}, target()),
      lengths_(static_cast<std::size_t>(options.num_slots)),
      slots_(options.num_slots, target()),
      positions_(lengths_.size()),
      logits_(options.num_slots * model.config().vocab_size, target()) {
  std::iota(slots_.host().begin(), slots_.host().end(), 0);
  if (cuda_ != nullptr) slots_.upload(cuda_->stream());
  const ModelConfig& config = model.config();
  const std::int64_t numbers =
      config.n_layers * options_.num_slots * cache_positions() * (config.kv_lora_rank + config.qk_rope_head_dim);
  cache_ = Buffer(static_cast<std::size_t>(numbers) * size_of(model.options().compute), target());
}

std::int64_t Decoder::cache_positions() const {
  return cuda_ == nullptr ? options_.num_positions : whole_steps(options_.num_positions);
}

LayerContext Decoder::layer_context(const Batch& batch, Arena& arena) {
  return {
      .model = &environment_, .op = {.arena = &arena, .cuda = cuda_, .weights_are_constant = true}, .batch = &batch};
}

Tensor Decoder::cache_of(std::size_t layer, Device device) const {
  const ModelConfig& config = model_.config();
  const DType dtype = model_.options().compute;
  const Shape shape{options_.num_slots, cache_positions(), config.kv_lora_rank + config.qk_rope_head_dim};
  void* data = device == Device::kMeta
                   ? nullptr
                   : cache_.data() + layer * static_cast<std::size_t>(shape.num_elements()) * size_of(dtype);
  return Tensor(data, shape, dtype, device);
}

template <typename Body>
void Decoder::reserve(Body&& body) {
  Arena measuring(target());
  body(measuring);
  if (measuring.peak() <= arena_.capacity()) return;
  arena_ = Arena(measuring.peak(), target());
  decode_.graph = {};
}

std::span<const float> Decoder::fetch_logits(std::int64_t num_rows) {
  if (cuda_ != nullptr) {
    logits_.download(cuda_->stream());
    cuda_->synchronize();
  }
  return logits_.host().first(static_cast<std::size_t>(num_rows * model_.config().vocab_size));
}

template <typename RunBlock>
void Decoder::run(Arena& arena, const Batch& batch, std::int64_t first, std::int64_t end, RunBlock&& run_block) {
  LayerContext context = layer_context(batch, arena);
  const Device device = arena.device();
  const Shape shape{batch.num_tokens(), model_.config().dim};
  const ArenaScope scope(arena);
  Tensor x_TD = context.allocate(shape), out_TD = context.allocate(shape);
  embedding_forward(context.op, batch.inputs(device), context.weight(model_.embedding()), 0, x_TD);
  for (std::size_t layer = 0; layer < model_.blocks().size(); ++layer) {
    run_block(context, model_.blocks()[layer], cache_of(layer, device), x_TD, out_TD);
    std::swap(x_TD, out_TD);
  }
  const std::int64_t vocab = model_.config().vocab_size;
  model_.head().logits(context, x_TD.rows(first, end),
                       logits_.tensor(device).rows(0, (end - first) * vocab).reshape({end - first, vocab}));
}

void Decoder::run_prefill(Arena& arena, const Batch& batch, const Mirrored<std::int32_t>& slot_T,
                          std::int64_t num_tokens) {
  run(arena, batch, num_tokens - 1, num_tokens,
      [&](const LayerContext& context, const Block& block, const Tensor& cache_SPN, const Tensor& x_TD,
          const Tensor& out_TD) {
        const ArenaScope layer_scope(arena);
        BlockSaved saved;
        block.forward(context, x_TD, saved, out_TD, {});
        store_latents(context.op, saved.attention.kv_latent_KC.plain, saved.attention.k_rope,
                      slot_T.tensor(arena.device()), batch.positions(arena.device()), cache_SPN);
      });
}

void Decoder::run_decode(Arena& arena) {
  run(arena, step_, 0, options_.num_slots,
      [&](const LayerContext& context, const Block& block, const Tensor& cache_SPN, const Tensor& x_TD,
          const Tensor& out_TD) { block.decode(context, x_TD, slots_.tensor(arena.device()), cache_SPN, out_TD); });
}

std::span<const float> Decoder::prefill(std::int64_t slot, std::span<const std::int32_t> tokens) {
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  TESSERA_CHECK(0 <= slot && slot < options_.num_slots && 0 < num_tokens && num_tokens <= options_.num_positions,
                "slot {} of {}, {} tokens, {} positions", slot, options_.num_slots, num_tokens, options_.num_positions);
  ModelConfig one_document = model_.config();
  one_document.attn_mask_type = AttentionMask::kCausal;  // a prompt is one document, whatever tokens are in it
  one_document.num_mtp_modules = 0;
  // Attention is causal, so the padding changes no result. Decoding overwrites its entries in the cache before it reads
  // them.
  const std::int64_t num_computed = cuda_ == nullptr ? num_tokens : whole_steps(num_tokens);
  Batch batch(one_document, 1, num_computed, {}, target());
  std::vector<std::int32_t> row(tokens.begin(), tokens.end());
  row.resize(static_cast<std::size_t>(num_computed) + 1);  // and the label of the last token, which is not read
  batch.fill(row);
  const Mirrored<std::int32_t> slot_T(num_computed, target());
  std::ranges::fill(slot_T.host(), static_cast<std::int32_t>(slot));
  if (cuda_ != nullptr) {
    batch.upload(cuda_->stream());
    slot_T.upload(cuda_->stream());
  }
  reserve([&](Arena& arena) { run_prefill(arena, batch, slot_T, num_tokens); });
  run_prefill(arena_, batch, slot_T, num_tokens);
  lengths_[static_cast<std::size_t>(slot)] = num_tokens;
  return fetch_logits(1);
}

std::span<const float> Decoder::decode(std::span<const std::int32_t> tokens) {
  TESSERA_CHECK(tokens.size() == lengths_.size(), "{} tokens for {} slots", tokens.size(), lengths_.size());
  for (std::size_t slot = 0; slot < lengths_.size(); ++slot) {
    TESSERA_CHECK(0 < lengths_[slot] && lengths_[slot] < options_.num_positions, "slot {} holds {} of {}", slot,
                  lengths_[slot], options_.num_positions);
    positions_[slot] = static_cast<std::int32_t>(lengths_[slot]);
  }
  step_.fill_tokens(tokens, positions_);
  if (!decode_.is_reserved) reserve([&](Arena& arena) { run_decode(arena); });
  decode_.is_reserved = true;
  if (cuda_ != nullptr) step_.upload(cuda_->stream());
  // A GPU's first token loads the kernels. The others replay a graph.
  if (cuda_ == nullptr || !std::exchange(decode_.has_run, true)) {
    run_decode(arena_);
  } else {
    if (!decode_.graph.defined()) decode_.graph = cuda::Graph(cuda_->stream(), [&] { run_decode(arena_); });
    decode_.graph.launch(cuda_->stream());
  }
  for (std::int64_t& length : lengths_) ++length;
  return fetch_logits(options_.num_slots);
}

}  // namespace tessera
