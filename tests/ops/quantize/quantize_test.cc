// Compares quantizers with mx/block.h's scalar functions, byte for byte, in every block shape and for every instruction
// set.
#include "ops/quantize/quantize.h"

#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "ops/elementwise/elementwise.h"
#include "tests/ops/quantize/quantize_inputs.h"

namespace tessera {
namespace {

using mx::Format;
using mx::ScaleType;
using mx::ScalingMode;

/// A quantized matrix in plain vectors.
struct Expected {
  Doubles elements, scales;
};

/// Returns the quantized form of x, whose rows have `k` numbers.
Expected reference(const std::vector<float>& x, std::int64_t m, std::int64_t k, const Format& format) {
  const std::int64_t width = format.scale_width(), height = format.scale_height();
  const std::int64_t scales_per_row = (k + width - 1) / width;
  Expected result{.elements = Doubles(x.size()),
                  .scales = Doubles(static_cast<std::size_t>((m + height - 1) / height * scales_per_row))};
  for (std::int64_t row = 0; row < m; row += format.across) {
    for (std::int64_t begin = 0; begin < k; begin += format.along) {
      const std::int64_t last_row = std::min(m, row + format.across), end = std::min(k, begin + format.along);
      float amax = 0.0f;
      for (std::int64_t r = row; r < last_row; ++r) {
        amax = std::max(amax, mx::block_amax(&x[static_cast<std::size_t>(r * k + begin)], end - begin));
      }
      const bool finite = std::isfinite(amax), bytes = format.scale_type == ScaleType::kE8M0;
      const std::uint8_t byte = finite ? mx::scale_byte(amax, format.mode) : mx::kScaleNaN;
      const float factor = bytes ? mx::inverse_of_scale(byte) : mx::inverse_float_scale(amax);
      for (std::int64_t r = row; r < last_row; ++r) {
        for (std::int64_t i = begin; i < end; ++i) {
          const auto at = static_cast<std::size_t>(r * k + i);
          result.elements[at] = finite ? mx::cast_to<mx::E4M3>(x[at] * factor) : mx::E4M3::kNaN;
          result.scales[static_cast<std::size_t>(r / height * scales_per_row + i / width)] =
              bytes ? byte : static_cast<double>(mx::float_scale(amax));
        }
      }
    }
  }
  return result;
}

std::vector<float> transpose(const std::vector<float>& x, std::int64_t m, std::int64_t k) {
  std::vector<float> result(x.size());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      result[static_cast<std::size_t>(j * m + i)] = x[static_cast<std::size_t>(i * k + j)];
    }
  }
  return result;
}

void expect_equal(const mx::Quantized& actual, const Expected& expected, const std::string& what) {
  ASSERT_EQ(doubles(actual.elements), expected.elements) << what;
  const Doubles scales = doubles(actual.scales);
  ASSERT_EQ(scales.size(), expected.scales.size()) << what;
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (std::isfinite(expected.scales[i])) {
      ASSERT_EQ(scales[i], expected.scales[i]) << what << ", scale " << i;
    } else {
      ASSERT_TRUE(std::isnan(scales[i])) << what << ", scale " << i;
    }
  }
}

void expect_same_bytes(const mx::Quantized& actual, const mx::Quantized& expected) {
  for (const auto& [a, b] : {std::pair{actual.elements, expected.elements}, {actual.scales, expected.scales}}) {
    ASSERT_EQ(a.num_bytes(), b.num_bytes());
    EXPECT_EQ(std::memcmp(a.raw(), b.raw(), a.num_bytes()), 0);
  }
}

class Quantize : public TypedOperatorTest {
 protected:
  mx::Quantized allocate(Shape shape, const Format& format) {
    return mx::allocate_quantized(shape, format, [&](Shape s, DType type) {
      const Tensor tensor = arena_.allocate(s, type);
      std::memset(tensor.raw(), 0xAB, tensor.num_bytes());
      return tensor;
    });
  }

  Tensor varied(Shape shape, bool finite = true) {
    const Tensor x = randoms(shape);
    vary(x, finite);
    return x;
  }
  static std::vector<float> floats(const Tensor& x) {
    const Doubles numbers = doubles(x);
    return {numbers.begin(), numbers.end()};
  }

  void check(const Tensor& x, const Format& format) { check(x, format, format); }
  void check(const Tensor& x, const Format& row_format, const Format& column_format) {
    const ArenaScope scope(arena_);
    const std::int64_t m = x.dim(0), k = x.dim(1);
    const mx::Quantized rows = allocate({m, k}, row_format), columns = allocate({k, m}, column_format);
    quantize(context(), x, rows, columns);
    const std::string what = fmt::format("{} x {} {} {}", m, k, describe(row_format), describe(column_format));
    expect_equal(rows, reference(floats(x), m, k, row_format), "rows of " + what);
    expect_equal(columns, reference(transpose(floats(x), m, k), k, m, column_format), "columns of " + what);
    // Each orientation alone gives the same bytes.
    const mx::Quantized rows_alone = allocate({m, k}, row_format), columns_alone = allocate({k, m}, column_format);
    quantize(context(), x, rows_alone, {});
    quantize(context(), x, {}, columns_alone);
    expect_same_bytes(rows_alone, rows);
    expect_same_bytes(columns_alone, columns);
  }
};

TEST_P(Quantize, EveryFormat) {
  for (const Format& format : all_formats()) {
    const ArenaScope scope(arena_);
    check(varied({256, 160}), format);         // whole groups, a tile and a quarter
    check(varied({64, 96}, false), format);    // some numbers are not finite
    check(varied({300, 530}, false), format);  // several blocks of 256, the last of them cut off
  }
}

TEST_P(Quantize, EachOrientationHasItsOwnFormat) {
  for (const Format& of_rows : all_formats()) {
    for (const Format& of_columns : all_formats()) {
      const ArenaScope scope(arena_);
      check(varied({256, 160}), of_rows, of_columns);
      check(varied({70, 45}, false), of_rows, of_columns);
    }
  }
}

// A power of two as the scale does not change how a normal element is rounded. So blocks of 128 × 128 store the same
// numbers as blocks of 1 × 128, but for those that are small beside the largest of their block (docs/mxfp8.md).
TEST_P(Quantize, SquareBlocksRoundAsNarrowOnes) {
  constexpr std::int64_t kSize = 128;
  const Tensor x = randoms({kSize, kSize});
  double largest = 0.0;
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    const float value = std::ldexp(number_at(x, i), -static_cast<int>(i % 23 + i / kSize % 5));
    set_number(x, i, value);
    largest = std::max(largest, std::abs(static_cast<double>(value)));
  }
  const mx::Quantized narrow = allocate({kSize, kSize}, {.along = 128}),
                      square = allocate({kSize, kSize}, {.along = 128, .across = 128});
  const Tensor of_narrow = randoms({kSize, kSize}), of_square = randoms({kSize, kSize});
  quantize(context(), x, narrow, {});
  quantize(context(), x, square, {});
  dequantize(context(), narrow, of_narrow);
  dequantize(context(), square, of_square);
  int small = 0;
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    const double value = static_cast<double>(number_at(x, i)), stored = static_cast<double>(number_at(of_square, i));
    if (std::abs(value) >= std::ldexp(largest, -13)) {
      EXPECT_EQ(number_at(of_square, i), number_at(of_narrow, i)) << value;
    } else {
      ++small;
      EXPECT_LE(std::abs(stored - value), std::ldexp(largest, -17)) << value;
    }
  }
  EXPECT_GT(small, kSize);
}

TEST_P(Quantize, SizesThatDoNotDivide) {
  for (const Format& format : all_formats()) {
    check(varied({1, 1}), format);
    check(varied({33, 31}), format);  // one more than a group has, and one less
    check(varied({130, 200}, false), format);
    check(varied({5, 260}), format);
  }
}

TEST_P(Quantize, StridedRows) {
  const Tensor whole = varied({64, 128});
  const Tensor part = whole.columns(32, 96);
  const Format format{};
  const mx::Quantized rows = allocate({64, 64}, format), columns = allocate({64, 64}, format);
  quantize(context(), part, rows, columns);
  expect_equal(rows, reference(floats(part), 64, 64, format), "rows");
  expect_equal(columns, reference(transpose(floats(part), 64, 64), 64, 64, format), "columns");
}

TEST_P(Quantize, StackOfMatrices) {
  const Tensor x = varied({3, 64, 96});
  for (const Format& format : all_formats()) {
    const ArenaScope scope(arena_);
    const mx::Quantized rows = allocate({3, 64, 96}, format), columns = allocate({3, 96, 64}, format);
    quantize(context(), x, rows, columns);
    for (std::int64_t i = 0; i < 3; ++i) {
      expect_equal(rows[i], reference(floats(x[i]), 64, 96, format), "rows");
      expect_equal(columns[i], reference(transpose(floats(x[i]), 64, 96), 96, 64, format), "columns");
    }
  }
}

TEST_P(Quantize, EveryInstructionSet) {
  const cpu::Element element = cpu::element_of(dtype());
  for (const cpu::KernelTable* table : kernel_tables()) {
    SCOPED_TRACE(table->name);
    for (const Format& format : all_formats()) {
      for (const auto& [m, k] : {std::pair{128, 128}, {128, 64}, {96, 128}, {37, 101}}) {
        const ArenaScope scope(arena_);
        const Tensor x = varied({m, k}, m != 128);
        const mx::Quantized rows = allocate({m, k}, format), columns = allocate({k, m}, format);
        const auto output = [](const mx::Quantized& q) {
          return cpu::QuantizeTile::Output{q.element_bytes(), q.elements.dim(1), q.scales.raw(), q.scales.dim(1),
                                           q.format};
        };
        const bool stream = m == 128;
        table->quantize_tile({.x = x.raw(),
                              .stride = k,
                              .rows = m,
                              .columns = k,
                              .next = nullptr,
                              .stream = stream,
                              .along_rows = output(rows),
                              .along_columns = output(columns)},
                             element);
        const std::string what = fmt::format("{} {}x{} {}", table->name, m, k, describe(format));
        expect_equal(rows, reference(floats(x), m, k, format), "rows, " + what);
        expect_equal(columns, reference(transpose(floats(x), m, k), k, m, format), "columns, " + what);

        const Tensor values = randoms({1, k});
        table->dequantize_row({.elements = rows.element_bytes(),
                               .scales = rows.scales.raw(),
                               .format = format,
                               .count = k,
                               .out = values.raw()},
                              element);
        for (std::int64_t i = 0; i < k; ++i) {
          const std::int64_t block = i / format.scale_width();
          const float scale = format.scale_type == ScaleType::kE8M0 ? mx::value_of_scale(rows.scale_bytes()[block])
                                                                    : rows.scales.data<float>()[block];
          const float value = mx::value_of<mx::E4M3>(rows.element_bytes()[i]) * scale;
          const float expected = dtype() == DType::kFloat32 ? value : static_cast<float>(BFloat16(value));
          ASSERT_EQ(std::isnan(number_at(values, i)), std::isnan(expected)) << what << " " << i;
          if (!std::isnan(expected)) {
            ASSERT_EQ(number_at(values, i), expected) << what << " " << i;
          }
        }
      }
    }
  }
}

// The matrix has all 2^16 bfloat16 numbers, each with neighbours of many magnitudes.
TEST_P(Quantize, EveryBfloat16) {
  const Tensor x = randoms({1 << 11, 32});
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    const auto bits = static_cast<std::uint32_t>(i) << 16;
    set_number(x, i, (bits & 0x7fffffffu) >= 0x7f800000u ? 0.0f : std::bit_cast<float>(bits));
  }
  for (const Format& format : all_formats()) check(x, format);
}

TEST_P(Quantize, EveryElementDequantizes) {
  const Format format{};
  const mx::Quantized x = allocate({8, 32}, format);
  for (int i = 0; i < 256; ++i) x.element_bytes()[i] = static_cast<std::uint8_t>(i);
  for (int i = 0; i < 8; ++i) x.scale_bytes()[i] = static_cast<std::uint8_t>(i == 7 ? mx::kScaleNaN : 120 + i);
  const Tensor y = randoms({8, 32});
  dequantize(context(), x, y);
  for (std::int64_t i = 0; i < 256; ++i) {
    const float expected =
        mx::value_of<mx::E4M3>(static_cast<std::uint8_t>(i)) * mx::value_of_scale(x.scale_bytes()[i / 32]);
    EXPECT_EQ(std::isnan(number_at(y, i)), std::isnan(expected)) << i;
    if (!std::isnan(expected)) {
      EXPECT_EQ(number_at(y, i), expected) << i;
    }
  }
}

TEST_P(Quantize, ErrorOfGaussians) {
  constexpr std::int64_t kRows = 64, kK = 4096;
  const Tensor x = random({kRows, kK}, DType::kFloat32);
  const Philox philox(3, 1);
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    x.data<float>()[i] = static_cast<float>(philox.normal(static_cast<std::uint64_t>(i)));
  }
  const mx::Quantized q = allocate({kRows, kK}, {});
  quantize(context(), x, q, {});
  const Tensor sums_2 = arena_.allocate({2}, DType::kFloat64);
  set_zero(context(), sums_2);
  quantization_error(context(), x, q, sums_2);
  const ErrorSums sums{.signal = sums_2.data<double>()[0], .noise = sums_2.data<double>()[1]};
  double signal = 0.0, noise = 0.0;
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    const double number = static_cast<double>(x.data<float>()[i]);
    const double value = static_cast<double>(mx::value_of<mx::E4M3>(q.element_bytes()[i])) *
                         static_cast<double>(mx::value_of_scale(q.scale_bytes()[i / 32]));
    signal += number * number;
    noise += (number - value) * (number - value);
  }
  EXPECT_NEAR(sums.signal / signal, 1.0, 1e-10);  // 2^18 summands are added in another order
  EXPECT_NEAR(sums.noise / noise, 1.0, 1e-10);
  EXPECT_GE(sums.sqnr_db(), 31.0);
  RecordProperty("sqnr_db", std::to_string(sums.sqnr_db()));
  EXPECT_EQ(ErrorSums{}.sqnr_db(), std::numeric_limits<double>::infinity());  // zeros have no noise
}

TEST_P(Quantize, SameAtAnyNumberOfThreads) {
  const Tensor x = varied({300, 260});
  const mx::Quantized rows = allocate({300, 260}, {}), columns = allocate({260, 300}, {});
  expect_same_for_any_threads([&] { quantize(context(), x, rows, columns); },
                              {rows.elements, rows.scales, columns.elements, columns.scales});
}

TEST_P(Quantize, WrongOperandsThrow) {
  const Tensor x = randoms({64, 96});
  const Format format{};
  EXPECT_THROW(quantize(context(), x, allocate({64, 64}, format), {}), InternalError);
  EXPECT_THROW(quantize(context(), x, {}, allocate({64, 96}, format)), InternalError);
  EXPECT_THROW(dequantize(context(), allocate({64, 96}, format), randoms({96, 64})), InternalError);
}

TESSERA_BOTH_TYPES(Quantize);

}  // namespace
}  // namespace tessera
