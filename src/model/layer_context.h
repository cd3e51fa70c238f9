// What every layer of the model gets besides its operands.
#pragma once

#include "ep/dispatcher.h"
#include "model/batch.h"
#include "model/config.h"
#include "model/recompute.h"
#include "model/rope_table.h"
#include "ops/runtime/context.h"
#include "parallel/mesh.h"
#include "params/quantized_weights.h"

namespace tessera {

/// Observes the operands of every GEMM site while a micro-batch is computed. It sees each one before it is multiplied.
/// It serves diagnosis. With a probe, quantized operands exist in plain form too.
class SiteProbe {
 public:
  enum class Role : std::uint8_t { kInput, kWeight, kGradient };
  virtual ~SiteProbe() = default;
  /// Observes an operand. Its first num_rows rows count, or all rows if num_rows is -1. `quantized` is its form along
  /// the contraction of fprop (of dgrad for kGradient). It is undefined where the operand is not quantized.
  virtual void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
                       std::int64_t num_rows) = 0;
};

class DeferredWgrads;

/// Holds what all layers of a model share. It does not change during a pass.
struct Environment {
  const ModelConfig* config;
  const Parameters* parameters;
  const QuantizedWeights* quantized;
  const RopeTable* rope;
  Dispatcher* dispatcher = nullptr;  // of all MoE layers
  /// Assigns experts in turn, whatever the router says ([debug] moe_force_load_balance).
  bool force_load_balance = false;
  /// True during warm-up. Inputs are uninitialised, so experts are assigned in turn instead of by scores.
  bool warms_up = false;
  /// A later round (ep/dispatcher.h) runs even if it has no rows, so that its kernels are loaded.
  bool loads_kernels = false;
};

/// Describes one pass of one micro-batch through layers of a model: the environment, and how this pass differs from
/// others.
struct LayerContext {
  const Environment* model;
  Context op;
  const Batch* batch;
  Recompute recompute = Recompute::kNone;
  /// The arena that owns what a forward saves for the backward. Null means op's arena, which works only if backward
  /// passes run in reverse order of the forwards.
  Arena* saved_arena = nullptr;
  SiteProbe* probe = nullptr;
  bool probe_has_seen = false;  // this pass repeats a forward, and the probe does not observe it again
  /// The parameters as a backward needs them, which writes gradients. Null means that there is no backward.
  Parameters* gradients = nullptr;
  /// The factor of the balance loss's gradient: 1 / (sequences of the global batch).
  float balance_scale = 0.0f;
  /// Collects the weight gradients that a backward defers. Null means that the backward computes them itself.
  DeferredWgrads* deferred = nullptr;

  const ModelConfig& config() const { return *model->config; }
  const Parameters& parameters() const { return *model->parameters; }
  Mesh& mesh() const { return model->parameters->mesh(); }
  Tensor weight(ParamId id) const { return model->parameters->weight(id); }
  Tensor gradient(ParamId id) const { return model->parameters->gradient(id); }
  const SitePrecision& precision(ParamId id) const { return model->quantized->precision(id); }
  DType compute() const { return model->parameters->compute_dtype(); }
  /// num_tokens() returns T, the number of tokens that the tensor-parallel ranks share. num_local_tokens() returns t,
  /// the number of those that this rank has between layers. They begin at first_local_token().
  std::int64_t num_tokens() const { return batch->num_tokens(); }
  std::int64_t num_local_tokens() const { return num_tokens() / mesh().degrees.tp; }
  std::int64_t first_local_token() const { return mesh().place.tp * num_local_tokens(); }
  /// Returns this rank's rows of a tensor with a row per token of the micro-batch.
  Tensor local_rows(const Tensor& x_T) const {
    return x_T.rows(first_local_token(), first_local_token() + num_local_tokens());
  }
  Tensor allocate(Shape shape) const { return op.arena->allocate(shape, compute()); }
  Tensor allocate(Shape shape, DType dtype) const { return op.arena->allocate(shape, dtype); }

  /// Returns the context for operators that run on `other`.
  LayerContext with_op(const Context& other) const {
    LayerContext result = *this;
    result.op = other;
    return result;
  }
  /// Returns the context that allocates on saved_arena, which is for what the backward reads.
  LayerContext for_saved() const {
    LayerContext result = *this;
    if (saved_arena != nullptr) result.op.arena = saved_arena;
    return result;
  }
  /// Returns the context for a forward whose saved tensors are dropped. It writes as little as possible for a backward.
  LayerContext for_dropped() const {
    LayerContext result = *this;
    result.recompute = Recompute::kSelective;
    result.saved_arena = nullptr;
    return result;
  }
  /// Returns the context for computing a part of the forward again. The probe has seen its operands already.
  LayerContext for_recomputation() const {
    LayerContext result = *this;
    result.probe_has_seen = true;
    result.saved_arena = nullptr;
    return result;
  }
  /// Returns the probe, if it is to observe this pass.
  SiteProbe* observer() const { return probe_has_seen ? nullptr : probe; }
};

// The initial standard deviations are TorchTitan's. Weights that first read the residual stream have kInitStd. Those
// that write to it have a deviation that falls with depth.
inline constexpr float kInitStd = 0.02f;
inline constexpr float kInitBound = 2.0f;
inline Init init_shallow() { return {.std = kInitStd, .bound = kInitBound}; }
Init init_by_depth(std::int64_t layer);

}  // namespace tessera
