// DeepSeek-V3: embedding, blocks, head, and optionally multi-token prediction modules (arXiv 2412.19437, sec. 2.2).
#pragma once

#include <functional>
#include <memory>

#include "model/block.h"
#include "model/head.h"

namespace tessera {

struct ModelOptions {
  DType compute = DType::kBFloat16;
  Recompute recompute = Recompute::kNone;
  bool force_load_balance = false;
  std::int64_t seq_len = 0;
};

/// Sums over a micro-batch's (or a step's) valid positions.
struct LossSums {
  double main = 0.0;
  double mtp = 0.0;  // over all modules
};

/// Factors that turn a micro-batch's sums into its part of the step's loss
///   main/N + mtp_loss_weight · mtp/(modules · N) + balance/sequences,
/// N being the valid positions and `sequences` the sequences of the whole step, over all data ranks.
struct LossScale {
  double per_token;     // 1 / N
  double per_sequence;  // 1 / sequences
};

/// Where a step's time goes. The head's backward runs with its forward, chunk by chunk, and counts there.
struct PhaseSeconds {
  double data = 0.0, forward = 0.0, backward = 0.0, optimizer = 0.0;

  PhaseSeconds& operator+=(const PhaseSeconds& other) {
    data += other.data, forward += other.forward, backward += other.backward, optimizer += other.optimizer;
    return *this;
  }
  PhaseSeconds operator/(double count) const {
    return {
        .data = data / count, .forward = forward / count, .backward = backward / count, .optimizer = optimizer / count};
  }
};

/// Told of each block's output, in order of computation; for diagnosis and tests.
using BlockObserver = std::function<void(const std::string& name, const Tensor& x_TD)>;

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
    quantized_.refresh(op, parameters_);
  }
  /// One entry per parameter. Before the quantized weights are allocated.
  void set_precisions(PrecisionTable table) { quantized_ = QuantizedWeights(parameters_, std::move(table)); }
  ParamId embedding() const { return embedding_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  const Head& head() const { return *head_; }

  /// Forward and backward of one micro-batch: gradients and loads +=. Activations live on op's arena during the call.
  /// `seconds`, if given: forward and backward +=. `probe`, if given, is told of the operands of every GEMM site.
  LossSums train_step(const Context& op, const Batch& batch, const LossScale& scale, PhaseSeconds* seconds = nullptr,
                      SiteProbe* probe = nullptr);

  /// Forward only; loads stay as they are. logits_TV [T, V] and mtp_logits (one per module), float32, are filled where
  /// defined.
  LossSums evaluate(const Context& op, const Batch& batch, const BlockObserver& observer = {},
                    const Tensor& logits_TV = {}, std::span<const Tensor> mtp_logits = {});

  /// MoE layers in order (MTP modules' last), with what their loads have added up to since clear_loads().
  std::size_t num_moe_layers() const { return moe_layers_.size(); }
  const Moe& moe_layer(std::size_t i) const { return *moe_layers_[i]; }
  MoeLoad& load(std::size_t i) { return loads_[i]; }
  void clear_loads();
  /// One update of every expert bias from the loads (SEMANTICS: once per optimizer step, before it).
  void update_expert_biases();

 private:
  struct MtpModule;
  /// What a module's input projection keeps for its backward.
  struct MtpSaved {
    Tensor embedding_TD, embedding_y_TD, embedding_rstd_T;
    Tensor hidden_TD, hidden_y_TD, hidden_rstd_T;
  };

  LayerContext layer_context(const Context& op, const Batch& batch) const;
  MoeLoad* load_of(const Block& block, std::vector<MoeLoad>& loads);
  void mtp_input(const LayerContext& context, const MtpModule& module, const Tensor& tokens_T, const Tensor& hidden_TD,
                 MtpSaved& saved, const Tensor& z_TD) const;

  ModelConfig config_;
  ModelOptions options_;
  Parameters parameters_;
  QuantizedWeights quantized_;
  RopeTable rope_;
  ParamId embedding_ = 0;
  std::vector<Block> blocks_;
  ParamId output_ = 0;
  std::unique_ptr<Head> head_;
  std::vector<MtpModule> mtp_;
  std::vector<const Moe*> moe_layers_;
  std::vector<MoeLoad> loads_;
  std::vector<MoeLoad> discarded_loads_;  // evaluation counts here
  std::vector<BlockSaved> saved_;         // one per block, MTP modules' last
  std::vector<MtpSaved> mtp_saved_;       // per MTP module, as is the next
  std::vector<Tensor> d_module_;          // gradient of the module's output
};

}  // namespace tessera
