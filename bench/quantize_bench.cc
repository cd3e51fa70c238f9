// Measures quantizers against memcpy: bytes read and written per second, at sizes far beyond the caches.
#include <benchmark/benchmark.h>

#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/quantize/quantize.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr std::int64_t kRows = 8192, kColumns = 4096;

struct Operands {
  Operands() : arena(std::size_t{1} << 29), x(arena.allocate({kRows, kColumns}, DType::kBFloat16)) {
    const Philox philox(1, 2);
    for (std::int64_t i = 0; i < x.num_elements(); ++i) {
      x.data<BFloat16>()[i] = BFloat16(static_cast<float>(philox.uniform(static_cast<std::uint64_t>(i))) - 0.5f);
    }
  }
  mx::Quantized allocate(Shape shape, const mx::Format& format) {
    return mx::allocate_quantized(shape, format, [&](Shape s, DType type) { return arena.allocate(s, type); });
  }

  Arena arena;
  Tensor x;
};

Operands& operands() {
  static Operands instance;
  return instance;
}

void report(benchmark::State& state, double bytes) {
  state.counters["B/s"] = benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
}

double bytes_of(const mx::Quantized& q) {
  return q.defined() ? static_cast<double>(q.elements.num_bytes() + q.scales.num_bytes()) : 0.0;
}

void copy(benchmark::State& state) {
  const Tensor& x = operands().x;
  const ArenaScope scope(operands().arena);
  const Tensor y = operands().arena.allocate(x.shape(), x.dtype());
  constexpr std::int64_t kBytesPerTask = 1 << 20;
  for (auto _ : state) {
    parallel_ranges(static_cast<std::int64_t>(x.num_bytes()), kBytesPerTask, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(static_cast<std::byte*>(y.raw()) + begin, static_cast<const std::byte*>(x.raw()) + begin,
                  static_cast<std::size_t>(end - begin));
    });
  }
  report(state, 2.0 * static_cast<double>(x.num_bytes()));
}

enum Orientations : std::int64_t { kRowsOnly = 1, kColumnsOnly = 2, kBoth = 3 };

void quantize_bfloat16(benchmark::State& state, Orientations orientations, const mx::Format& format) {
  const Tensor& x = operands().x;
  const ArenaScope scope(operands().arena);
  mx::Quantized rows, columns;
  if (orientations & kRowsOnly) rows = operands().allocate({kRows, kColumns}, format);
  if (orientations & kColumnsOnly) columns = operands().allocate({kColumns, kRows}, format);
  const Context context{.arena = &operands().arena};
  for (auto _ : state) quantize(context, x, rows, columns);
  report(state, static_cast<double>(x.num_bytes()) + bytes_of(rows) + bytes_of(columns));
}

void dequantize_rows(benchmark::State& state) {
  const Tensor& x = operands().x;
  const ArenaScope scope(operands().arena);
  const mx::Quantized rows = operands().allocate({kRows, kColumns}, {});
  const Tensor y = operands().arena.allocate(x.shape(), x.dtype());
  const Context context{.arena = &operands().arena};
  quantize(context, x, rows, {});
  for (auto _ : state) dequantize(context, rows, y);
  report(state, static_cast<double>(y.num_bytes()) + bytes_of(rows));
}

/// Quantizes as a first version would: with the specification's functions, number by number, in both orientations.
void scalar_loop(benchmark::State& state) {
  const Tensor& x = operands().x;
  const ArenaScope scope(operands().arena);
  const mx::Quantized rows = operands().allocate({kRows, kColumns}, {});
  const mx::Quantized columns = operands().allocate({kColumns, kRows}, {});
  const BFloat16* source = x.data<BFloat16>();
  for (auto _ : state) {
    parallel_ranges(kRows, mx::kBlock, [&](std::int64_t begin, std::int64_t end) {
      float block[mx::kBlock];
      for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t c = 0; c < kColumns; c += mx::kBlock) {
          for (std::int64_t i = 0; i < mx::kBlock; ++i) block[i] = static_cast<float>(source[r * kColumns + c + i]);
          rows.scale_bytes()[(r * kColumns + c) / mx::kBlock] =
              mx::quantize_block(block, mx::kBlock, mx::ScalingMode::kRceil, rows.element_bytes() + r * kColumns + c);
        }
      }
      for (std::int64_t c = 0; c < kColumns; ++c) {
        for (std::int64_t i = 0; i < mx::kBlock; ++i) block[i] = static_cast<float>(source[(begin + i) * kColumns + c]);
        columns.scale_bytes()[(c * kRows + begin) / mx::kBlock] =
            mx::quantize_block(block, mx::kBlock, mx::ScalingMode::kRceil, columns.element_bytes() + c * kRows + begin);
      }
    });
  }
  report(state, static_cast<double>(x.num_bytes()) + bytes_of(rows) + bytes_of(columns));
}

constexpr mx::Format kWide{.along = mx::kWideBlock, .across = 1};
constexpr mx::Format kBlockwise{.scale_type = mx::ScaleType::kFloat32, .along = mx::kWideBlock, .across = 1};

BENCHMARK(copy)->Name("memcpy")->UseRealTime();
BENCHMARK(scalar_loop)->Name("scalar_loop/both")->UseRealTime();
BENCHMARK_CAPTURE(quantize_bfloat16, rows, kRowsOnly, {})->Name("quantize/1x32/rows")->UseRealTime();
BENCHMARK_CAPTURE(quantize_bfloat16, columns, kColumnsOnly, {})->Name("quantize/1x32/columns")->UseRealTime();
BENCHMARK_CAPTURE(quantize_bfloat16, both, kBoth, {})->Name("quantize/1x32/both")->UseRealTime();
BENCHMARK_CAPTURE(quantize_bfloat16, wide, kBoth, kWide)->Name("quantize/1x128/both")->UseRealTime();
BENCHMARK_CAPTURE(quantize_bfloat16, blockwise, kBoth, kBlockwise)->Name("quantize/fp8_blockwise/both")->UseRealTime();
BENCHMARK(dequantize_rows)->Name("dequantize/rows")->UseRealTime();

}  // namespace
}  // namespace tessera
