// The sums that the forwards of a step add up on their device: losses, the experts' loads and later rounds. The host
// reads them when the step is over, so it need not wait in between.
#pragma once

#include <span>

#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"
#include "tensor/mirrored.h"

namespace tessera {

/// Holds sums of cross-entropies, in nats, over the valid positions of a micro-batch or a step. They are of this rank's
/// tokens, or of all ranks' after the sum over ranks (step/step_reduction.h).
struct LossSums {
  double main = 0.0;
  double mtp = 0.0;  // over all modules
};

/// Holds the float64 tensors that an MoE layer adds to. If they are undefined, it adds nothing.
struct MoeSums {
  Tensor counts_E;        // (token, expert) pairs per expert
  Tensor balance_loss_1;  // summed over sequences, coefficient included; the same on all their ranks
  Tensor later_rounds_1;  // of dispatches with more rows than there is room for; one sum for all layers
};

class StepSums {
 public:
  StepSums() = default;
  StepSums(std::size_t num_layers, std::int64_t num_experts, Device target = Device::kCpu)
      : num_experts_(num_experts),
        numbers_(kNumScalars + static_cast<std::int64_t>(num_layers) * (1 + num_experts), target) {}

  /// Returns all sums, to clear them or to add them up over ranks.
  Tensor all(Device device) const { return numbers_.tensor(device); }
  /// Returns the numbers that are not of a layer, float64: the main loss, the MTP loss, and the later rounds.
  Tensor scalars(Device device) const { return all(device).rows(0, kNumScalars); }
  // The next two functions return one of the two losses, [1], float64.
  Tensor main_loss(Device device) const { return all(device).rows(0, 1); }
  Tensor mtp_loss(Device device) const { return all(device).rows(1, 2); }
  MoeSums layer(std::size_t i, Device device) const {
    const std::int64_t at = offset(i);
    return {.counts_E = all(device).rows(at + 1, at + 1 + num_experts_),
            .balance_loss_1 = all(device).rows(at, at + 1),
            .later_rounds_1 = all(device).rows(2, 3)};
  }

  // The functions below are for the host. fetch() copies a GPU's sums to it and waits for them.
  void fetch(const Context& op) const {
    if (op.cuda == nullptr) return;
    numbers_.download(op.cuda->stream());
    op.cuda->synchronize();
  }
  /// Copies the sums into `target`, which is pinned and as large as host(). It does not wait.
  void download(const cuda::Stream& stream, double* target) const {
    const Tensor numbers = all(Device::kCuda);
    cuda::copy_bytes(stream, numbers.raw(), numbers.num_bytes(), target);
  }
  std::span<double> host() const { return numbers_.host(); }
  std::span<double> scalars() const { return host().first(kNumScalars); }
  LossSums losses() const { return {.main = host()[0], .mtp = host()[1]}; }
  double later_rounds() const { return host()[2]; }
  /// Returns a layer's numbers: the balance loss, then the counts.
  std::span<double> layer_numbers(std::size_t i) const {
    return host().subspan(static_cast<std::size_t>(offset(i)), static_cast<std::size_t>(1 + num_experts_));
  }
  double& balance_loss(std::size_t i) const { return layer_numbers(i)[0]; }
  std::span<double> counts_E(std::size_t i) const { return layer_numbers(i).subspan(1); }

 private:
  static constexpr std::int64_t kNumScalars = 3;
  /// Returns the index of a layer's balance loss. Its counts follow.
  std::int64_t offset(std::size_t i) const { return kNumScalars + static_cast<std::int64_t>(i) * (1 + num_experts_); }

  std::int64_t num_experts_ = 0;
  Mirrored<double> numbers_;
};

}  // namespace tessera
