// Decides which losses are spikes (training.max_loss_spike): those above a multiple of the mean of the last steps'
// losses. These are not in checkpoints, so a run that resumes has no spikes in its first steps.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <numeric>

namespace tessera {

class LossSpikes {
 public:
  /// The number of earlier steps' losses that a loss is compared with.
  static constexpr std::size_t kLossesOfMean = 20;

  /// `factor` is the multiple. With 0 there are no spikes.
  explicit LossSpikes(double factor) : factor_(factor) {}

  /// Notes the loss of a step that was taken.
  void add(double loss) {
    last_.push_back(loss);
    if (last_.size() > kLossesOfMean) last_.pop_front();
  }
  /// Returns the largest loss that is no spike now. It is infinite until kLossesOfMean losses were noted.
  double largest() const {
    if (factor_ == 0.0 || last_.size() < kLossesOfMean) return std::numeric_limits<double>::infinity();
    return factor_ * std::accumulate(last_.begin(), last_.end(), 0.0) / static_cast<double>(kLossesOfMean);
  }

 private:
  double factor_;
  std::deque<double> last_;
};

}  // namespace tessera
