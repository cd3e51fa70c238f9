// Compares the core with PyTorch, ml_dtypes and TorchAO. tests/reference/make_mx_goldens.py has stored their bytes. Its
// head describes the files, and the rule by which some bytes differ from TorchAO's.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "mx/block.h"
#include "mx/scale_layout.h"
#include "tests/mx/values.h"

namespace tessera::mx {
namespace {

class GoldenReader {
 public:
  explicit GoldenReader(const std::string& name) {
    const std::string path = std::string(TESSERA_TEST_DATA) + "/golden/mx/" + name;
    gzFile file = gzopen(path.c_str(), "rb");
    EXPECT_NE(file, nullptr) << path;
    std::vector<std::uint8_t> part(1u << 16);
    for (int size; file != nullptr && (size = gzread(file, part.data(), static_cast<unsigned>(part.size()))) > 0;) {
      content_.insert(content_.end(), part.begin(), part.begin() + size);
    }
    if (file != nullptr) gzclose(file);
  }

  bool done() const { return at_ == content_.size(); }
  std::uint32_t count() { return numbers<std::uint32_t>(1).at(0); }
  std::span<const std::uint8_t> bytes(std::size_t size) {
    if (size > content_.size() - at_) throw std::runtime_error("the golden file is too short");
    at_ += size;
    return std::span(content_).subspan(at_ - size, size);
  }
  template <typename T>
  std::vector<T> numbers(std::size_t count) {
    std::vector<T> result(count);
    const auto source = bytes(count * sizeof(T));
    std::memcpy(result.data(), source.data(), source.size());
    return result;
  }

 private:
  std::vector<std::uint8_t> content_;
  std::size_t at_ = 0;
};

template <typename Element>
void expect_casts(GoldenReader& golden, const std::vector<float>& numbers) {
  const auto expected = golden.bytes(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    ASSERT_EQ(cast_to<Element>(numbers[i]), expected[i]) << std::hexfloat << numbers[i];
  }
}

/// Compares blocks of `size` numbers. (A column was made from blocks of one number and 31 zeros, which change nothing.)
template <typename Element>
void expect_blocks(GoldenReader& golden, const std::vector<float>& numbers, std::size_t size) {
  const std::size_t blocks = numbers.size() / size;
  for (const ScalingMode mode : kModes) {
    const auto scales = golden.bytes(blocks), elements = golden.bytes(numbers.size());
    for (std::size_t i = 0; i < blocks; ++i) {
      std::vector<std::uint8_t> actual(size);
      const int scale =
          quantize_block<Element>(&numbers[i * size], static_cast<std::int64_t>(size), mode, actual.data());
      const auto expected = elements.subspan(i * size, size);
      ASSERT_EQ(scale, scales[i]) << "mode " << static_cast<int>(mode) << ", block " << i << " from " << std::hexfloat
                                  << numbers[i * size];
      ASSERT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin()))
          << "mode " << static_cast<int>(mode) << ", block " << i << " from " << std::hexfloat << numbers[i * size];
    }
  }
}

void expect_columns(GoldenReader& golden, const std::vector<float>& numbers) {
  expect_casts<E4M3>(golden, numbers);
  expect_casts<E5M2>(golden, numbers);
  expect_blocks<E4M3>(golden, numbers, 1);
  expect_blocks<E5M2>(golden, numbers, 1);
  EXPECT_TRUE(golden.done());
}

TEST(Golden, ValuesOfBytes) {
  GoldenReader golden("bytes.gz");
  const auto expect = [&](auto value) {
    const auto expected = golden.numbers<std::uint32_t>(256);
    for (int byte = 0; byte < 256; ++byte) {
      const std::uint32_t bits = bits_of(value(static_cast<std::uint8_t>(byte)));
      const bool is_nan = (bits & kFloatMagnitude) > kFloatInfinity;  // a NaN of either sign
      EXPECT_EQ(is_nan ? bits & kFloatMagnitude : bits, expected[byte]) << byte;
    }
  };
  expect(value_of<E4M3>);
  expect(value_of<E5M2>);
  expect(value_of_scale);
  EXPECT_TRUE(golden.done());
}

TEST(Golden, AllBFloat16) {
  GoldenReader golden("bfloat16.gz");
  std::vector<float> numbers;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) numbers.push_back(float_of(bits << 16));
  expect_columns(golden, numbers);
}

TEST(Golden, Float32AroundBoundaries) {
  GoldenReader golden("float32.gz");
  const std::uint32_t count = golden.count();
  EXPECT_GT(count, 10000u);
  expect_columns(golden, golden.numbers<float>(count));
}

TEST(Golden, Blocks) {
  GoldenReader golden("blocks.gz");
  const std::uint32_t count = golden.count();
  EXPECT_GT(count, 200u);
  const auto numbers = golden.numbers<float>(count * std::size_t{kBlock});
  expect_blocks<E4M3>(golden, numbers, kBlock);
  expect_blocks<E5M2>(golden, numbers, kBlock);
  EXPECT_TRUE(golden.done());
}

TEST(Golden, ScaleLayout) {
  GoldenReader golden("scale_layout.gz");
  int cases = 0;
  for (; !golden.done(); ++cases) {
    const std::int64_t rows = golden.count(), blocks = golden.count();
    const auto scales = golden.numbers<std::uint8_t>(rows * blocks);
    const auto expected = golden.numbers<std::uint8_t>(packed_scale_bytes(rows, blocks));
    std::vector<std::uint8_t> packed(expected.size(), 0xAA);
    pack_scales(scales.data(), rows, blocks, packed.data());
    EXPECT_EQ(packed, expected) << rows << " x " << blocks;
  }
  EXPECT_EQ(cases, 7);
}

}  // namespace
}  // namespace tessera::mx
