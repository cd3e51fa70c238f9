// What every layer of the model is told besides its operands.
#pragma once

#include "model/batch.h"
#include "model/config.h"
#include "model/parameters.h"
#include "model/rope_table.h"
#include "ops/context.h"

namespace tessera {

/// Which activations the forward keeps for the backward ([activation_checkpoint] mode). The results are the same bit
/// for bit, because what is not kept is computed again by the same operators from the same numbers.
enum class Recompute {
  kNone,       // keep everything
  kSelective,  // recompute norms, MLA's up-projections, RoPE and routed rows (DeepSeek-V3, sec. 3.2.3)
  kFull,       // keep only each block's input
};

struct LayerContext {
  Context op;
  const ModelConfig* config;
  const Parameters* parameters;
  const Batch* batch;
  const RopeTable* rope;
  Recompute recompute = Recompute::kNone;
  /// True while a forward is repeated for the backward: counts that a forward adds up stay as they are.
  bool repeated = false;
  /// Factor of the balance loss's gradient: 1 / (sequences of the global batch).
  float balance_scale = 0.0f;
  /// [T, D] each, shared by all blocks of a pass: a branch's output, and a norm's output where it is not kept.
  Tensor branch_TD, norm_TD;

  Tensor weight(ParamId id) const { return parameters->weight(id); }
  Tensor gradient(ParamId id) const { return parameters->gradient(id); }
  DType compute() const { return parameters->compute_dtype(); }
  std::int64_t num_tokens() const { return batch->num_tokens(); }

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
