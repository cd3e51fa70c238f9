// What every layer of the model gets besides its operands.
#pragma once

#include "ep/dispatcher.h"
#include "model/batch.h"
#include "model/config.h"
#include "model/rope_table.h"
#include "ops/runtime/context.h"
#include "parallel/mesh.h"
#include "params/quantized_weights.h"

namespace tessera {

/// Which activations the forward keeps for the backward ([activation_checkpoint] mode). The results are the same bit
/// for bit, because what is not kept is computed again by the same operators from the same numbers.
enum class Recompute {
  kNone,       // keep everything
  kSelective,  // recompute norms, MLA's up-projections, RoPE and routed rows (DeepSeek-V3, sec. 3.2.3)
  kFull,       // keep only each block's input
};

/// Observes the operands of every GEMM site while a micro-batch is computed, each before it is multiplied; for
/// diagnosis. With a probe, quantized operands exist in plain form too.
class SiteProbe {
 public:
  enum class Role : std::uint8_t { kInput, kWeight, kGradient };
  virtual ~SiteProbe() = default;
  /// `plain`: the operand, of which the first num_rows rows count (-1: all). `quantized`: its form along the
  /// contraction of fprop (dgrad for kGradient), undefined where it is not quantized.
  virtual void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
                       std::int64_t num_rows) = 0;
};

class DeferredWgrads;

struct LayerContext {
  Context op;
  const ModelConfig* config;
  const Parameters* parameters;
  const QuantizedWeights* quantized;
  const Batch* batch;
  const RopeTable* rope;
  Mesh* mesh;
  Dispatcher* dispatcher;  // of all MoE layers
  Recompute recompute = Recompute::kNone;
  /// Assigns experts in turn, whatever the router says ([debug] moe_force_load_balance).
  bool force_load_balance = false;
  /// True while a forward is repeated for the backward. A probe has seen its operands already.
  bool repeated = false;
  /// The factor of the balance loss's gradient: 1 / (sequences of the global batch).
  float balance_scale = 0.0f;
  SiteProbe* probe = nullptr;
  /// Arena that owns what a forward keeps. Null means op's arena, which works only if backward passes run in reverse
  /// order of the forwards.
  Arena* kept = nullptr;
  /// The parameters again, for a backward, which writes gradients. Null where there is no backward.
  Parameters* gradients = nullptr;
  /// Collects the weight gradients that a backward puts off. Null means that the backward computes them itself.
  DeferredWgrads* deferred = nullptr;

  Tensor weight(ParamId id) const { return parameters->weight(id); }
  Tensor gradient(ParamId id) const { return parameters->gradient(id); }
  Write gradient_write(ParamId id) const { return gradients->gradient_write(id); }
  const SitePrecision& precision(ParamId id) const { return quantized->precision(id); }
  DType compute() const { return parameters->compute_dtype(); }
  /// num_tokens: T, the tokens that the tensor-parallel ranks share. num_local_tokens: t, those of them that this rank
  /// has between layers, from first_local_token() on.
  std::int64_t num_tokens() const { return batch->num_tokens(); }
  std::int64_t num_local_tokens() const { return num_tokens() / mesh->degrees.tp; }
  std::int64_t first_local_token() const { return mesh->place.tp * num_local_tokens(); }
  /// Returns this rank's rows of a tensor with a row per token of the micro-batch.
  Tensor local_rows(const Tensor& x_T) const {
    return x_T.rows(first_local_token(), first_local_token() + num_local_tokens());
  }

  /// Returns a context whose arena is the one for what is kept.
  LayerContext keeping() const {
    LayerContext result = *this;
    if (kept != nullptr) result.op.arena = kept;
    return result;
  }
  /// Returns a context whose operators run on `other`.
  LayerContext on(const Context& other) const {
    LayerContext result = *this;
    result.op = other;
    return result;
  }
  Tensor allocate(Shape shape) const { return op.arena->allocate(shape, compute()); }
  Tensor allocate(Shape shape, DType dtype) const { return op.arena->allocate(shape, dtype); }
};

// Initial deviations, by TorchTitan: `kInitStd` for what reads the residual stream first, and a deviation that falls
// with depth for what writes to it.
inline constexpr float kInitStd = 0.02f;
inline constexpr float kInitBound = 2.0f;
inline Init init_shallow() { return {.std = kInitStd, .bound = kInitBound}; }
Init init_by_depth(std::int64_t layer);

}  // namespace tessera
