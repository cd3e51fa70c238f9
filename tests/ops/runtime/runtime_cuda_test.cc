#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>

#include "base/error.h"
#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"

namespace tessera::cuda {
namespace {

using ::testing::HasSubstr;

Tensor nowhere(const Shape& shape, DType dtype) {
  return Tensor(reinterpret_cast<void*>(std::uintptr_t{64}), shape, dtype, Device::kCuda);
}

TEST(FlightRecorder, HasTheLastOperatorsInTheirOrder) {
  FlightRecorder recorder;
  for (int i = 0; i < 100; ++i) recorder.begin("early");
  recorder.begin("gemm");
  recorder.note(nowhere({3, 5}, DType::kBFloat16));
  recorder.note(Tensor());
  recorder.note(nowhere({7}, DType::kFloat32));
  const std::string text = recorder.dump();
  EXPECT_THAT(text, HasSubstr("100 early\n  101 gemm bfloat16[3, 5] float32[7]\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 64);
}

class CudaFailures : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!available()) GTEST_SKIP() << why_unavailable();
    // The GPU's failure ends the process, so the test has a process of its own.
    testing::FLAGS_gtest_death_test_style = "threadsafe";
  }
};

TEST_F(CudaFailures, AKernelThatFailsIsToldOfWithItsOperands) {
  const auto fail = [] {
    try {
      Runtime runtime;
      Arena arena(0, Device::kCuda);
      const Tensor x = nowhere({48, 16}, DType::kFloat32);
      add({.arena = &arena, .cuda = &runtime}, x, x, x);
      runtime.synchronize();
    } catch (const Error& error) {
      std::cerr << error.what();
      std::exit(10 + static_cast<int>(error.status()));
    }
  };
  // With status 2 a launcher would not start the run again.
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(10 + static_cast<int>(ExitStatus::kProgramError)),
              "the GPU failed: .*illegal memory access(.|\n)*add float32.48, 16.");
}

TEST_F(CudaFailures, MemoryThatIsNotThereIsToldOf) {
  try {
    allocate_zeroed(std::size_t{1} << 45);
    FAIL() << "32 TiB were allocated";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("32768"));
  }
}

}  // namespace
}  // namespace tessera::cuda
