#include "train/training_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/stopwatch.h"
#include "ops/adamw.h"
#include "ops/elementwise.h"

namespace tessera {

ModelOptions model_options(const JobConfig& config) {
  return {.compute = config.training.mixed_precision_param,
          .recompute = config.activation_checkpoint.mode,
          .force_load_balance = config.debug.moe_force_load_balance,
          .seq_len = config.training.seq_len};
}

TrainingStep::TrainingStep(const JobConfig& config)
    : config_(config), model_(config.model.args, model_options(config)) {
  model_.parameters().allocate_meta(config.training.mixed_precision_param);
  model_.set_precisions(resolve_recipes(config.recipes(), model_.parameters()));
  measure();
}

Batch TrainingStep::make_batch() const {
  return Batch(config_.model.args, config_.training.local_batch_size, config_.training.seq_len);
}

Context TrainingStep::context() { return {.arena = &arena_, .gemm = &gemm_, .trace = trace_}; }

void TrainingStep::measure() {
  const Batch batch = make_batch();
  const Context op = context();
  SqnrProbe probe;
  for (SiteProbe* observer : {static_cast<SiteProbe*>(nullptr), static_cast<SiteProbe*>(&probe)}) {
    model_.train_step(op, batch, {.per_token = 1.0, .per_sequence = 1.0}, nullptr, observer);
  }
  model_.evaluate(op, batch);
  sum_of_squares(op, model_.parameters().all_gradients());
  const Parameters& parameters = model_.parameters();
  const std::size_t one = parameters.all_gradients().num_bytes();
  plan_ = {
      .weights = parameters.num_bytes(parameters.compute_dtype()) - 3 * one + model_.quantized_weights().num_bytes(),
      .gradients = one,
      .moments = 2 * one,
      .activations = arena_.peak()};
}

void TrainingStep::allocate() {
  model_.parameters().allocate(config_.training.mixed_precision_param);
  model_.parameters().initialise(static_cast<std::uint64_t>(config_.debug.seed));
  model_.quantized_weights().allocate();
  arena_ = Arena(plan_.activations);
  model_.quantized_weights().refresh(context(), model_.parameters());
}

void TrainingStep::refresh_weights() { model_.refresh_weights(context()); }

StepResult TrainingStep::run(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr) {
  const Context op = context();
  Parameters& parameters = model_.parameters();
  StepResult result;
  std::int64_t num_valid = 0, num_sequences = 0;
  for (const Batch& batch : micro_batches) {
    num_valid += batch.num_valid();
    num_sequences += batch.num_seqs();
    result.num_tokens += batch.num_tokens();
  }
  const LossScale scale{.per_token = 1.0 / static_cast<double>(std::max<std::int64_t>(num_valid, 1)),
                        .per_sequence = 1.0 / static_cast<double>(num_sequences)};

  set_zero(op, parameters.all_gradients());
  model_.clear_loads();
  LossSums sums;
  SqnrProbe probe;
  for (const Batch& batch : micro_batches) {
    const bool probed = measure_sqnr && &batch == micro_batches.data();
    const LossSums part = model_.train_step(op, batch, scale, &result.seconds, probed ? &probe : nullptr);
    sums.main += part.main;
    sums.mtp += part.mtp;
  }
  const ModelConfig& model = config_.model.args;
  result.loss = sums.main * scale.per_token;
  if (model.num_mtp_modules > 0)
    result.mtp_loss = sums.mtp * scale.per_token / static_cast<double>(model.num_mtp_modules);
  for (std::size_t i = 0; i < model_.num_moe_layers(); ++i) {
    const MoeLoad& load = model_.load(i);
    result.balance_loss += load.balance_loss * scale.per_sequence;
    const auto total = std::accumulate(load.counts_E.begin(), load.counts_E.end(), std::int64_t{0});
    const double mean = static_cast<double>(total) / static_cast<double>(load.counts_E.size());
    result.expert_load.push_back(static_cast<double>(*std::max_element(load.counts_E.begin(), load.counts_E.end())) /
                                 mean);
  }
  result.total_loss = result.loss + static_cast<double>(model.mtp_loss_weight) * result.mtp_loss + result.balance_loss;
  result.learning_rate = config_.optimizer.lr * config_.lr_scheduler.factor(step - 1, config_.training.steps);
  result.grad_norm = std::sqrt(sum_of_squares(op, parameters.all_gradients()));
  if (!std::isfinite(result.total_loss) || !std::isfinite(result.grad_norm)) {
    const std::string message = fmt::format(
        "step {}: loss {}, gradient norm {}; first non-finite numbers in {}. The last checkpoint is from "
        "before.",
        step, result.total_loss, result.grad_norm, find_non_finite(micro_batches, scale));
    throw NonFiniteStep(message, std::move(result));
  }

  result.sqnr = probe.result(parameters);
  const Stopwatch watch;
  model_.update_expert_biases();
  const TraceScope trace(trace_, "optimizer");
  const double clip = std::min(1.0, config_.training.max_norm / (result.grad_norm + 1e-6));
  adamw(op,
        {.learning_rate = static_cast<float>(result.learning_rate),
         .beta1 = static_cast<float>(config_.optimizer.beta1),
         .beta2 = static_cast<float>(config_.optimizer.beta2),
         .epsilon = static_cast<float>(config_.optimizer.eps),
         .weight_decay = static_cast<float>(config_.optimizer.weight_decay),
         .step = step,
         .gradient_scale = static_cast<float>(clip)},
        parameters.all_gradients(), parameters.all_first_moments(), parameters.all_second_moments(),
        parameters.all_masters(), parameters.all_shadows());
  model_.quantized_weights().refresh(op, parameters);
  result.seconds.optimizer = watch.seconds();
  return result;
}

double TrainingStep::evaluate(const Batch& batch) {
  return model_.evaluate(context(), batch).main / static_cast<double>(std::max<std::int64_t>(batch.num_valid(), 1));
}

std::string TrainingStep::find_non_finite(std::span<const Batch> micro_batches, const LossScale& scale) {
  const Context op = context();
  const Parameters& parameters = model_.parameters();
  // The backward runs from the last parameter to the first.
  std::string gradient = "the sum of the losses, or of the gradients' squares";
  for (ParamId id = 0; id < parameters.size(); ++id) {
    if (!all_finite(op, parameters.gradient(id))) gradient = "the gradient of " + parameters.spec(id).name;
  }
  std::string found;
  FiniteProbe probe(parameters);
  set_zero(op, parameters.all_gradients());
  for (const Batch& batch : micro_batches) {
    model_.train_step(op, batch, scale, nullptr, &probe);
    if (!probe.found().empty()) return probe.found();
    model_.evaluate(op, batch, [&](const std::string& name, const Tensor& x_TD) {
      if (found.empty() && !all_finite(op, x_TD)) found = "the output of " + name;
    });
    if (!found.empty()) return found;
  }
  return gradient;
}

}  // namespace tessera
