#include "model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera {
namespace {

/// Returns by what angle, in radians, each pair of numbers rotates from one position to the next.
std::vector<double> frequencies(const ModelConfig& config, std::int64_t seq_len) {
  const double dim = static_cast<double>(config.qk_rope_head_dim), theta = config.rope_theta;
  std::vector<double> result(static_cast<std::size_t>(config.qk_rope_head_dim / 2));
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = std::pow(theta, -2.0 * static_cast<double>(i) / dim);
  }
  if (seq_len <= config.original_seq_len) return result;

  // The (fractional) pair that makes `turns` full turns over the original length. Pairs faster than beta_fast keep
  // their frequency, pairs slower than beta_slow are slowed by rope_factor, those between are blended.
  const auto pair_of = [&](double turns) {
    return dim * std::log(static_cast<double>(config.original_seq_len) / (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(theta));
  };
  const double low = std::max(std::floor(pair_of(config.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of(config.beta_slow)), dim - 1.0);
  if (high == low) high += 0.001;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    result[i] = result[i] * (1.0 - slowed) + result[i] / config.rope_factor * slowed;
  }
  return result;
}

}  // namespace

RopeTable::RopeTable(const ModelConfig& config, std::int64_t seq_len, std::int64_t num_positions, Device target)
    : seq_len_(seq_len), num_positions_(num_positions > 0 ? num_positions : seq_len) {
  const std::vector<double> angles = frequencies(config, seq_len);
  const std::int64_t size = num_positions_ * static_cast<std::int64_t>(angles.size());
  cos_ = Mirrored<float>(size, target);
  sin_ = Mirrored<float>(size, target);
  if (target == Device::kMeta) return;
  std::size_t at = 0;
  for (std::int64_t position = 0; position < num_positions_; ++position) {
    for (const double angle : angles) {
      cos_.host()[at] = static_cast<float>(std::cos(static_cast<double>(position) * angle));
      sin_.host()[at++] = static_cast<float>(std::sin(static_cast<double>(position) * angle));
    }
  }
  if (target != Device::kCuda) return;
  const cuda::Stream stream;
  cos_.upload(stream);
  sin_.upload(stream);
  stream.synchronize();
}

Tensor RopeTable::view(const Mirrored<float>& values, Device device) const {
  return values.tensor(device).reshape({num_positions_, values.size() / num_positions_});
}

}  // namespace tessera
