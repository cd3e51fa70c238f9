// Helpers for operator tests: memory, random operands, and comparison with float64 references and central differences.
//
// Bounds. With float32 they are 1e-5 forward and 1e-4 backward, relative to the largest number of the tensor. With
// bfloat16, results are rounded to 8 significant bits (a relative error of 2^-9), and intermediate tensors may be, too.
// kBf16Bound allows for four such roundings of the largest number.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/runtime/context.h"
#include "tensor/philox.h"
#include "tests/threads_scope.h"

namespace tessera {

inline constexpr double kForwardBound = 1e-5;
inline constexpr double kBackwardBound = 1e-4;
inline constexpr double kBf16Bound = 4.0 / 512.0;

inline double bound_for(DType dtype, double float_bound) { return dtype == DType::kFloat32 ? float_bound : kBf16Bound; }

using Doubles = std::vector<double>;

/// Returns any tensor as float64, without gaps between rows.
inline Doubles doubles(const Tensor& tensor) {
  Doubles result;
  const std::int64_t length = tensor.dim(0) == 0 ? 0 : tensor.num_elements() / tensor.dim(0);
  for (std::int64_t i = 0; i < tensor.dim(0); ++i) {
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t at = i * tensor.stride() + j;
      switch (tensor.dtype()) {
        case DType::kFloat64:
          result.push_back(tensor.data<double>()[at]);
          break;
        case DType::kFloat32:
          result.push_back(static_cast<double>(tensor.data<float>()[at]));
          break;
        case DType::kBFloat16:
          result.push_back(static_cast<double>(static_cast<float>(tensor.data<BFloat16>()[at])));
          break;
        case DType::kInt32:
          result.push_back(tensor.data<std::int32_t>()[at]);
          break;
        case DType::kFloat8E4M3:
        case DType::kFloat8E8M0:  // the bytes
          result.push_back(static_cast<const std::uint8_t*>(tensor.raw())[at]);
          break;
      }
    }
  }
  return result;
}

/// Returns the largest difference over the largest expected number. Returns infinity if a difference is NaN.
inline double relative_error(const Doubles& actual, const Doubles& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double difference = 0.0, largest = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = std::abs(actual[i] - expected[i]);
    if (!(d <= difference)) difference = std::isnan(d) ? HUGE_VAL : d;
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0.0 ? difference / largest : difference;
}

inline double relative_error(const Tensor& actual, const Doubles& expected) {
  return relative_error(doubles(actual), expected);
}

/// Returns the gradient of f at x by central differences.
inline Doubles central_differences(const std::function<double(const Doubles&)>& f, Doubles x) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = f(x);
    x[i] = at - kStep;
    gradient[i] = (above - f(x)) / (2.0 * kStep);
    x[i] = at;
  }
  return gradient;
}

inline double dot(const Doubles& a, const Doubles& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline Doubles plus(Doubles a, const Doubles& b) {
  EXPECT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

/// Fills the free memory of an arena with NaN of every float type, because scratch may hold anything.
inline void poison(Arena& arena) {
  const ArenaScope scope(arena);
  const std::size_t rest = arena.capacity() - arena.used();
  std::memset(arena.allocate_bytes(rest), 0xff, rest);
}

/// Returns the program's kernels for each instruction set of this processor. The first are compiled for tests alone,
/// without any instructions that a processor of this kind may lack.
std::vector<const cpu::KernelTable*> kernel_tables();

/// Calls `run` once for each instruction set of this processor. Operators then use that instruction set.
template <typename Run>
void for_every_instruction_set(Run&& run) {
  for (const cpu::KernelTable* table : kernel_tables()) {
    SCOPED_TRACE(table->name);
    cpu::use_kernels(table);
    run();
  }
  cpu::use_kernels(nullptr);
}

/// Operators take scratch for each thread. Tests' arenas need not have room for any number of cores.
inline constexpr int kMostThreads = 4;

class OperatorTest : public ::testing::Test {
 protected:
  OperatorTest() : arena_(std::size_t{64} << 20) { poison(arena_); }

  Context context() { return {.arena = &arena_}; }

  /// Returns uniform random numbers in [-scale, scale], rounded to the type.
  Tensor random(Shape shape, DType dtype = DType::kFloat32, double scale = 1.0) {
    const Tensor tensor = arena_.allocate(shape, dtype);
    const Philox philox(7, stream_++);
    for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
      const auto value = static_cast<float>((2.0 * philox.uniform(static_cast<std::uint64_t>(i)) - 1.0) * scale);
      if (dtype == DType::kFloat32) {
        tensor.data<float>()[i] = value;
      } else {
        tensor.data<BFloat16>()[i] = BFloat16(value);
      }
    }
    return tensor;
  }

  Tensor ints(const std::vector<std::int32_t>& values, Shape shape) {
    const Tensor tensor = arena_.allocate(shape, DType::kInt32);
    EXPECT_EQ(static_cast<std::int64_t>(values.size()), tensor.num_elements());
    std::copy(values.begin(), values.end(), tensor.data<std::int32_t>());
    return tensor;
  }
  Tensor ints(const std::vector<std::int32_t>& values) {
    return ints(values, {static_cast<std::int64_t>(values.size())});
  }
  /// Returns a tensor for results, of numbers that no operator gives.
  Tensor unset_ints(Shape shape) {
    return ints(std::vector<std::int32_t>(static_cast<std::size_t>(shape.num_elements()), 99), shape);
  }

  /// Expects that `run` gives the same bytes in `outputs` with 1, 2 and 3 threads. It must not accumulate.
  static void expect_same_for_any_threads(const std::function<void()>& run, const std::vector<Tensor>& outputs) {
    const ThreadsScope threads_before;
    std::vector<Doubles> first;
    for (const int threads : {1, 2, 3}) {
      set_num_threads(threads);
      run();
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (threads == 1) {
          first.push_back(doubles(outputs[i]));
        } else {
          EXPECT_EQ(doubles(outputs[i]), first[i]) << "output " << i << ", " << threads << " threads";
        }
      }
    }
  }

  /// Expects that a measuring run needs as much scratch as a real one, and touches no data. `run` takes its operands
  /// from the context.
  template <typename Run>
  void expect_measured(Run&& run) {
    Arena measuring;
    run(Context{.arena = &measuring});
    Arena real(measuring.peak());
    run(Context{.arena = &real});
    EXPECT_EQ(real.peak(), measuring.peak());
  }

  ThreadsScope threads_{std::min(num_threads(), kMostThreads)};
  Arena arena_;
  std::uint32_t stream_ = 0;
};

/// The base of tests that run in both types.
class TypedOperatorTest : public OperatorTest, public ::testing::WithParamInterface<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  Tensor randoms(Shape shape, double scale = 1.0) { return random(shape, GetParam(), scale); }
};

#define TESSERA_BOTH_TYPES(suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(Types, suite, ::testing::Values(DType::kFloat32, DType::kBFloat16), \
                           [](const auto& parameter) { return std::string(name_of(parameter.param)); })

}  // namespace tessera
