// Times calls of CUDA operators and prints them as a table. Only sources that are built with CUDA include this file.
//
// A row has the time of a call, its rate, and the rate's share of a ceiling. The rate counts the work that the call
// must do: inputs read once and outputs written once, or multiplications and additions. The ceiling is measured just
// before: the rate of a copy from memory to memory, or of a large bfloat16 product through cuBLASLt.
//
// As in a training step, calls are parts of a graph. The graph has some milliseconds of calls, in turns on sets of
// operands that together are far larger than the L2 cache. The time of a call is the median of the launches' times,
// divided by the number of calls. Two events around each call would cost it 3 µs that no step pays. Clocks fall under
// load, so products run for a while before they are timed. bench/peers/timing.py does the same. The copy that is the
// ceiling is in no graph: there the copy engine would make it, at two thirds of the rate that the SMs reach.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "app/bench/gpu_tables.h"
#include "base/file.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/runtime/runtime.h"

namespace tessera {

inline constexpr DType kBf16 = DType::kBFloat16, kFloat = DType::kFloat32;
// These formats are MXFP8 as specified, MXFP8 with scales that 128 or 256 numbers share, and DeepSeek-V3's float32
// scales.
inline constexpr mx::Format kMxfp8{};
inline constexpr mx::Format kWide{.along = 128};
inline constexpr mx::Format kWideSquare{.along = 128, .across = 128};
inline constexpr mx::Format kWidest{.along = 256};
inline constexpr mx::Format kWidestSquare{.along = 256, .across = 256};
inline constexpr mx::Format kFloatRows{.scale_type = mx::ScaleType::kFloat32, .along = 128};
inline constexpr mx::Format kFloatSquare{.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128};

enum class WorkUnit { kBytes, kFlop };

/// Describes a call of an operator on its own operands.
struct Call {
  double work;
  std::function<void(const Context&)> run;
  /// The hardware's highest rate for such work, as a multiple of the table's ceiling.
  double times_ceiling = 1.0;
};

class GpuBench {
 public:
  /// Measures the ceiling, which is the table's first row.
  GpuBench(WorkUnit work, const GpuTableOptions& options);
  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  /// Times a row. `make()` returns a call on operands that it allocates with random() and the like.
  void row(const std::string& name, const std::string& shape, const std::function<Call()>& make);
  /// Writes the file of rows. Call it when all rows are done.
  void finish();

  /// Returns numbers that are uniform in [-0.5, 0.5], in a pattern that repeats every million numbers.
  Tensor random(Shape shape, DType dtype = kBf16);
  Tensor ints(std::int64_t count, const std::function<std::int64_t(std::int64_t)>& value);
  Tensor empty(Shape shape, DType dtype) { return arena_.allocate(shape, dtype); }
  mx::Quantized quantized(const Shape& shape, const mx::Format& format) {
    return mx::allocate_quantized(shape, format, [&](const Shape& s, DType dtype) { return empty(s, dtype); });
  }
  GemmOperand operand(const Shape& shape, const mx::Format& format) {
    GemmOperand x;
    x.rows = quantized(shape, format), x.columns = quantized(mx::transposed(shape), format);
    return x;
  }
  QuantizedWeight weight(const Shape& shape, const mx::Format& format) {
    return allocate_weight(weight_form(context(), shape, format, kBf16), shape, format,
                           [&](const Shape& s, DType dtype) { return empty(s, dtype); });
  }
  Context context() { return {.arena = &arena_, .cuda = &runtime_}; }
  cuda::Runtime& runtime() { return runtime_; }

 private:
  static constexpr int kLaunches = 9;
  static constexpr std::size_t kPattern = 1 << 20;

  void copy();
  Call ceiling();
  double median_seconds(const std::vector<Call>& calls);
  /// Prints the row. Returns the rate in work per second.
  double time_row(const std::string& name, const std::string& shape, const std::vector<Call>& calls);

  WorkUnit work_;
  std::string filter_;
  std::optional<AtomicFile> json_;
  cuda::Runtime runtime_;
  Arena arena_;
  std::vector<float> numbers_ = std::vector<float>(kPattern);
  std::vector<BFloat16> bf16_ = std::vector<BFloat16>(kPattern);
  std::byte *source_ = nullptr, *target_ = nullptr;
  std::array<cuda::Event, kLaunches + 1> events_;  // before, between and after launches
  double ceiling_ = 0.0;
};

// The functions below time the rows of the tables.
void time_gemms(GpuBench& bench);
void time_grouped_gemms(GpuBench& bench);
void time_attention(GpuBench& bench);
void time_quantizers(GpuBench& bench);
void time_operators(GpuBench& bench);

}  // namespace tessera
