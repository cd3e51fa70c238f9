// Sums a step's numbers over all ranks: losses, the experts' loads and the gradients' norm.
#pragma once

#include "model/model.h"
#include "tensor/mirrored.h"

namespace tessera {

class StepReduction {
 public:
  /// `whole` is the model with all stages of the pipeline. `mesh` must outlive this.
  StepReduction(Mesh& mesh, const Model& whole);

  /// Adds up the sums of `model` over all ranks, and `squares` over the ranks of a replica, which together have all
  /// gradients. On CPUs it also calls collect(), and the main loss becomes NaN on all ranks if the squares of any rank
  /// are not finite. On GPUs replicas agree only because their gradients are the same.
  void reduce(const Context& op, Model& model, Mirrored<double>& squares);
  /// Fills all() from the model's sums, which the host must have, and from those of the pipeline's other ranks.
  void collect(Model& model);
  /// Returns the sums of all layers of the pipeline, over all ranks.
  const StepSums& all() const { return all_; }
  /// Returns whether this rank's sum of losses and its shards of the gradients were finite in the last step. Losses are
  /// those before the sum over ranks. Shards are sums over the ranks that share them. It is known only on CPUs, and
  /// only after reduce(). Elsewhere it returns false.
  bool own_is_finite() const { return own_is_finite_; }

 private:
  Mesh& mesh_;
  StepSums all_;
  bool own_is_finite_ = false;
};

}  // namespace tessera
