// The optimizer of a run: AdamW after clipping by the global gradient norm (ops/optimizer/adamw.h), with the schedule
// of the learning rate. Another optimizer would name its state in state_tensors(), and update the parameters in
// update().
#pragma once

#include "config/job_config.h"
#include "device/cuda.h"
#include "ops/optimizer/adamw.h"
#include "params/parameters.h"
#include "params/quantized_weights.h"
#include "tensor/mirrored.h"

namespace tessera {

class Optimizer {
 public:
  /// `config` must outlive this.
  explicit Optimizer(const JobConfig& config);

  /// Returns what the optimizer keeps for every number of the parameters.
  static OptimizerTensors state_tensors(const JobConfig& config);

  /// Allocates the numbers of a step on the device.
  void allocate(Device device);
  /// Returns the learning rate of a step, counted from 1.
  double learning_rate(std::int64_t step) const;
  /// Returns the numbers of a step. A step whose sum of losses is above `largest_loss` is not made.
  AdamWStep numbers(std::int64_t step, float largest_loss) const;
  /// Sets the numbers that the next update reads, on a CPU.
  void set_numbers(const AdamWStep& numbers);
  /// Sets the same numbers on a GPU's stream. `pinned` has room for them, and must not change until the copy is done.
  void upload_numbers(const cuda::Stream& stream, const AdamWStep& numbers, Buffer& pinned);
  /// Lets steps be applied again after one that was not finite or was a spike. `cuda` is null on a CPU.
  void allow_steps(cuda::Runtime* cuda);

  /// Computes the sum of squares of this rank's gradients. Callers sum squares() over the ranks.
  void measure_gradients(const Context& op, const Parameters& parameters);
  /// Decides from squares() and the sum of losses whether the step is applied, and scales the gradients.
  void clip(const Context& op, const Tensor& loss_1);
  /// Returns 1 if the step is applied, else 0, [1] (float32).
  Tensor finite_1(const Context& op) const { return AdamWStep::finite_1(numbers_.tensor(op.device())); }
  /// Computes the new weights, and renews their copies and the quantized forms that are kept. Changes nothing if the
  /// step is not applied.
  void update(const Context& op, const Parameters& parameters, const QuantizedWeights& quantized);

  /// Returns the sum of squares, [1] (float64). After measure_gradients() it is of this rank's gradients. clip() needs
  /// that of all gradients.
  Mirrored<double>& squares() { return squares_; }
  const Mirrored<double>& squares() const { return squares_; }

 private:
  AdamWOptions options() const;

  const JobConfig& config_;
  Mirrored<double> squares_;
  Mirrored<float> numbers_;  // an AdamWStep
};

}  // namespace tessera
