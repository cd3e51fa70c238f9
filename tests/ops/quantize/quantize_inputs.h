// Inputs for tests of quantizers on every device: formats, and numbers that reach their edges.
#pragma once

#include <limits>

#include "mx/quantized.h"
#include "tests/ops/harness.h"

namespace tessera {

inline std::vector<mx::Format> all_formats() {
  std::vector<mx::Format> formats;
  for (const mx::ScalingMode mode :
       {mx::ScalingMode::kRceil, mx::ScalingMode::kFloor, mx::ScalingMode::kCeil, mx::ScalingMode::kEven}) {
    for (const auto& [along, across] : {std::pair{32, 1}, {32, 32}, {128, 1}, {128, 128}, {256, 1}, {256, 256}}) {
      formats.push_back({.scale_type = mx::ScaleType::kE8M0, .mode = mode, .along = along, .across = across});
    }
  }
  for (const int across : {1, 128}) {
    formats.push_back({.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = across});
  }
  return formats;
}

inline std::string describe(const mx::Format& format) {
  return fmt::format("{} {} {}x{}", format.scale_type == mx::ScaleType::kE8M0 ? "E8M0" : "float32",
                     static_cast<int>(format.mode), format.across, format.along);
}

inline float number_at(const Tensor& x, std::int64_t i) {
  return x.dtype() == DType::kFloat32 ? x.data<float>()[i] : static_cast<float>(x.data<BFloat16>()[i]);
}
inline void set_number(const Tensor& x, std::int64_t i, float value) {
  if (x.dtype() == DType::kFloat32) {
    x.data<float>()[i] = value;
  } else {
    x.data<BFloat16>()[i] = BFloat16(value);
  }
}

/// Turns numbers in [-1, 1] into numbers of all magnitudes, with small and large blocks and zeros of both signs. If
/// `finite` is false, some of them are not finite.
inline void vary(const Tensor& x, bool finite) {
  const std::int64_t length = x.dim(x.num_dims() - 1);
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    const std::int64_t row = i / length;
    float value = number_at(x, i) * std::ldexp(1.0f, static_cast<int>((row * 37 + i % length / 16 * 11) % 250) - 126);
    if (row % 7 == 3) value = i % 2 == 0 ? 0.0f : -0.0f;
    if (!finite && i == length + 5) value = std::numeric_limits<float>::quiet_NaN();
    if (!finite && i == 2 * length + 33) value = -std::numeric_limits<float>::infinity();
    set_number(x, i, value);
  }
}

}  // namespace tessera
