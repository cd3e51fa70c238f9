// Runs one micro-batch through a model, without an optimizer.
#pragma once

#include "model/model.h"

namespace tessera {

/// Runs forward and backward of a micro-batch, for a model of one stage. Adds to the gradients and to model.sums().
inline void forward_backward(Model& model, const Context& op, const Batch& batch, const LossScale& scale,
                             SiteProbe* probe = nullptr) {
  const ArenaScope scope(*op.arena);
  StageSaved saved = model.make_saved(0, false);
  model.forward(op, 0, batch, scale, saved, probe);
  model.backward(op, 0, batch, scale, saved, probe);
}

}  // namespace tessera
