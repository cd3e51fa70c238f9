#include "step/optimizer.h"

#include <cstring>

#include "ops/runtime/runtime.h"

namespace tessera {

Optimizer::Optimizer(const JobConfig& config) : config_(config), squares_(1), numbers_(AdamWStep::kNumbers) {}

OptimizerTensors Optimizer::state_tensors(const JobConfig& config) {
  return adamw_tensors(config.optimizer.state_dtype);
}

void Optimizer::allocate(Device device) {
  squares_ = Mirrored<double>(1, device);
  numbers_ = Mirrored<float>(AdamWStep::kNumbers, device);
}

AdamWOptions Optimizer::options() const {
  return {.beta1 = static_cast<float>(config_.optimizer.beta1),
          .beta2 = static_cast<float>(config_.optimizer.beta2),
          .epsilon = static_cast<float>(config_.optimizer.eps),
          .weight_decay = static_cast<float>(config_.optimizer.weight_decay)};
}

double Optimizer::learning_rate(std::int64_t step) const {
  return config_.optimizer.lr * config_.lr_scheduler.factor(step - 1, config_.training.steps);
}

AdamWStep Optimizer::numbers(std::int64_t step, float largest_loss) const {
  AdamWStep numbers = adamw_step(options(), static_cast<float>(learning_rate(step)), step);
  numbers.largest_loss = largest_loss;
  return numbers;
}

void Optimizer::set_numbers(const AdamWStep& numbers) { std::memcpy(numbers_.host().data(), &numbers, sizeof numbers); }

void Optimizer::upload_numbers(const cuda::Stream& stream, const AdamWStep& numbers, Buffer& pinned) {
  constexpr std::size_t kBytesOfHost = AdamWStep::kNumbersOfHost * sizeof(float);
  std::memcpy(pinned.data(), &numbers, kBytesOfHost);
  cuda::copy_bytes(stream, pinned.data(), kBytesOfHost, numbers_.tensor(Device::kCuda).raw());
}

void Optimizer::allow_steps(cuda::Runtime* cuda) {
  set_numbers(AdamWStep{});
  if (cuda == nullptr) return;
  numbers_.upload(cuda->stream());
  cuda->synchronize();
}

void Optimizer::measure_gradients(const Context& op, const Parameters& parameters) {
  sum_of_squares(op, parameters.all_gradients(), squares_.tensor(op.device()));
}

void Optimizer::clip(const Context& op, const Tensor& loss_1) {
  clip_gradients(op, squares_.tensor(op.device()), loss_1, config_.training.max_norm, numbers_.tensor(op.device()));
}

void Optimizer::update(const Context& op, const Parameters& parameters, const QuantizedWeights& quantized) {
  const Tensor step_S = numbers_.tensor(op.device());
  parameters.for_each_range_of_others([&](const Parameters::Range& range) {
    const auto part = [&](const Tensor& all) { return all.rows(range.begin, range.end); };
    adamw(op, options(), step_S, part(parameters.all_gradients()), part(parameters.optimizer_tensor(0)),
          part(parameters.optimizer_tensor(1)), part(parameters.all_masters()), parameters.shadows(range));
  });
  for (const ParamId id : quantized.kept()) {
    adamw_quantized(op, options(), step_S, parameters.gradient_shard(id), parameters.optimizer_shard(0, id),
                    parameters.optimizer_shard(1, id), parameters.master(id), parameters.compute_dtype(),
                    quantized.precision(id).weight, quantized.weight(id));
  }
}

}  // namespace tessera
