#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "device/cuda.h"
#include "device/cuda_check.h"
#include "mx/formats.h"
#include "ops/gemm/sm100/sm100_groups.h"
#include "ops/quantize/pack_scales.h"
#include "tensor/arena.h"

namespace tessera {
namespace {

using cuda::sm100_forward_group;
using cuda::sm100_wgrad_group;
using cuda::Sm100Group;

/// Returns the packed scales of columns [first_block, last_block) of rows [first, last).
std::vector<std::uint8_t> packed_part(const std::vector<std::uint8_t>& scales, std::int64_t blocks, std::int64_t first,
                                      std::int64_t last, std::int64_t first_block, std::int64_t last_block) {
  std::vector<std::uint8_t> part;
  for (std::int64_t r = first; r < last; ++r) {
    part.insert(part.end(), scales.begin() + r * blocks + first_block, scales.begin() + r * blocks + last_block);
  }
  std::vector<std::uint8_t> packed(mx::packed_scale_bytes(last - first, last_block - first_block));
  mx::pack_scales(part.data(), last - first, last_block - first_block, packed.data());
  return packed;
}

/// Does what the kernel's threads do, one thread after the other.
std::vector<std::uint8_t> packed_on_host(cuda::PackScales args) {
  std::vector<std::uint8_t> packed(args.bytes());
  args.packed = packed.data();
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    for (std::int64_t word = 0; word < args.words_per_row(); ++word) cuda::pack_scales_word(args, row, word);
  }
  return packed;
}

std::vector<std::uint8_t> packed_on_gpu(cuda::PackScales args) {
  const std::size_t scales_bytes = args.num_rows * cuda::num_blocks(args.num_columns),
                    offsets_bytes = (args.num_groups + 1) * sizeof(std::int32_t);
  std::vector<std::uint8_t> packed(args.bytes());
  const Buffer scales(scales_bytes, Device::kCuda), offsets(offsets_bytes, Device::kCuda),
      target(packed.size(), Device::kCuda);
  TESSERA_CUDA(cudaMemcpy(scales.data(), args.scales, scales_bytes, cudaMemcpyHostToDevice));
  if (args.offsets != nullptr) {
    TESSERA_CUDA(cudaMemcpy(offsets.data(), args.offsets, offsets_bytes, cudaMemcpyHostToDevice));
    args.offsets = reinterpret_cast<const std::int32_t*>(offsets.data());
  }
  TESSERA_CUDA(cudaMemset(target.data(), 0xff, packed.size()));
  args.scales = reinterpret_cast<const std::uint8_t*>(scales.data());
  args.packed = reinterpret_cast<std::uint8_t*>(target.data());
  cuda::pack_scales(args, nullptr);
  TESSERA_CUDA(cudaMemcpy(packed.data(), target.data(), packed.size(), cudaMemcpyDeviceToHost));
  return packed;
}

std::vector<std::uint8_t> scales_of(std::int64_t rows, std::int64_t blocks) {
  std::vector<std::uint8_t> scales(rows * blocks);
  for (std::int64_t i = 0; i < rows * blocks; ++i) scales[i] = static_cast<std::uint8_t>(1 + i * 37 % 255);  // never 0
  return scales;
}

/// Where each group's packed scales begin, and these scales.
using Expected = std::vector<std::pair<std::int64_t, std::vector<std::uint8_t>>>;

/// Checks packing on the host, and on a GPU if there is one. Any GPU can pack.
void check(cuda::PackScales args, const std::vector<std::uint8_t>& scales, const std::vector<std::int32_t>& offsets,
           const Expected& groups) {
  std::vector<std::uint8_t> expected(args.bytes());
  for (const auto& [begin, packed] : groups) {
    ASSERT_LE(begin + static_cast<std::int64_t>(packed.size()), args.bytes());
    std::copy(packed.begin(), packed.end(), expected.begin() + begin);
  }
  args.scales = scales.data();
  args.offsets = offsets.empty() ? nullptr : offsets.data();
  EXPECT_EQ(packed_on_host(args), expected);
  if (cuda::available()) {
    EXPECT_EQ(packed_on_gpu(args), expected);
  }
}

TEST(PackScales, Matrices) {
  for (const auto& [rows, columns] : {std::pair{1, 1}, {128, 128}, {144, 272}, {300, 416}, {512, 2048}}) {
    SCOPED_TRACE(fmt::format("{} x {}", rows, columns));
    const std::int64_t blocks = (columns + 31) / 32;
    const auto scales = scales_of(rows, blocks);
    check({.num_rows = rows, .num_columns = columns}, scales, {},
          {{0, packed_part(scales, blocks, 0, rows, 0, blocks)}});
  }
}

TEST(PackScales, Stack) {
  const std::int64_t experts = 3, m = 144, n = 272, blocks = 9;
  const auto scales = scales_of(experts * m, blocks);
  Expected groups;
  for (std::int64_t e = 0; e < experts; ++e) {
    groups.emplace_back(sm100_forward_group(e, 0, 0, m, n).b_scales,
                        packed_part(scales, blocks, e * m, (e + 1) * m, 0, blocks));
  }
  check({.num_rows = experts * m, .num_columns = n, .num_groups = experts}, scales, {}, groups);
}

TEST(PackScales, GroupsOfRows) {
  const std::vector<std::int32_t> offsets = {0, 0, 5, 261, 261, 400};  // the last 112 rows belong to no group
  const std::int64_t rows = 512, n = 272, blocks = 9;
  const auto scales = scales_of(rows, blocks);
  Expected groups;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    groups.emplace_back(sm100_forward_group(e, offsets[e], offsets[e + 1], 64, n).a_scales,
                        packed_part(scales, blocks, offsets[e], offsets[e + 1], 0, blocks));
  }
  check({.num_rows = rows, .num_columns = n, .num_groups = 5}, scales, offsets, groups);
}

TEST(PackScales, GroupsOfColumns) {
  const std::vector<std::int32_t> offsets = {0, 32, 32, 320, 448, 480};
  const std::int64_t m = 144, rows = 544, blocks = 17;
  const auto scales = scales_of(m, blocks);
  Expected groups;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    groups.emplace_back(sm100_wgrad_group(e, offsets[e], offsets[e + 1], m, 64).a_scales,
                        packed_part(scales, blocks, 0, m, offsets[e] / 32, offsets[e + 1] / 32));
  }
  check({.num_rows = m, .num_columns = rows, .groups_of_columns = true, .num_groups = 5}, scales, offsets, groups);
}

TEST(Sm100Groups, Forward) {
  const Sm100Group group = sm100_forward_group(2, 300, 340, 144, 272);
  EXPECT_EQ(group.m, 40);
  EXPECT_EQ(group.n, 144);
  EXPECT_EQ(group.k, 272);
  EXPECT_EQ(group.a, 300 * 272);
  EXPECT_EQ(group.b, 2 * 144 * 272);
  EXPECT_EQ(group.d, 300 * 144);
  EXPECT_EQ(group.a_scales, (2 + 2) * 3 * 512);  // 2 whole tiles of rows, and a partial tile per expert; 3 along 272
  EXPECT_EQ(group.b_scales, (2 + 2) * 3 * 512);
}

TEST(Sm100Groups, Wgrad) {
  const Sm100Group group = sm100_wgrad_group(3, 320, 416, 144, 272);
  EXPECT_EQ(group.m, 144);
  EXPECT_EQ(group.n, 272);
  EXPECT_EQ(group.k, 96);
  EXPECT_EQ(group.a, 320);
  EXPECT_EQ(group.b, 320);
  EXPECT_EQ(group.d, 3 * 144 * 272);
  EXPECT_EQ(group.a_scales, (2 + 3) * 2 * 512);
  EXPECT_EQ(group.b_scales, (2 + 3) * 3 * 512);
  EXPECT_EQ(sm100_wgrad_group(3, 320, 320, 144, 272).m, 0);  // no rows: no tiles
}

// Computes the products of groups from what CUTLASS gets, by its rules. Beyond a group's sizes CUTLASS reads zeros.
class Sm100Products : public ::testing::Test {
 protected:
  /// A matrix [rows, columns] with scales by rows. Numbers have two bits of mantissa, so that every sum is exact.
  struct Matrix {
    std::int64_t rows, columns;
    std::vector<std::uint8_t> elements, scales;

    Matrix(std::int64_t rows_, std::int64_t columns_)
        : rows(rows_), columns(columns_), elements(rows * columns), scales(rows * cuda::num_blocks(columns)) {
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        elements[i] = mx::cast_to<mx::E4M3>(static_cast<float>(i * 29 % 15 - 7) / 4);
      }
      for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::uint8_t>(126 + i * 5 % 3);
    }
    double operator()(std::int64_t r, std::int64_t c) const {
      return double{mx::value_of<mx::E4M3>(elements[r * columns + c])} *
             mx::value_of_scale(scales[r * cuda::num_blocks(columns) + c / mx::kBlock]);
    }
  };

  static double operand(const std::uint8_t* elements, std::int64_t stride, const std::uint8_t* packed, std::int64_t r,
                        std::int64_t i, std::int64_t k) {
    return double{mx::value_of<mx::E4M3>(elements[r * stride + i])} *
           mx::value_of_scale(packed[mx::packed_scale_offset(r, i / mx::kBlock, cuda::num_blocks(k))]);
  }

  static void multiply(const Sm100Group& group, const Matrix& a, const std::vector<std::uint8_t>& a_packed,
                       const Matrix& b, const std::vector<std::uint8_t>& b_packed, std::vector<double>& d) {
    for (std::int64_t r = 0; r < group.m; ++r) {
      for (std::int64_t c = 0; c < group.n; ++c) {
        double sum = 0;
        for (std::int64_t i = 0; i < group.k; ++i) {
          sum += operand(a.elements.data() + group.a, a.columns, a_packed.data() + group.a_scales, r, i, group.k) *
                 operand(b.elements.data() + group.b, b.columns, b_packed.data() + group.b_scales, c, i, group.k);
        }
        d.at(group.d + r * group.n + c) = sum;
      }
    }
  }
};

TEST_F(Sm100Products, Forward) {
  const std::int64_t rows = 400, m = 144, n = 272, experts = 4;
  const std::vector<std::int32_t> offsets = {0, 5, 5, 261, 390};
  const Matrix x(rows, n), w(experts * m, n);
  const auto x_packed = packed_on_host({.scales = x.scales.data(),
                                        .num_rows = rows,
                                        .num_columns = n,
                                        .num_groups = experts,
                                        .offsets = offsets.data()}),
             w_packed = packed_on_host(
                 {.scales = w.scales.data(), .num_rows = experts * m, .num_columns = n, .num_groups = experts});
  std::vector<double> y(rows * m), expected(rows * m);
  for (std::int64_t e = 0; e < experts; ++e) {
    multiply(sm100_forward_group(e, offsets[e], offsets[e + 1], m, n), x, x_packed, w, w_packed, y);
    for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (std::int64_t c = 0; c < m; ++c) {
        for (std::int64_t i = 0; i < n; ++i) expected[r * m + c] += x(r, i) * w(e * m + c, i);
      }
    }
  }
  EXPECT_EQ(y, expected);
}

TEST_F(Sm100Products, Wgrad) {
  const std::int64_t rows = 416, m = 144, n = 160, experts = 4;
  const std::vector<std::int32_t> offsets = {0, 32, 32, 320, 384};
  const Matrix d_y(m, rows), x(n, rows);
  const auto packed = [&](const Matrix& matrix) {
    return packed_on_host({.scales = matrix.scales.data(),
                           .num_rows = matrix.rows,
                           .num_columns = rows,
                           .groups_of_columns = true,
                           .num_groups = experts,
                           .offsets = offsets.data()});
  };
  const auto d_y_packed = packed(d_y), x_packed = packed(x);
  std::vector<double> d_w(experts * m * n), expected(experts * m * n);
  for (std::int64_t e = 0; e < experts; ++e) {
    multiply(sm100_wgrad_group(e, offsets[e], offsets[e + 1], m, n), d_y, d_y_packed, x, x_packed, d_w);
    for (std::int64_t r = 0; r < m; ++r) {
      for (std::int64_t c = 0; c < n; ++c) {
        for (std::int64_t i = offsets[e]; i < offsets[e + 1]; ++i) expected[(e * m + r) * n + c] += d_y(r, i) * x(c, i);
      }
    }
  }
  EXPECT_EQ(d_w, expected);
}

}  // namespace
}  // namespace tessera
