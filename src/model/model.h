// DeepSeek-V3: embedding, blocks, head, and optionally multi-token prediction modules (arXiv 2412.19437, sec. 2.2).
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "model/block.h"
#include "model/head.h"
#include "parallel/pipeline_stages.h"

namespace tessera {

struct ModelOptions {
  Device device = Device::kCpu;  // where the model runs: kCpu or kCuda
  DType compute = DType::kBFloat16;
  OptimizerTensors optimizer = adamw_tensors();
  Recompute recompute = Recompute::kNone;
  bool force_load_balance = false;
  std::int64_t seq_len = 0;              // tokens of a whole sequence; RopeTable has as many positions
  std::shared_ptr<Mesh> mesh = nullptr;  // null: one rank
  /// Keeps weights gathered until the end of the step.
  bool keep_gathered = false;
  /// Sums gradients over the ranks only once per step.
  bool keep_gradients = false;
  /// The type in which the ranks of a shard group send gradients to be summed.
  DType reduce = DType::kFloat32;
  /// Keeps the weights' copies in low precision from pass to pass.
  bool keep_quantized = true;
  /// Lets the executor run passes of two micro-batches in turns (turns()).
  bool pairs_passes = false;
  /// The stages of a pipeline that this rank has, in their order. If it is empty, the whole model is one stage.
  /// Multi-token prediction needs the embedding and the head on one rank.
  std::vector<StageModules> stages = {};
  /// The most tokens of a batch that this rank has between layers. With 0, the model is built for its parameters only,
  /// and is not run.
  std::int64_t max_tokens = 0;
  // The next members are options of expert parallelism (DispatchOptions). One rank needs no backend.
  DispatchBackend dispatch_backend = DispatchBackend::kStandard;
  double capacity_factor = 0.0;
  int dispatch_sms = kDefaultSms;
  PayloadPrecision dispatch_forward = PayloadPrecision::kDefault;
  PayloadPrecision combine_backward = PayloadPrecision::kDefault;
};

/// Holds the factors that turn a micro-batch's sums into its part of the step's loss
///   main/N + mtp_loss_weight · mtp/(modules · N) + balance/sequences.
/// N is the number of valid positions and `sequences` the number of sequences, both of the whole step over all data
/// ranks.
struct LossScale {
  double per_token;     // 1 / N
  double per_sequence;  // 1 / sequences
};

/// Holds what a multi-token prediction module's input projection keeps for its backward.
struct MtpSaved {
  Tensor embedding_tD, embedding_y_tD, embedding_rstd_t;
  Tensor hidden_tD, hidden_y_tD, hidden_rstd_t;
};

/// Holds what a stage keeps of a micro-batch between its passes. Tensors are [t, D].
struct StageSaved {
  /// The arena that owns the saved tensors. Null means op's arena, which works only if backward passes run in reverse
  /// order of the forwards.
  Arena* arena = nullptr;
  /// The input and the output of the stage. The caller sets x_tD, unless the stage has the embedding. out_tD is
  /// undefined if the stage has the head.
  Tensor x_tD, out_tD;
  /// The output's gradient, which the backward turns into the input's. The caller sets it, unless the stage has the
  /// head.
  Tensor d_tD;
  /// Says that the output goes to another rank. The caller then sets out_tD, whose memory the forward writes and the
  /// backward does not read.
  bool sends_output = false;
  std::vector<BlockSaved> blocks;  // those of MTP modules come last
  std::vector<MtpSaved> mtp;
  std::vector<Tensor> d_modules;  // gradients of their outputs
  std::optional<DeferredWgrads> deferred;
};

/// Is called with each block's output, in order of computation. It serves diagnosis and tests.
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
  /// Returns the weights in low precision. There are none before set_precisions().
  const QuantizedWeights& quantized_weights() const { return quantized_; }
  /// Renews all copies of the weights that layers read, after the masters were changed from outside.
  void refresh_weights(const Context& op) {
    parameters_.refresh_shadows(op);
    forget_gathered();
    quantized_.refresh(op);
  }
  /// Discards what passes have gathered and quantized for their own use.
  void forget_gathered() {
    parameters_.forget_gathered();
    quantized_.forget();
  }
  /// Sets the precisions for `op`'s target, with one entry per parameter. Must be called before the quantized weights
  /// are allocated.
  void set_precisions(const Context& op, PrecisionTable table);
  /// Returns the bytes of the windows that expert parallelism takes.
  std::size_t window_bytes() const { return moe_.dispatcher == nullptr ? 0 : moe_.dispatcher->window_bytes(); }
  /// Allocates what training needs, together with all ranks. `cuda` is the GPU's runtime, which must outlive the model.
  /// It is null on CPUs.
  void allocate(cuda::Runtime* cuda = nullptr);
  ParamId embedding() const { return embedding_.table; }
  const std::vector<Block>& blocks() const { return trunk_.blocks; }
  const Head& head() const { return *heads_.main; }

  // The next functions are about the stages of this rank.
  std::size_t num_stages() const { return stages_.size(); }
  const StageModules& stage(std::size_t i) const { return stages_[i].modules; }
  /// Returns what a stage keeps of a micro-batch. If `defers` is set, its backward may defer weight gradients.
  StageSaved make_saved(std::size_t stage, bool defers) const;
  /// Runs a stage's forward for a micro-batch. If the stage has the head, also runs the head's backward. Adds to
  /// sums(). `probe` observes the operands of every GEMM site. It may be null.
  void forward(const Context& op, std::size_t stage, const Batch& batch, const LossScale& scale, StageSaved& saved,
               SiteProbe* probe = nullptr);
  /// Runs the stage's backward, which adds to the gradients. If make_saved was called with `defers`, it leaves those of
  /// every wo and w13 to backward_weights(). A later round of an MoE layer (ep/dispatcher.h) defers nothing.
  void backward(const Context& op, std::size_t stage, const Batch& batch, const LossScale& scale, StageSaved& saved,
                SiteProbe* probe = nullptr);
  void backward_weights(const Context& op, std::size_t stage, const Batch& batch, StageSaved& saved);

  /// Runs the forward only, waits for the losses and returns them. sums() do not change. logits_TV [T, V] and
  /// mtp_logits (one per module) are float32, and are filled where defined. With several stages, boundary_tD is the
  /// stage's input, unless it has the embedding. It becomes the stage's output, unless it has the head.
  LossSums evaluate(const Context& op, const Batch& batch, const BlockObserver& observer = {},
                    const Tensor& logits_TV = {}, std::span<const Tensor> mtp_logits = {}, std::size_t stage = 0,
                    const Tensor& boundary_tD = {});

  /// Returns what this rank's forwards have added up since clear_sums(). Its layers are this rank's MoE layers.
  StepSums& sums() { return sums_; }
  void clear_sums(const Context& op);
  // The next functions are about this rank's MoE layers, in their order. Those of MTP modules come last.
  std::size_t num_moe_layers() const { return moe_.layers.size(); }
  const Moe& moe_layer(std::size_t i) const { return *moe_.layers[i].moe; }
  /// Returns the layer's place among the MoE layers of the whole model.
  std::size_t moe_index(std::size_t i) const { return moe_.layers[i].index; }
  /// Updates every expert bias from the sums over all ranks, once per optimizer step and before it. finite_1 is that of
  /// update_expert_bias.
  void update_expert_biases(const Context& op, const Tensor& finite_1);
  /// Marks the following calls as warm-up. They load kernels, and their inputs are uninitialised.
  void set_warms_up(bool warms_up) { environment_.warms_up = environment_.loads_kernels = warms_up; }
  /// Says whether the calls that follow are to run all kernels that a graph may need.
  void set_loads_kernels(bool loads_kernels) { environment_.loads_kernels = loads_kernels; }
  /// Returns what runs two passes in turns, with ModelOptions::pairs_passes. The two must not add to gradients of the
  /// same unit. Passes of different stages do not. Passes of one stage do not either, without MTP modules.
  Turns& turns() { return turns_; }
  /// Returns the number of SMs that the dispatcher's calls take on a GPU.
  int num_sms_of_calls() const { return moe_.dispatcher == nullptr ? 0 : moe_.dispatcher->num_sms(); }
  /// Returns whether a step waits for the GPU in between (Dispatcher::waits_for_gpu).
  bool waits_for_gpu() const { return moe_.dispatcher != nullptr && moe_.dispatcher->waits_for_gpu(); }
  /// Throws what the dispatcher's calls on a GPU have found since the last check (Dispatcher::check).
  void check_dispatch() {
    if (moe_.dispatcher != nullptr) moe_.dispatcher->check();
  }

 private:
  struct MtpModule;
  struct Stage {
    StageModules modules;
    std::size_t first_block, num_blocks;  // in Trunk::blocks
  };
  struct Embedding {
    ParamId table = 0;
    UnitId unit = 0;
  };
  /// The blocks of all stages. Their units follow each other.
  struct Trunk {
    UnitId first_unit = 0;
    std::vector<Block> blocks;

    UnitId unit(std::size_t block) const { return first_unit + block; }
  };
  /// Holds the output projection and the heads that predict through it. There are none if no stage has the head.
  struct Heads {
    UnitId unit = 0;  // of the projection and the main head
    std::unique_ptr<LinearSite> output;
    std::unique_ptr<Head> main;
    std::vector<MtpModule> mtp;
  };
  /// Holds the MoE layers of blocks and MTP modules, and the dispatcher that moves their tokens.
  struct MoeLayers {
    struct Layer {
      const Moe* moe;
      std::size_t index;  // among the MoE layers of the whole model
    };
    std::vector<Layer> layers;
    std::unique_ptr<Dispatcher> dispatcher;  // null if no layer needs one
  };

  // The next two functions are parts of the constructor.
  void add_mtp_module(std::int64_t module);
  void list_moe_layers();
  /// Makes the dispatcher for the present layers. Returns null if none needs one.
  std::unique_ptr<Dispatcher> make_dispatcher() const;
  void renew_dispatcher();
  LayerContext layer_context(const Context& op, const Batch& batch);
  // Between the next two calls a unit's weights are gathered, and those of `next` are being gathered.
  void begin_unit(const Context& op, UnitId unit, std::optional<UnitId> next = {});
  void end_unit(UnitId unit) {
    quantized_.end_unit(unit);
    parameters_.release(unit);
  }
  // Between the next two calls the unit's gradients are in memory as well, for the backward.
  void begin_unit_backward(const Context& op, UnitId unit, std::optional<UnitId> next = {});
  void end_unit_backward(UnitId unit);
  /// Returns the unit that follows a block of a stage in the forward.
  std::optional<UnitId> unit_after(const Stage& stage, std::size_t block) const;
  /// Assigns the embeddings of this rank's tokens to x_tD. tokens_T has the ids of all T tokens
  /// (model/token_exchange.h).
  void embed(const LayerContext& context, const Tensor& tokens_T, const Tensor& x_tD) const;
  /// Adds to the embedding table's gradient.
  void embed_backward(const LayerContext& context, const Tensor& tokens_T, const Tensor& d_x_tD) const;
  /// Returns the sums that a block's MoE layer adds to. They are undefined for a dense block.
  MoeSums sums_of(const Block& block, Device device) const;
  void mtp_input(const LayerContext& context, const MtpModule& module, const Tensor& tokens_T, const Tensor& hidden_tD,
                 MtpSaved& saved, const Tensor& z_tD) const;

  ModelConfig config_;
  ModelOptions options_;
  Parameters parameters_;
  QuantizedWeights quantized_;
  RopeTable rope_;
  Environment environment_;
  Embedding embedding_;
  Trunk trunk_;
  Heads heads_;
  Turns turns_;
  MoeLayers moe_;
  StepSums sums_;
  StepSums evaluated_;  // losses only
  std::vector<Stage> stages_;
};

}  // namespace tessera
