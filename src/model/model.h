// DeepSeek-V3: embedding, blocks, head, and optionally multi-token prediction modules (arXiv 2412.19437, sec. 2.2).
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "device/phase_clock.h"
#include "model/block.h"
#include "model/head.h"
#include "parallel/pipeline_stages.h"

namespace tessera {

struct ModelOptions {
  Device device = Device::kCpu;  // where it runs: kCpu or kCuda
  DType compute = DType::kBFloat16;
  DType moments = DType::kFloat32;  // of AdamW: float32 or bfloat16
  Recompute recompute = Recompute::kNone;
  bool force_load_balance = false;
  std::int64_t seq_len = 0;
  std::shared_ptr<Mesh> mesh = nullptr;  // null: one rank
  /// Weights stay gathered from the forward to the backward.
  bool keep_gathered = false;
  /// Gradients are summed over the ranks once per step.
  bool keep_gradients = false;
  /// The stages of a pipeline that this rank has, in their order; empty: the whole model as one stage. Multi-token
  /// prediction needs the embedding and the head on one rank.
  std::vector<StageModules> stages = {};
  /// Of a batch, that this rank has between layers; 0: the model is there for its parameters, and is not run.
  std::int64_t max_tokens = 0;
  // Expert parallelism (DispatchOptions); one rank needs no backend.
  DispatchBackend dispatch_backend = DispatchBackend::kStandard;
  double capacity_factor = 0.0;
  int dispatch_sms = kDefaultSms;
  PayloadPrecision dispatch_forward = PayloadPrecision::kDefault;
  PayloadPrecision combine_backward = PayloadPrecision::kDefault;
};

/// Factors that turn a micro-batch's sums into its part of the step's loss
///   main/N + mtp_loss_weight · mtp/(modules · N) + balance/sequences,
/// N being the valid positions and `sequences` the sequences of the whole step, over all data ranks.
struct LossScale {
  double per_token;     // 1 / N
  double per_sequence;  // 1 / sequences
};

/// What a multi-token prediction module's input projection keeps for its backward.
struct MtpSaved {
  Tensor embedding_tD, embedding_y_tD, embedding_rstd_t;
  Tensor hidden_tD, hidden_y_tD, hidden_rstd_t;
};

/// What a stage keeps of a micro-batch between its passes. Tensors [t, D].
struct StageSaved {
  /// Where it is; null: on op's arena, for passes that are nested like brackets.
  Arena* arena = nullptr;
  /// Input and output of the stage. The caller sets x_tD, but for a stage with the embedding; out_tD is undefined for
  /// one with the head.
  Tensor x_tD, out_tD;
  /// The gradient of the output, which the caller sets before the backward, but for a stage with the head; the backward
  /// makes it the input's.
  Tensor d_tD;
  std::vector<BlockSaved> blocks;  // MTP modules' last
  std::vector<MtpSaved> mtp;
  std::vector<Tensor> d_modules;  // gradients of their outputs
  std::optional<DeferredWgrads> deferred;
};

/// Told of each block's output, in order of computation; for diagnosis and tests.
using BlockObserver = std::function<void(const std::string& name, const Tensor& x_tD)>;

class Model {
 public:
  Model(const ModelConfig& config, const ModelOptions& options);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  ParameterCounts count_parameters() const;
  /// Weights in low precision; none but after set_precisions().
  QuantizedWeights& quantized_weights() { return quantized_; }
  const QuantizedWeights& quantized_weights() const { return quantized_; }
  /// Makes all copies of the weights that layers read, after the masters were changed from outside.
  void refresh_weights(const Context& op) {
    parameters_.refresh_shadows();
    weights_changed(op);
  }
  /// The same after the optimizer, which makes the masters' copies itself.
  void weights_changed(const Context& op) {
    parameters_.forget_gathered();
    quantized_.refresh(op);
  }
  /// One entry per parameter, for `op`'s target. Before the quantized weights are allocated.
  void set_precisions(const Context& op, PrecisionTable table);
  /// Memory that expert parallelism takes.
  std::size_t window_bytes() const { return dispatcher_ == nullptr ? 0 : dispatcher_->window_bytes(); }
  /// Takes the memory of a model that is trained, together with all ranks; on the GPU of `cuda`, which must stay, if
  /// that is where it runs.
  void allocate(cuda::Runtime* cuda = nullptr);
  ParamId embedding() const { return embedding_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  const Head& head() const { return *head_; }

  /// Stages of this rank, and what one keeps of a micro-batch. `defers`: the weights' gradients can be put off.
  std::size_t num_stages() const { return stages_.size(); }
  const StageModules& stage(std::size_t i) const { return stages_[i].modules; }
  StageSaved make_saved(std::size_t stage, bool defers) const;
  /// A stage's forward of a micro-batch, with the head also its backward; sums() +=. `probe`, if given, is told of the
  /// operands of every GEMM site.
  void forward(const Context& op, std::size_t stage, const Batch& batch, const LossScale& scale, StageSaved& saved,
               SiteProbe* probe = nullptr);
  /// Its backward: gradients +=, if make_saved was to defer, those of the GEMM sites' weights by backward_weights().
  void backward(const Context& op, std::size_t stage, const Batch& batch, const LossScale& scale, StageSaved& saved,
                SiteProbe* probe = nullptr);
  void backward_weights(const Context& op, std::size_t stage, const Batch& batch, StageSaved& saved);

  /// Forward and backward of one micro-batch by a model of one stage; sums() +=. Activations live on op's arena during
  /// the call. `clock`, if given: forward and backward +=.
  void train_step(const Context& op, const Batch& batch, const LossScale& scale, PhaseClock* clock = nullptr,
                  SiteProbe* probe = nullptr);

  /// Forward only; sums() stay as they are, and the losses are waited for. logits_TV [T, V] and mtp_logits (one per
  /// module), float32, are filled where defined. Of one of several stages: x_tD is its input, but for the embedding's,
  /// and becomes its output, but for the head's.
  LossSums evaluate(const Context& op, const Batch& batch, const BlockObserver& observer = {},
                    const Tensor& logits_TV = {}, std::span<const Tensor> mtp_logits = {}, std::size_t stage = 0,
                    const Tensor& x_tD = {});

  /// What this rank's forwards have added up since clear_sums(); its layers are this rank's MoE layers.
  StepSums& sums() { return sums_; }
  void clear_sums(const Context& op);
  /// This rank's MoE layers in order (MTP modules' last).
  std::size_t num_moe_layers() const { return moe_layers_.size(); }
  const Moe& moe_layer(std::size_t i) const { return *moe_layers_[i]; }
  /// Its place among the MoE layers of the whole model.
  std::size_t moe_index(std::size_t i) const { return moe_index_[i]; }
  /// One update of every expert bias from the sums over all ranks (once per optimizer step, before it).
  /// finite_1: as update_expert_bias's.
  void update_expert_biases(const Context& op, const Tensor& finite_1);
  /// From now on, as options().force_load_balance.
  void set_force_load_balance(bool force) { options_.force_load_balance = force; }
  /// Whether a step waits for the GPU in between (Dispatcher::waits_for_gpu).
  bool waits_for_gpu() const { return dispatcher_ != nullptr && dispatcher_->waits_for_gpu(); }
  /// Throws what the dispatcher's calls have found since, on a GPU (Dispatcher::check).
  void check_dispatch() {
    if (dispatcher_ != nullptr) dispatcher_->check();
  }

 private:
  struct MtpModule;
  struct Stage {
    StageModules modules;
    std::size_t first_block, num_blocks;  // in blocks_
  };

  /// For the layers as they are.
  std::unique_ptr<Dispatcher> make_dispatcher() const;
  LayerContext layer_context(const Context& op, const Batch& batch);
  // A unit's weights are there between the two, and the next one's are on their way.
  void begin_unit(const Context& op, UnitId unit, std::optional<UnitId> next = {});
  void end_unit(UnitId unit) { parameters_.release(unit); }
  // The same for the backward: its gradients are there as well.
  void begin_unit_backward(const Context& op, UnitId unit, std::optional<UnitId> next = {});
  void end_unit_backward(UnitId unit);
  UnitId block_unit(std::size_t block) const { return first_block_unit_ + block; }
  /// The unit behind a block of a stage, in the forward.
  std::optional<UnitId> unit_after(const Stage& stage, std::size_t block) const;
  /// x_tD (=) this rank's tokens' embeddings, and their gradients; tokens_T: of all (model/token_exchange.h).
  void embed(const LayerContext& context, const Tensor& tokens_T, const Tensor& x_tD) const;
  void embed_backward(const LayerContext& context, const Tensor& tokens_T, const Tensor& d_x_tD) const;
  /// What a block's MoE layer adds to; nothing for a dense block.
  MoeSums sums_of(const Block& block, Device device) const;
  void mtp_input(const LayerContext& context, const MtpModule& module, const Tensor& tokens_T, const Tensor& hidden_tD,
                 MtpSaved& saved, const Tensor& z_tD) const;

  ModelConfig config_;
  ModelOptions options_;
  Parameters parameters_;
  QuantizedWeights quantized_;
  RopeTable rope_;
  ParamId embedding_ = 0;
  UnitId embedding_unit_ = 0, first_block_unit_ = 0, head_unit_ = 0;
  std::vector<Block> blocks_;
  ParamId output_ = 0;
  std::unique_ptr<Head> head_;
  std::vector<MtpModule> mtp_;
  std::vector<const Moe*> moe_layers_;
  std::unique_ptr<Dispatcher> dispatcher_;  // null if no layer needs one
  std::vector<std::size_t> moe_index_;
  StepSums sums_;
  StepSums evaluated_;  // losses only
  std::vector<Stage> stages_;
  StageSaved saved_;  // train_step's
};

}  // namespace tessera
