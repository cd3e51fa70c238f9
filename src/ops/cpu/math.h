// Elementary functions that the compiler can vectorise, because they have no branches and no calls.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace tessera::cpu {

/// Returns exp(x), with a relative error below 2.5e-7 for x in [-87, 88]. Outside of this range x is clamped, so the
/// result is never 0, infinite or denormal for finite x. NaN gives NaN. Method: x = n·ln 2 + r with |r| <= ln2/2. A
/// polynomial of degree 6 gives exp(r), and n is added to the exponent.
inline float exp_fast(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding and subtracting it rounds to an integer
  const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);  // in this form NaN passes through
  const float n = (clamped * kLog2E + kRound) - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // n is a small whole number or NaN. The conversion of NaN only has to be harmless.
  const auto exponent = static_cast<std::int32_t>(n == n ? n : 0.0f);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

}  // namespace tessera::cpu
