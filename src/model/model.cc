#include "model/model.h"

#include <cmath>

#include "base/stopwatch.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gemm.h"
#include "ops/rmsnorm.h"

namespace tessera {

Init init_by_depth(std::int64_t layer) {
  return {.std = kInitStd / std::sqrt(2.0f * static_cast<float>(layer + 1)), .bound = kInitBound};
}

/// One multi-token prediction module: z = W_eh · [norm(embedding of a later token) | norm(previous hidden)], a block,
/// and a head with its own norm on the shared output projection.
struct Model::MtpModule {
  ParamId embedding_norm, hidden_norm, eh_proj;
  Block block;
  Head head;
};

Model::Model(const ModelConfig& config, const ModelOptions& options)
    : config_(config), options_(options), rope_(config, options.seq_len) {
  config_.validate();
  embedding_ = parameters_.add({"tok_embeddings.weight", {config.vocab_size, config.dim}, {.std = 1.0f}});
  blocks_.reserve(static_cast<std::size_t>(config.n_layers));
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    blocks_.emplace_back(parameters_, config, config.is_moe_layer(layer), options.force_load_balance,
                         fmt::format("layers.{}.", layer), layer);
  }
  const float output_std = 1.0f / std::sqrt(static_cast<float>(config.dim));
  output_ = parameters_.add(
      {"output.weight", {config.vocab_size, config.dim}, {.std = output_std, .bound = 3.0f * output_std}});
  head_ = std::make_unique<Head>(parameters_, config, "norm.weight", output_);

  mtp_.reserve(static_cast<std::size_t>(config.num_mtp_modules));
  for (std::int64_t module = 0; module < config.num_mtp_modules; ++module) {
    const std::string prefix = fmt::format("mtp.{}.", module);
    const bool is_moe = config.n_dense_layers < config.n_layers;
    const std::int64_t layer = config.n_layers + module;
    const ParamId embedding_norm = parameters_.add({prefix + "embedding_norm.weight", {config.dim}, {}});
    const ParamId hidden_norm = parameters_.add({prefix + "hidden_norm.weight", {config.dim}, {}});
    const ParamId eh_proj = parameters_.add({prefix + "eh_proj.weight", {config.dim, 2 * config.dim}, init_shallow()});
    mtp_.push_back({embedding_norm, hidden_norm, eh_proj,
                    Block(parameters_, config, is_moe, options.force_load_balance, prefix + "block.", layer),
                    Head(parameters_, config, prefix + "norm.weight", output_)});
  }

  for (const Block& block : blocks_) {
    if (block.moe() != nullptr) moe_layers_.push_back(block.moe());
  }
  for (const MtpModule& module : mtp_) {
    if (module.block.moe() != nullptr) moe_layers_.push_back(module.block.moe());
  }
  loads_.resize(moe_layers_.size());
  clear_loads();
  discarded_loads_ = loads_;
  saved_.resize(blocks_.size() + mtp_.size());
  mtp_saved_.resize(mtp_.size());
  d_module_.resize(mtp_.size());
}

Model::~Model() = default;

ParameterCounts Model::count_parameters() const {
  ParameterCounts counts{};
  std::int64_t sparse_active = 0;
  for (ParamId id = 0; id < parameters_.size(); ++id) {
    const ParamSpec& spec = parameters_.spec(id);
    const std::int64_t size = spec.shape.num_elements();
    counts.total += size;
    if (spec.name.find(".experts.") != std::string::npos) {
      counts.sparse += size;
      sparse_active += size / config_.num_experts * config_.top_k;
    } else if (spec.name.find(".moe.") != std::string::npos) {
      counts.sparse += size;
      sparse_active += size;
    } else {
      counts.dense += size;
    }
  }
  counts.embedding = parameters_.spec(embedding_).shape.num_elements();
  counts.active = counts.dense + sparse_active;
  return counts;
}

LayerContext Model::layer_context(const Context& op, const Batch& batch) const {
  return {.op = op,
          .config = &config_,
          .parameters = &parameters_,
          .quantized = &quantized_,
          .batch = &batch,
          .rope = &rope_,
          .recompute = options_.recompute,
          .branch_TD = {},
          .norm_TD = {}};
}

MoeLoad* Model::load_of(const Block& block, std::vector<MoeLoad>& loads) {
  for (std::size_t i = 0; i < moe_layers_.size(); ++i) {
    if (moe_layers_[i] == block.moe()) return &loads[i];
  }
  return nullptr;
}

void Model::clear_loads() {
  for (MoeLoad& load : loads_) {
    load.counts_E.assign(static_cast<std::size_t>(config_.num_experts), 0);
    load.balance_loss = 0.0;
  }
}

void Model::update_expert_biases() {
  if (config_.load_balance_coeff == 0.0f) return;
  for (std::size_t i = 0; i < moe_layers_.size(); ++i) {
    moe_layers_[i]->update_expert_bias(parameters_, loads_[i].counts_E, config_.load_balance_coeff);
  }
}

/// z_TD from the embedding of tokens_T and the previous hidden state. W_eh's columns are two weights side by side.
void Model::mtp_input(const LayerContext& context, const MtpModule& module, const Tensor& tokens_T,
                      const Tensor& hidden_TD, MtpSaved& saved, const Tensor& z_TD) const {
  const Context& op = context.op;
  const std::int64_t num_tokens = context.num_tokens(), dim = config_.dim;
  const Shape shape{num_tokens, dim};
  saved = {.embedding_TD = context.allocate(shape),
           .embedding_y_TD = context.allocate(shape),
           .embedding_rstd_T = context.allocate({num_tokens}, DType::kFloat32),
           .hidden_TD = hidden_TD,
           .hidden_y_TD = context.allocate(shape),
           .hidden_rstd_T = context.allocate({num_tokens}, DType::kFloat32)};
  embedding_forward(op, tokens_T, context.weight(embedding_), saved.embedding_TD);
  rmsnorm_forward(op, saved.embedding_TD, context.weight(module.embedding_norm), config_.norm_eps, saved.embedding_y_TD,
                  saved.embedding_rstd_T);
  rmsnorm_forward(op, hidden_TD, context.weight(module.hidden_norm), config_.norm_eps, saved.hidden_y_TD,
                  saved.hidden_rstd_T);
  const Tensor eh_proj = context.weight(module.eh_proj);
  linear_forward(op, saved.embedding_y_TD, eh_proj.columns(0, dim), z_TD);
  linear_forward(op, saved.hidden_y_TD, eh_proj.columns(dim, 2 * dim), z_TD, Write::kAccumulate);
}

LossSums Model::train_step(const Context& op, const Batch& batch, const LossScale& scale, PhaseSeconds* seconds,
                           SiteProbe* probe) {
  const Stopwatch forward_watch;
  const Device device = op.device();
  LayerContext context = layer_context(op, batch);
  context.balance_scale = static_cast<float>(scale.per_sequence);
  context.probe = probe;
  const std::int64_t dim = config_.dim;
  const Shape shape{batch.num_tokens(), dim};
  const ArenaScope scope(*op.arena);
  LossSums sums;
  context.branch_TD = context.allocate(shape);
  context.norm_TD = context.allocate(shape);

  // Forward.
  Tensor x_TD = context.allocate(shape);
  embedding_forward(op, batch.inputs(device), context.weight(embedding_), x_TD);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Tensor out_TD = context.allocate(shape);
    blocks_[i].forward(context, x_TD, saved_[i], out_TD, load_of(blocks_[i], loads_));
    x_TD = out_TD;
  }
  const Tensor d_TD = context.allocate(shape);
  sums.main = head_->forward_backward(context, x_TD, batch.labels(device), static_cast<float>(scale.per_token), d_TD);

  // Multi-token prediction, forward. d_module_[k] is the gradient of module k's output.
  const std::size_t num_modules = mtp_.size();
  const double mtp_scale =
      num_modules == 0 ? 0.0 : scale.per_token * config_.mtp_loss_weight / static_cast<double>(num_modules);
  for (std::size_t k = 0; k < num_modules; ++k) {
    BlockSaved& saved = saved_[blocks_.size() + k];
    const Tensor z_TD = context.allocate(shape), out_TD = context.allocate(shape);
    mtp_input(context, mtp_[k], batch.mtp_inputs(k, device), x_TD, mtp_saved_[k], z_TD);
    mtp_[k].block.forward(context, z_TD, saved, out_TD, load_of(mtp_[k].block, loads_));
    d_module_[k] = context.allocate(shape);
    sums.mtp += mtp_[k].head.forward_backward(context, out_TD, batch.mtp_labels(k, device),
                                              static_cast<float>(mtp_scale), d_module_[k]);
    x_TD = out_TD;
  }

  // Backward, in the mirror order.
  if (seconds != nullptr) seconds->forward += forward_watch.seconds();
  const Stopwatch backward_watch;
  for (std::size_t k = num_modules; k-- > 0;) {
    const MtpModule& module = mtp_[k];
    const MtpSaved& saved = mtp_saved_[k];
    const ArenaScope module_scope(*op.arena);
    const Tensor d_z_TD = d_module_[k];
    module.block.backward(context, saved_[blocks_.size() + k], d_z_TD, load_of(module.block, loads_));
    const Tensor d_y_TD = context.allocate(shape), d_embedding_TD = context.allocate(shape);
    const Tensor eh_proj = context.weight(module.eh_proj), d_eh_proj = context.gradient(module.eh_proj);
    linear_wgrad(op, d_z_TD, saved.embedding_y_TD, d_eh_proj.columns(0, dim));
    linear_dgrad(op, d_z_TD, eh_proj.columns(0, dim), d_y_TD);
    rmsnorm_backward(op, d_y_TD, saved.embedding_TD, context.weight(module.embedding_norm), saved.embedding_rstd_T,
                     d_embedding_TD, Write::kAssign, context.gradient(module.embedding_norm));
    embedding_backward(op, batch.mtp_inputs(k, device), d_embedding_TD, context.gradient(embedding_));
    linear_wgrad(op, d_z_TD, saved.hidden_y_TD, d_eh_proj.columns(dim, 2 * dim));
    linear_dgrad(op, d_z_TD, eh_proj.columns(dim, 2 * dim), d_y_TD);
    rmsnorm_backward(op, d_y_TD, saved.hidden_TD, context.weight(module.hidden_norm), saved.hidden_rstd_T,
                     k == 0 ? d_TD : d_module_[k - 1], Write::kAccumulate, context.gradient(module.hidden_norm));
  }
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].backward(context, saved_[i], d_TD, load_of(blocks_[i], loads_));
  }
  embedding_backward(op, batch.inputs(device), d_TD, context.gradient(embedding_));
  if (seconds != nullptr) seconds->backward += backward_watch.seconds();
  return sums;
}

LossSums Model::evaluate(const Context& op, const Batch& batch, const BlockObserver& observer, const Tensor& logits_TV,
                         std::span<const Tensor> mtp_logits) {
  const Device device = op.device();
  LayerContext context = layer_context(op, batch);
  context.recompute = Recompute::kFull;  // nothing is kept
  context.repeated = true;
  const Shape shape{batch.num_tokens(), config_.dim};
  const ArenaScope scope(*op.arena);
  LossSums sums;
  BlockSaved dropped;
  context.branch_TD = context.allocate(shape);
  context.norm_TD = context.allocate(shape);
  const auto observe = [&](const std::string& name, const Tensor& x_TD) {
    if (observer) observer(name, x_TD);
  };

  Tensor x_TD = context.allocate(shape), other_TD = context.allocate(shape);
  embedding_forward(op, batch.inputs(device), context.weight(embedding_), x_TD);
  observe("tok_embeddings", x_TD);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].forward(context, x_TD, dropped, other_TD, load_of(blocks_[i], discarded_loads_));
    std::swap(x_TD, other_TD);
    if (observer) observe(fmt::format("layers.{}", i), x_TD);
  }
  sums.main = head_->forward_backward(context, x_TD, batch.labels(device), 0.0f, {}, logits_TV);
  for (std::size_t k = 0; k < mtp_.size(); ++k) {
    const ArenaScope module_scope(*op.arena);
    const Tensor z_TD = context.allocate(shape);
    MtpSaved saved;
    mtp_input(context, mtp_[k], batch.mtp_inputs(k, device), x_TD, saved, z_TD);
    mtp_[k].block.forward(context, z_TD, dropped, x_TD, load_of(mtp_[k].block, discarded_loads_));
    if (observer) observe(fmt::format("mtp.{}", k), x_TD);
    sums.mtp += mtp_[k].head.forward_backward(context, x_TD, batch.mtp_labels(k, device), 0.0f, {},
                                              k < mtp_logits.size() ? mtp_logits[k] : Tensor());
  }
  return sums;
}

}  // namespace tessera
