#include "model/model.h"

#include <algorithm>
#include <cmath>

#include "ep/backends/make_dispatcher.h"
#include "model/token_exchange.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/embedding.h"
#include "ops/gemm/gemm.h"
#include "ops/routing/expert_bias.h"

namespace tessera {

Init init_by_depth(std::int64_t layer) {
  return {.std = kInitStd / std::sqrt(2.0f * static_cast<float>(layer + 1)), .bound = kInitBound};
}

/// One multi-token prediction module: z = W_eh · [norm(embedding of a later token) | norm(previous hidden)], a block,
/// and a head with its own norm on the shared output projection.
struct Model::MtpModule {
  UnitId unit;
  RmsNorm embedding_norm, hidden_norm;
  ParamId eh_proj;
  Block block;
  Head head;
};

namespace {

StorageOptions storage_options(const ModelConfig& config, const ModelOptions& options) {
  StorageOptions storage{.optimizer = options.optimizer,
                         .keep_gathered = options.keep_gathered,
                         .keep_gradients = options.keep_gradients,
                         .reduce = options.reduce};
  // A multi-token prediction module needs the embedding and the head beside its own unit and the next.
  if (config.num_mtp_modules > 0) {
    storage.weights_at_once = storage.gradients_at_once = {.layers = 2, .vocabulary = 2, .together = 4};
  }
  if (options.pairs_passes) {
    // Each pass has a layer's weights and the next one's. Only the backward has layers' gradients, and the forward the
    // head's.
    storage.weights_at_once.layers += 2;
    storage.weights_at_once.together += 2;
    storage.gradients_at_once.together += 1;
  }
  return storage;
}

constexpr Cut kByVocabulary = {.axis = Cut::Axis::kTensor, .dim = 0};

ParamSpec output_spec(const ModelConfig& config) {
  const float std = 1.0f / std::sqrt(static_cast<float>(config.dim));
  return {.name = "output.weight",
          .shape = {config.vocab_size, config.dim},
          .init = {.std = std, .bound = 3.0f * std},
          .gemm = GemmKind::kOutput,
          .cut = kByVocabulary};
}

/// A block has at most this many GEMM sites, and each may defer one gradient.
constexpr std::size_t kMaxSitesPerBlock = 12;

}  // namespace

Model::Model(const ModelConfig& config, const ModelOptions& options)
    : config_(config),
      options_(options),
      parameters_(options.mesh, storage_options(config, options)),
      rope_(config, options.seq_len, 0,
            options.mesh != nullptr && options.mesh->is_planned ? Device::kMeta : Device::kCpu),
      environment_{.config = &config_,
                   .parameters = &parameters_,
                   .quantized = &quantized_,
                   .rope = &rope_,
                   .force_load_balance = options.force_load_balance} {
  config_.validate();
  if (options_.stages.empty()) {
    options_.stages = {{.embedding = true, .first_layer = 0, .num_layers = config.n_layers, .head = true}};
  }
  const bool has_embedding = options_.stages.front().embedding, has_head = options_.stages.back().head;
  if (has_embedding) {
    embedding_.table = parameters_.add({.name = "tok_embeddings.weight",
                                        .shape = {config.vocab_size, config.dim},
                                        .init = {.std = 1.0f},
                                        .cut = kByVocabulary});
    parameters_.mark_vocabulary();
  }
  trunk_.first_unit = parameters_.num_units();
  std::int64_t num_layers = 0;
  for (const StageModules& modules : options_.stages) num_layers += modules.num_layers;
  trunk_.blocks.reserve(static_cast<std::size_t>(num_layers));
  for (const StageModules& modules : options_.stages) {
    stages_.push_back({.modules = modules,
                       .first_block = trunk_.blocks.size(),
                       .num_blocks = static_cast<std::size_t>(modules.num_layers)});
    for (std::int64_t layer = modules.first_layer; layer < modules.first_layer + modules.num_layers; ++layer) {
      parameters_.begin_unit();
      trunk_.blocks.emplace_back(parameters_, config, config.is_moe_layer(layer), fmt::format("layers.{}.", layer),
                                 layer);
    }
  }
  if (has_head) {
    heads_.unit = parameters_.begin_unit();
    parameters_.mark_vocabulary();
    // Heads move tokens themselves, once for all chunks.
    heads_.output = std::make_unique<LinearSite>(parameters_, output_spec(config), Sharding::kReplicated);
    heads_.main = std::make_unique<Head>(parameters_, config, "norm.weight", *heads_.output);
    TESSERA_CHECK(config.num_mtp_modules == 0 || has_embedding, "multi-token prediction without the embedding");
    heads_.mtp.reserve(static_cast<std::size_t>(config.num_mtp_modules));
    for (std::int64_t module = 0; module < config.num_mtp_modules; ++module) add_mtp_module(module);
  }
  list_moe_layers();
  renew_dispatcher();
  sums_ = StepSums(moe_.layers.size(), config.num_experts);
  evaluated_ = StepSums(0, config.num_experts);
}

void Model::add_mtp_module(std::int64_t module) {
  const std::string prefix = fmt::format("mtp.{}.", module);
  const bool is_moe = config_.n_dense_layers < config_.n_layers;
  const UnitId unit = parameters_.begin_unit();
  const RmsNorm embedding_norm(parameters_, prefix + "embedding_norm.weight", config_.dim);
  const RmsNorm hidden_norm(parameters_, prefix + "hidden_norm.weight", config_.dim);
  const ParamId eh_proj = parameters_.add({prefix + "eh_proj.weight", {config_.dim, 2 * config_.dim}, init_shallow()});
  heads_.mtp.push_back({unit, embedding_norm, hidden_norm, eh_proj,
                        Block(parameters_, config_, is_moe, prefix + "block.", config_.n_layers + module),
                        Head(parameters_, config_, prefix + "norm.weight", *heads_.output)});
}

void Model::list_moe_layers() {
  const auto add_moe_layer = [&](const Block& block, std::int64_t layer) {
    if (block.moe() == nullptr) return;
    moe_.layers.push_back({.moe = block.moe(), .index = static_cast<std::size_t>(layer - config_.n_dense_layers)});
  };
  for (const Stage& stage : stages_) {
    for (std::size_t i = 0; i < stage.num_blocks; ++i) {
      add_moe_layer(trunk_.blocks[stage.first_block + i], stage.modules.first_layer + static_cast<std::int64_t>(i));
    }
  }
  for (std::size_t k = 0; k < heads_.mtp.size(); ++k) {
    add_moe_layer(heads_.mtp[k].block, config_.n_layers + static_cast<std::int64_t>(k));
  }
}

void Model::renew_dispatcher() {
  moe_.dispatcher = make_dispatcher();
  if (options_.pairs_passes && moe_.dispatcher != nullptr) moe_.dispatcher->set_turns(&turns_);
  environment_.dispatcher = moe_.dispatcher.get();
}

StageSaved Model::make_saved(std::size_t stage, bool defers) const {
  StageSaved saved;
  const std::size_t num_modules = stages_[stage].modules.head ? heads_.mtp.size() : 0;
  saved.blocks.resize(stages_[stage].num_blocks + num_modules);
  saved.mtp.resize(num_modules);
  saved.d_modules.resize(num_modules);
  if (defers) saved.deferred.emplace(kMaxSitesPerBlock * saved.blocks.size());
  return saved;
}

Model::~Model() = default;

std::unique_ptr<Dispatcher> Model::make_dispatcher() const {
  if (moe_.layers.empty() || options_.max_tokens == 0) return nullptr;
  DispatchOptions dispatch = dispatch_options(config_, options_.compute, options_.max_tokens);
  dispatch.capacity_factor = options_.capacity_factor;
  dispatch.num_sms = options_.dispatch_sms;
  dispatch.dispatch_forward = options_.dispatch_forward;
  dispatch.combine_backward = options_.combine_backward;
  dispatch.device = options_.device;
  for (const MoeLayers::Layer& layer : moe_.layers) {
    dispatch.max_alignment = std::max(dispatch.max_alignment, layer.moe->row_alignment(quantized_));
  }
  Mesh& mesh = parameters_.mesh();
  const DispatchBackend backend = mesh.ep.size() == 1 ? DispatchBackend::kLocal : options_.dispatch_backend;
  if (backend == DispatchBackend::kDirect && mesh.ep_across.size() > 1) {
    return make_two_level_dispatcher({.all = mesh.ep, .within = mesh.ep_within, .across = mesh.ep_across}, dispatch);
  }
  return tessera::make_dispatcher(backend, mesh.ep, dispatch);
}

void Model::set_precisions(const Context& op, PrecisionTable table) {
  quantized_ =
      QuantizedWeights(op, parameters_, std::move(table), options_.keep_quantized, options_.pairs_passes ? 2 : 1);
  parameters_.leave_out_copies(quantized_.kept());
  renew_dispatcher();
}

void Model::allocate(cuda::Runtime* cuda) {
  TESSERA_CHECK((options_.device == Device::kCuda) == (cuda != nullptr));
  parameters_.allocate(options_.compute, cuda);
  quantized_.allocate();
  if (cuda != nullptr) {  // which the constructor may do without
    rope_ = RopeTable(config_, options_.seq_len, 0, options_.device);
    sums_ = StepSums(moe_.layers.size(), config_.num_experts, options_.device);
    evaluated_ = StepSums(0, config_.num_experts, options_.device);
  }
  if (moe_.dispatcher != nullptr) moe_.dispatcher->allocate();
}

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
  counts.embedding = config_.vocab_size * config_.dim;
  counts.active = counts.dense + sparse_active;
  return counts;
}

LayerContext Model::layer_context(const Context& op, const Batch& batch) {
  const LayerContext context{
      .model = &environment_, .op = op, .batch = &batch, .recompute = options_.recompute, .gradients = &parameters_};
  TESSERA_CHECK(context.num_local_tokens() <= options_.max_tokens, "{} tokens, of at most {}",
                context.num_local_tokens(), options_.max_tokens);
  return context;
}

MoeSums Model::sums_of(const Block& block, Device device) const {
  const auto found = std::ranges::find(moe_.layers, block.moe(), &MoeLayers::Layer::moe);
  if (found == moe_.layers.end()) return {};
  return sums_.layer(static_cast<std::size_t>(found - moe_.layers.begin()), device);
}

void Model::clear_sums(const Context& op) { set_zero(op, sums_.all(op.device())); }

void Model::update_expert_biases(const Context& op, const Tensor& finite_1) {
  if (config_.load_balance_coeff == 0.0f) return;
  for (std::size_t i = 0; i < moe_.layers.size(); ++i) {
    update_expert_bias(op, sums_.layer(i, op.device()).counts_E, config_.load_balance_coeff, finite_1,
                       parameters_.buffer(moe_.layers[i].moe->expert_bias()));
  }
}

void Model::embed(const LayerContext& context, const Tensor& tokens_T, const Tensor& x_tD) const {
  const Tensor table_VD = context.weight(embedding_.table);
  const std::int64_t first_id = parameters_.mesh().place.tp * table_VD.dim(0);
  sum_over_ranks(context, TokenSet::kMicroBatch, x_tD, Write::kAssign, parameters_.spec(embedding_.table).name,
                 [&](const Tensor& x, Write) { embedding_forward(context.op, tokens_T, table_VD, first_id, x); });
}

void Model::embed_backward(const LayerContext& context, const Tensor& tokens_T, const Tensor& d_x_tD) const {
  const ArenaScope scope(*context.op.arena);
  const Tensor d_table_VD = context.gradient(embedding_.table);
  embedding_backward(context.op, tokens_T, gather_tokens(context, d_x_tD, parameters_.spec(embedding_.table).name),
                     parameters_.mesh().place.tp * d_table_VD.dim(0), d_table_VD);
}

/// Computes z_tD from the embedding of tokens_T and the previous hidden state. W_eh's columns are two weights side by
/// side.
void Model::mtp_input(const LayerContext& context, const MtpModule& module, const Tensor& tokens_T,
                      const Tensor& hidden_tD, MtpSaved& saved, const Tensor& z_tD) const {
  const Context& op = context.op;
  const std::int64_t num_tokens = context.num_local_tokens(), dim = config_.dim;
  const Shape shape{num_tokens, dim};
  const LayerContext for_saved = context.for_saved();
  saved = {.embedding_tD = for_saved.allocate(shape),
           .embedding_y_tD = for_saved.allocate(shape),
           .embedding_rstd_t = for_saved.allocate({num_tokens}, DType::kFloat32),
           .hidden_tD = hidden_tD,
           .hidden_y_tD = for_saved.allocate(shape),
           .hidden_rstd_t = for_saved.allocate({num_tokens}, DType::kFloat32)};
  embed(context, tokens_T, saved.embedding_tD);
  module.embedding_norm.forward(context, saved.embedding_tD, saved.embedding_y_tD, saved.embedding_rstd_t);
  module.hidden_norm.forward(context, hidden_tD, saved.hidden_y_tD, saved.hidden_rstd_t);
  const Tensor eh_proj = context.weight(module.eh_proj);
  // The two products are added up in float32, so that the sum is rounded only once.
  const ArenaScope scope(*op.arena);
  const Tensor sum_tD = op.arena->allocate(shape, DType::kFloat32);
  linear_forward(op, saved.embedding_y_tD, eh_proj.columns(0, dim), sum_tD);
  linear_forward(op, saved.hidden_y_tD, eh_proj.columns(dim, 2 * dim), sum_tD, Write::kAccumulate);
  convert(op, sum_tD, z_tD);
}

std::optional<UnitId> Model::unit_after(const Stage& stage, std::size_t block) const {
  if (block + 1 < stage.first_block + stage.num_blocks) return trunk_.unit(block + 1);
  return stage.modules.head ? std::optional(heads_.unit) : std::nullopt;
}

void Model::begin_unit(const Context& op, UnitId unit, std::optional<UnitId> next) {
  quantized_.begin_unit(op, unit, parameters_.acquire(unit));
  if (next) parameters_.prefetch(*next);
}

void Model::begin_unit_backward(const Context& op, UnitId unit, std::optional<UnitId> next) {
  begin_unit(op, unit, next);
  parameters_.acquire_gradients(unit);
}

void Model::end_unit_backward(UnitId unit) {
  parameters_.release_gradients(unit);
  end_unit(unit);
}

void Model::forward(const Context& op, std::size_t stage_idx, const Batch& batch, const LossScale& scale,
                    StageSaved& saved, SiteProbe* probe) {
  const Stage& stage = stages_[stage_idx];
  const Device device = op.device();
  LayerContext context = layer_context(op, batch);
  context.probe = probe;
  context.saved_arena = saved.arena;
  const LayerContext for_saved = context.for_saved();
  const Shape shape{context.num_local_tokens(), config_.dim};

  if (stage.modules.embedding) {
    saved.x_tD = saved.sends_output && stage.num_blocks == 0 ? saved.out_tD : for_saved.allocate(shape);
    begin_unit(op, embedding_.unit,
               stage.num_blocks > 0 ? std::optional(trunk_.unit(stage.first_block)) : std::nullopt);
    embed(context, batch.inputs(device), saved.x_tD);
    end_unit(embedding_.unit);
  }
  Tensor x_tD = saved.x_tD;
  for (std::size_t i = 0; i < stage.num_blocks; ++i) {
    const std::size_t block = stage.first_block + i;
    const bool is_sent = saved.sends_output && i + 1 == stage.num_blocks;
    const Tensor out_tD = is_sent ? saved.out_tD : for_saved.allocate(shape);
    begin_unit(op, trunk_.unit(block), unit_after(stage, block));
    trunk_.blocks[block].forward(context, x_tD, saved.blocks[i], out_tD, sums_of(trunk_.blocks[block], device));
    end_unit(trunk_.unit(block));
    x_tD = out_tD;
  }
  if (!stage.modules.head) {
    saved.out_tD = x_tD;
    return;
  }
  saved.d_tD = for_saved.allocate(shape);
  begin_unit_backward(
      op, heads_.unit,
      stage.num_blocks > 0 ? std::optional(trunk_.unit(stage.first_block + stage.num_blocks - 1)) : std::nullopt);
  heads_.main->forward_backward(context, x_tD, batch.labels(device), static_cast<float>(scale.per_token),
                                sums_.main_loss(device), saved.d_tD);
  end_unit_backward(heads_.unit);

  // Multi-token prediction.
  const double mtp_scale =
      heads_.mtp.empty() ? 0.0 : scale.per_token * config_.mtp_loss_weight / static_cast<double>(heads_.mtp.size());
  for (std::size_t k = 0; k < heads_.mtp.size(); ++k) {
    const Tensor z_tD = for_saved.allocate(shape), out_tD = for_saved.allocate(shape);
    begin_unit(op, embedding_.unit);
    begin_unit(op, heads_.mtp[k].unit, heads_.unit);
    parameters_.acquire_gradients(heads_.mtp[k].unit, false);  // its norm's gradient comes with the loss
    mtp_input(context, heads_.mtp[k], batch.mtp_inputs(k, device), x_tD, saved.mtp[k], z_tD);
    end_unit(embedding_.unit);
    heads_.mtp[k].block.forward(context, z_tD, saved.blocks[stage.num_blocks + k], out_tD,
                                sums_of(heads_.mtp[k].block, device));
    saved.d_modules[k] = for_saved.allocate(shape);
    begin_unit_backward(op, heads_.unit);
    heads_.mtp[k].head.forward_backward(context, out_tD, batch.mtp_labels(k, device), static_cast<float>(mtp_scale),
                                        sums_.mtp_loss(device), saved.d_modules[k]);
    end_unit_backward(heads_.unit);
    end_unit_backward(heads_.mtp[k].unit);
    x_tD = out_tD;
  }
}

void Model::backward(const Context& op, std::size_t stage_idx, const Batch& batch, const LossScale& scale,
                     StageSaved& saved, SiteProbe* probe) {
  const Stage& stage = stages_[stage_idx];
  const Device device = op.device();
  LayerContext context = layer_context(op, batch);
  context.balance_scale = static_cast<float>(scale.per_sequence);
  context.probe = probe;
  context.saved_arena = saved.arena;
  context.deferred = saved.deferred ? &*saved.deferred : nullptr;
  const std::int64_t dim = config_.dim;
  const Shape shape{context.num_local_tokens(), dim};
  const ArenaScope scope(*op.arena);
  // Layers change the gradient in place. DeferredWgrads refers to saved tensors without a copy, so these must not
  // change.
  const auto changing = [&](const Tensor& d) {
    if (context.deferred == nullptr) return d;
    const Tensor scratch = context.allocate(d.shape());
    copy(op, d, scratch);
    return scratch;
  };
  const Tensor d_tD = changing(saved.d_tD);
  for (std::size_t k = saved.mtp.size(); k-- > 0;) {
    const MtpModule& module = heads_.mtp[k];
    const MtpSaved& projection = saved.mtp[k];
    const ArenaScope module_scope(*op.arena);
    const Tensor d_z_tD = changing(saved.d_modules[k]);
    begin_unit_backward(op, module.unit, embedding_.unit);
    begin_unit_backward(op, embedding_.unit);
    module.block.backward(context, saved.blocks[stage.num_blocks + k], d_z_tD);
    const Tensor d_y_tD = context.allocate(shape), d_embedding_tD = context.allocate(shape);
    const Tensor eh_proj = context.weight(module.eh_proj), d_eh_proj = context.gradient(module.eh_proj);
    linear_wgrad(op, d_z_tD, projection.embedding_y_tD, d_eh_proj.columns(0, dim));
    linear_dgrad(op, d_z_tD, eh_proj.columns(0, dim), d_y_tD);
    module.embedding_norm.backward(context, d_y_tD, projection.embedding_tD, projection.embedding_rstd_t,
                                   d_embedding_tD);
    embed_backward(context, batch.mtp_inputs(k, device), d_embedding_tD);
    linear_wgrad(op, d_z_tD, projection.hidden_y_tD, d_eh_proj.columns(dim, 2 * dim));
    linear_dgrad(op, d_z_tD, eh_proj.columns(dim, 2 * dim), d_y_tD);
    module.hidden_norm.backward(context, d_y_tD, projection.hidden_tD, projection.hidden_rstd_t,
                                k == 0 ? d_tD : saved.d_modules[k - 1], Write::kAccumulate);
    end_unit_backward(embedding_.unit);
    end_unit_backward(module.unit);
  }
  for (std::size_t i = stage.num_blocks; i-- > 0;) {
    const std::size_t block = stage.first_block + i;
    begin_unit_backward(op, trunk_.unit(block), i > 0 ? std::optional(trunk_.unit(block - 1)) : std::nullopt);
    trunk_.blocks[block].backward(context, saved.blocks[i], d_tD);
    end_unit_backward(trunk_.unit(block));
  }
  if (!stage.modules.embedding) {
    if (context.deferred != nullptr) copy(op, d_tD, saved.d_tD);
    return;
  }
  parameters_.acquire_gradients(embedding_.unit);
  embed_backward(context, batch.inputs(device), d_tD);
  parameters_.release_gradients(embedding_.unit);
}

void Model::backward_weights(const Context& op, std::size_t stage_idx, const Batch& batch, StageSaved& saved) {
  const Stage& stage = stages_[stage_idx];
  const ArenaScope scope(*op.arena);
  const auto for_each_unit = [&](auto&& visit) {
    for (std::size_t i = 0; i < stage.num_blocks; ++i) visit(trunk_.unit(stage.first_block + i));
    for (std::size_t k = 0; k < saved.mtp.size(); ++k) visit(heads_.mtp[k].unit);
  };
  for_each_unit([&](UnitId unit) { parameters_.acquire_gradients(unit); });
  saved.deferred->run(layer_context(op, batch));
  for_each_unit([&](UnitId unit) { parameters_.release_gradients(unit); });
}

LossSums Model::evaluate(const Context& op, const Batch& batch, const BlockObserver& observer, const Tensor& logits_TV,
                         std::span<const Tensor> mtp_logits, std::size_t stage_idx, const Tensor& boundary_tD) {
  const Stage& stage = stages_[stage_idx];
  const Device device = op.device();
  LayerContext context = layer_context(op, batch);
  context.recompute = Recompute::kFull;  // nothing is kept
  const Shape shape{context.num_local_tokens(), config_.dim};
  const ArenaScope scope(*op.arena);
  set_zero(op, evaluated_.all(device));
  BlockSaved dropped;

  Tensor x_tD = context.allocate(shape), other_tD = context.allocate(shape);
  if (stage.modules.embedding) {
    begin_unit(op, embedding_.unit);
    embed(context, batch.inputs(device), x_tD);
    end_unit(embedding_.unit);
    if (observer) observer("tok_embeddings", x_tD);
  } else {
    copy(op, boundary_tD, x_tD);
  }
  for (std::size_t block = stage.first_block; block < stage.first_block + stage.num_blocks; ++block) {
    begin_unit(op, trunk_.unit(block), unit_after(stage, block));
    trunk_.blocks[block].forward(context, x_tD, dropped, other_tD, {});
    end_unit(trunk_.unit(block));
    std::swap(x_tD, other_tD);
    if (observer) {
      observer(
          fmt::format("layers.{}", stage.modules.first_layer + static_cast<std::int64_t>(block - stage.first_block)),
          x_tD);
    }
  }
  if (!stage.modules.head) {
    copy(op, x_tD, boundary_tD);
    return {};
  }
  begin_unit(op, heads_.unit);
  heads_.main->forward_backward(context, x_tD, batch.labels(device), 0.0f, evaluated_.main_loss(device), {}, logits_TV);
  end_unit(heads_.unit);
  for (std::size_t k = 0; k < heads_.mtp.size(); ++k) {
    const ArenaScope module_scope(*op.arena);
    const Tensor z_tD = context.allocate(shape);
    MtpSaved saved;
    begin_unit(op, embedding_.unit);
    begin_unit(op, heads_.mtp[k].unit, heads_.unit);
    mtp_input(context, heads_.mtp[k], batch.mtp_inputs(k, device), x_tD, saved, z_tD);
    end_unit(embedding_.unit);
    heads_.mtp[k].block.forward(context, z_tD, dropped, x_tD, {});
    if (observer) observer(fmt::format("mtp.{}", k), x_tD);
    begin_unit(op, heads_.unit);
    heads_.mtp[k].head.forward_backward(context, x_tD, batch.mtp_labels(k, device), 0.0f, evaluated_.mtp_loss(device),
                                        {}, k < mtp_logits.size() ? mtp_logits[k] : Tensor());
    end_unit(heads_.unit);
    end_unit(heads_.mtp[k].unit);
  }
  if (op.measuring()) return {};
  evaluated_.fetch(op);
  return evaluated_.losses();
}

}  // namespace tessera
