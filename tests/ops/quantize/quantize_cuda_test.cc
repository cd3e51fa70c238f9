#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/parity.h"
#include "tests/ops/quantize/quantize_inputs.h"

namespace tessera {
namespace {

class QuantizeCuda : public ParityTest {
 protected:
  /// Checks both orientations together, and each alone.
  void check(const Tensor& x, const mx::Format& format) { check(x, format, format); }
  void check(const Tensor& x, const mx::Format& row_format, const mx::Format& column_format) {
    SCOPED_TRACE(fmt::format("{} {} {} {}", name_of(x.dtype()), x.shape().to_string(), describe(row_format),
                             describe(column_format)));
    const ArenaScope scope(arena_);
    const mx::Quantized rows = poisoned(x.shape(), row_format),
                        columns = poisoned(mx::transposed(x.shape()), column_format);
    for (const bool has_rows : {false, true}) {
      for (const bool has_columns : {false, true}) {
        std::vector<Tensor> outputs;
        if (has_rows) outputs.insert(outputs.end(), {rows.elements, rows.scales});
        if (has_columns) outputs.insert(outputs.end(), {columns.elements, columns.scales});
        expect_same(
            [&](const Side& side) {
              quantize(side.op, side(x), has_rows ? side(rows) : mx::Quantized(),
                       has_columns ? side(columns) : mx::Quantized());
            },
            outputs);
        for (const Tensor& output : outputs) std::memset(output.raw(), 0xff, output.num_bytes());
      }
    }
  }
  Tensor varied(Shape shape, DType dtype, bool finite = true) {
    const Tensor x = random(shape, dtype);
    vary(x, finite);
    return x;
  }
};

TEST_F(QuantizeCuda, EveryFormat) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      const ArenaScope scope(arena_);
      check(varied({256, 160}, dtype), format);          // whole tiles, and a quarter of one
      check(varied({1160, 264}, dtype, false), format);  // more than a group of tiles, and not finite
      check(varied({64, 96}, dtype, false), format);
    }
  }
}

TEST_F(QuantizeCuda, EachOrientationHasItsOwnFormat) {
  for (const mx::Format& of_rows : all_formats()) {
    for (const mx::Format& of_columns : all_formats()) {
      const ArenaScope scope(arena_);
      check(varied({256, 160}, DType::kBFloat16), of_rows, of_columns);
      check(varied({70, 45}, DType::kFloat32, false), of_rows, of_columns);
    }
  }
}

TEST_F(QuantizeCuda, SizesThatDoNotDivide) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      const ArenaScope scope(arena_);
      for (const Shape& shape : {Shape{1, 1}, {33, 31}, {130, 200}, {5, 260}, {129, 1409}}) {
        check(varied(shape, dtype, shape[0] < 100), format);
      }
    }
  }
}

TEST_F(QuantizeCuda, ModelWidths) {
  for (const mx::Format& format : all_formats()) {
    const ArenaScope scope(arena_);
    for (const std::int64_t width : {512, 576, 1408, 2048, 7168}) {
      check(varied({160, width}, DType::kBFloat16), format);
    }
  }
}

TEST_F(QuantizeCuda, StridedRowsAndStacks) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      const ArenaScope scope(arena_);
      check(varied({64, 128}, dtype).columns(32, 96), format);
      check(varied({64, 125}, dtype).columns(1, 96), format);
      check(varied({3, 64, 96}, dtype), format);
      check(varied({3, 130, 45}, dtype), format);
    }
  }
}

// The matrix has all 2^16 bfloat16 numbers, each with neighbours of many magnitudes.
TEST_F(QuantizeCuda, EveryBfloat16) {
  const Tensor x = random({1 << 11, 32}, DType::kBFloat16);
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    x.data<BFloat16>()[i].bits = (bits & 0x7fffu) >= 0x7f80u ? std::uint16_t{0} : bits;
  }
  for (const mx::Format& format : all_formats()) check(x, format);
}

TEST_F(QuantizeCuda, Dequantize) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      const ArenaScope scope(arena_);
      for (const Shape& shape : {Shape{64, 96}, {129, 1409}, {3, 130, 264}}) {
        const Tensor x = varied(shape, DType::kFloat32, false), y = poisoned(shape, dtype);
        const mx::Quantized q = poisoned(shape, format);
        quantize(context(), x, q, {});
        expect_same([&](const Side& side) { dequantize(side.op, side(q), side(y)); }, {y});
      }
    }
  }
}

TEST_F(QuantizeCuda, Error) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      const ArenaScope scope(arena_);
      for (const Shape& shape : {Shape{1, 1}, {300, 2048}, {129, 1409}}) {
        const Tensor x = random(shape, dtype);
        const mx::Quantized q = poisoned(shape, format);
        quantize(context(), x, q, {});
        const Tensor sums_2 = arena_.allocate({2}, DType::kFloat64);
        const Tensor some = ints({static_cast<std::int32_t>(shape[0] + 1) / 2});
        for (const Tensor& num_rows_1 : {Tensor(), some}) {
          expect_close(
              [&](const Side& side) {
                set_zero(side.op, side(sums_2));
                for (int i = 0; i < 2; ++i) {
                  quantization_error(side.op, side(x), side(q), side(sums_2), side(num_rows_1));
                }
              },
              {sums_2}, 1e-12);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
