#include "step/step_reduction.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise/elementwise.h"

namespace tessera {

StepReduction::StepReduction(Mesh& mesh, const Model& whole)
    : mesh_(mesh), all_(whole.num_moe_layers(), whole.config().num_experts) {}

void StepReduction::reduce(const Context& op, Model& model, Mirrored<double>& squares) {
  StepSums& own = model.sums();
  if (mesh_.sequence.rank() != 0) {  // all ranks of a sequence have its balance loss, and one counts
    for (std::size_t i = 0; i < model.num_moe_layers(); ++i) set_zero(op, own.layer(i, op.device()).balance_loss_1);
  }
  constexpr const char *kSums = "losses and loads", *kNorm = "the gradient norm";
  // Every stage decides by the loss whether the step counts; only the last one has it.
  if (op.cuda != nullptr || op.measuring()) {
    mesh_.tokens.all_reduce(own.all(op.device()), kSums).wait();
    mesh_.pp.all_reduce(own.scalars(op.device()), kSums).wait();
    return mesh_.model.all_reduce(squares.tensor(op.device()), kNorm).wait();
  }
  own_is_finite_ = std::isfinite(squares.host()[0]) && std::isfinite(own.losses().main);
  // Each replica has its own norm, but the loss is shared. So a loss that is NaN makes all replicas skip the step.
  own.scalars()[0] += 0.0 * squares.host()[0];  // NaN unless the squares are finite
  mesh_.tokens.all_reduce(own.host(), kSums);
  mesh_.pp.all_reduce(own.scalars(), kSums);
  mesh_.model.all_reduce(squares.host(), kNorm);
  collect(model);
}

void StepReduction::collect(Model& model) {
  StepSums& own = model.sums();
  const std::span<double> scalars = all_.scalars(), layers = all_.host().subspan(scalars.size());
  std::ranges::copy(own.scalars(), scalars.begin());
  std::ranges::fill(layers, 0.0);  // other ranks of the pipeline have the others
  for (std::size_t i = 0; i < model.num_moe_layers(); ++i) {
    std::ranges::copy(own.layer_numbers(i), all_.layer_numbers(model.moe_index(i)).begin());
  }
  if (mesh_.pp.size() > 1) mesh_.pp.all_reduce(layers, "losses and loads");
}

}  // namespace tessera
