// Compares gradients of every parameter on a GPU with a CPU's. tests/gpu_mutants.py shows that kernels which scale or
// add up wrongly do not pass.
#include "tests/step/text_gradients.h"

namespace tessera::gradient_test {
namespace {

/// Says how far a GPU's gradient of a parameter may be from a CPU's.
struct Bounds {
  double difference;  // the norm of their difference over the norm of the CPU's
  double scale;       // the part of the difference that is a multiple of the CPU's gradient: rounding has nearly none
};

struct GradientCase {
  const char* name;
  Overrides overrides;
  Bounds bounds;

  friend void PrintTo(const GradientCase& one, std::ostream* out) { *out << one.name; }
};

/// Limits the GPU's distance from the float32 gradient, relative to the CPU's distance: both round alike.
constexpr double kRounding = 1.15;

class CudaGradients : public ::testing::TestWithParam<GradientCase> {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  }

  /// Returns one rank's gradients. There are two micro-batches, so products both assign and accumulate.
  static Gradients gradients(const Overrides& overrides, Device device) {
    return first_gradients({"one", 1, {}, 2, overrides, device});
  }
};

TEST_P(CudaGradients, AreTheCpus) {
  const GradientCase& one = GetParam();
  const Gradients exact = gradients(one.overrides + kFloat32, Device::kCpu);
  const Gradients cpu = gradients(one.overrides, Device::kCpu);
  const Gradients gpu = gradients(one.overrides, Device::kCuda);
  Worst worst_difference, worst_scale, worst_rounding;
  for (const auto& [name, expected] : cpu) {
    const std::vector<float>& actual = gpu.at(name);
    ASSERT_EQ(actual.size(), expected.size()) << name;
    const double squares = dot(expected, expected);
    ASSERT_GT(squares, 0.0) << name;
    const double difference = distance(actual, expected) / std::sqrt(squares);
    const double scale = std::abs(dot(actual, expected) / squares - 1.0);
    const double rounding = distance(actual, exact.at(name)) / distance(expected, exact.at(name));
    EXPECT_LE(difference, one.bounds.difference) << name;
    EXPECT_LE(scale, one.bounds.scale) << name;
    EXPECT_LE(rounding, kRounding) << name;
    worst_difference.see(difference, name);
    worst_scale.see(scale, name);
    worst_rounding.see(rounding, name);
  }
  fmt::print("{}: difference at most {:.5f} ({}), scale {:.5f} ({}), rounding {:.3f} ({})\n", one.name,
             worst_difference.error, worst_difference.name, worst_scale.error, worst_scale.name, worst_rounding.error,
             worst_rounding.name);
}

const Overrides kOutput = {"--quantize.linear.mx.convert_output"};

// The bounds are about twice what an H100 shows. Balance is forced: a token for which the last bit decides between two
// experts changes the experts' gradients by a few thousandths. One case has the real router.
INSTANTIATE_TEST_SUITE_P(
    Precisions, CudaGradients,
    ::testing::Values(
        GradientCase{"bfloat16", kBfloat16 + kForced, {0.0015, 0.0003}},
        GradientCase{"bfloat16_real_router", kBfloat16, {0.006, 0.0006}},
        GradientCase{"mxfp8", recipe("mxfp8", "128x128") + kForced, {0.015, 0.003}},
        GradientCase{"mxfp8_exact", recipe("mxfp8", "1x32") + kForced, {0.01, 0.001}},
        GradientCase{"mxfp8_exact_square", recipe("mxfp8", "32x32") + kForced, {0.01, 0.001}},
        GradientCase{"mxfp8_wgrad_with_hp", recipe("mxfp8_wgrad_with_hp", "128x128") + kForced, {0.014, 0.003}},
        GradientCase{"fp8_blockwise", recipe("fp8_blockwise", "default") + kForced, {0.014, 0.0015}},
        GradientCase{"mxfp8_output", recipe("mxfp8", "128x128") + kForced + kOutput, {0.015, 0.003}},
        GradientCase{"mxfp8_256", recipe("mxfp8", "256x256") + kForced + kOutput, {0.015, 0.003}},
        GradientCase{"mxfp8_exact_output", recipe("mxfp8", "1x32") + kForced + kOutput, {0.01, 0.002}},
        GradientCase{"fp8_blockwise_output", recipe("fp8_blockwise", "default") + kForced + kOutput, {0.014, 0.003}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tessera::gradient_test
