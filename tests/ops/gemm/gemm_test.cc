#include "ops/gemm/gemm.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

/// Returns number [i, j] of x or of its transpose.
double at(const Doubles& x, std::int64_t columns, bool transpose, std::int64_t i, std::int64_t j) {
  return x[static_cast<std::size_t>(transpose ? j * columns + i : i * columns + j)];
}

Doubles product(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b) {
  const std::int64_t m = a.dim(transpose_a ? 1 : 0), k = a.dim(transpose_a ? 0 : 1), n = b.dim(transpose_b ? 0 : 1);
  const Doubles x = doubles(a), y = doubles(b);
  Doubles c;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0.0;
      for (std::int64_t l = 0; l < k; ++l)
        sum += at(x, a.dim(1), transpose_a, i, l) * at(y, b.dim(1), transpose_b, l, j);
      c.push_back(sum);
    }
  }
  return c;
}

class Gemm : public TypedOperatorTest {
 protected:
  void check(std::int64_t m, std::int64_t n, std::int64_t k) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        const ArenaScope scope(arena_);
        const Tensor a = randoms(transpose_a ? Shape{k, m} : Shape{m, k});
        const Tensor b = randoms(transpose_b ? Shape{n, k} : Shape{k, n});
        const Doubles expected = product(a, transpose_a, b, transpose_b);
        for (const DType out : {dtype(), DType::kFloat32}) {
          const Tensor c = random({m, n}, out);
          gemm(context(), a, transpose_a, b, transpose_b, c, Write::kAssign);
          EXPECT_LE(relative_error(c, expected), bound_for(out, kForwardBound)) << m << " " << n << " " << k;
          const Tensor sum = random({m, n}, out);
          const Doubles addend = doubles(sum);
          gemm(context(), a, transpose_a, b, transpose_b, sum, Write::kAccumulate);
          EXPECT_LE(relative_error(sum, plus(expected, addend)), bound_for(out, kForwardBound));
        }
      }
    }
  }
};

/// Each head multiplies its columns of x by its own rows of w.
TEST_P(Gemm, OfABatch) {
  constexpr std::int64_t kHeads = 3, kRows = 5, kK = 12, kN = 7;
  for (const bool transpose : {false, true}) {
    const ArenaScope scope(arena_);
    const std::int64_t w_rows = transpose ? kN : kK, w_columns = transpose ? kK : kN;
    const Tensor x = randoms({kRows, kHeads * (kK + 2)}), w = randoms({kHeads * w_rows, w_columns});
    const Tensor y = random({kRows, kHeads * kN}, dtype());
    batched_gemm(context(), x.columns(2, 2 + kK), w.rows(0, w_rows), transpose, y.columns(0, kN),
                 {.count = kHeads, .step_a = kK + 2, .step_b = w_rows * w_columns, .step_c = kN});
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const std::int64_t at = head * (kK + 2) + 2;
      const Doubles expected =
          product(x.columns(at, at + kK), false, w.rows(head * w_rows, (head + 1) * w_rows), transpose);
      EXPECT_LE(relative_error(y.columns(head * kN, (head + 1) * kN), expected), bound_for(dtype(), kForwardBound));
    }
  }
}

TEST_P(Gemm, AllTransposesAndWrites) {
  for_every_instruction_set([&] {
    check(1, 1, 1);
    check(5, 3, 7);
    check(33, 17, 129);
    check(64, 32, 48);
    check(2, 3, 600);  // k is cut into blocks, also for a transposed left operand
  });
}

// Each product has more than one part, and each part has several packed blocks of rows. Parts of equal columns share
// the packed right operand, also where k is cut into blocks.
TEST_P(Gemm, Parts) {
  for_every_instruction_set([&] {
    check(300, 70, 40);
    check(20, 300, 40);
    check(530, 280, 9);
    check(260, 35, 1100);
  });
}

// The packed right operand exceeds the memory that it may take, so columns are multiplied in turn. Each has the same
// numbers as when it is multiplied alone.
TEST_P(Gemm, ColumnsInTurn) {
  constexpr std::int64_t kRows = 257, kColumns = 4200, kDepth = 1030;
  for (const bool transpose : {false, true}) {
    const Tensor a = randoms({kRows, kDepth}),
                 b = randoms(transpose ? Shape{kColumns, kDepth} : Shape{kDepth, kColumns});
    const Tensor c = random({kRows, kColumns}), alone = random({kRows, kColumns});
    gemm(context(), a, false, b, transpose, c, Write::kAssign);
    for (std::int64_t begin = 0; begin < kColumns; begin += 1000) {
      const std::int64_t end = std::min(kColumns, begin + 1000);
      gemm(context(), a, false, transpose ? b.rows(begin, end) : b.columns(begin, end), transpose,
           alone.columns(begin, end), Write::kAssign);
    }
    EXPECT_EQ(doubles(c), doubles(alone)) << transpose;
  }
}

// Rows that are a multiple of 4 KiB apart are packed, so that they do not compete for cache lines.
TEST_P(Gemm, RowsThatAlias) { check(5, 7, 2048); }

TEST_P(Gemm, SameAtAnyNumberOfThreads) {
  for_every_instruction_set([&] {
    for (const bool transpose : {false, true}) {
      const Tensor a = randoms({600, 300}), b = randoms({300, 600}),
                   c = random({transpose ? 300 : 600, transpose ? 300 : 600});
      expect_same_for_any_threads([&] { gemm(context(), a, transpose, b, transpose, c, Write::kAssign); }, {c});
    }
  });
}

// A float32 operand counts in full beside a bfloat16 one. Accumulating into bfloat16 rounds once.
TEST_F(OperatorTest, GemmOfTwoTypes) {
  const Tensor a = random({40, 90}), b = random({50, 90}, DType::kBFloat16);
  for_every_instruction_set([&] {
    for (const DType out : {DType::kFloat32, DType::kBFloat16}) {
      const Tensor c = random({40, 50}, out);
      const Doubles before = doubles(c);
      gemm(context(), a, false, b, true, c, Write::kAccumulate);
      EXPECT_LE(relative_error(c, plus(product(a, false, b, true), before)), bound_for(out, kForwardBound));
    }
  });
}

TEST_P(Gemm, ColumnsOfWiderMatrices) {
  const Tensor a = randoms({9, 40}).columns(8, 24), b = randoms({11, 40}).columns(24, 40);
  const Tensor wide = randoms({9, 33});
  const Doubles before = doubles(wide.columns(0, 5));
  gemm(context(), a, false, b, true, wide.columns(5, 16), Write::kAssign);
  EXPECT_LE(relative_error(wide.columns(5, 16), product(a, false, b, true)), bound_for(dtype(), kForwardBound));
  EXPECT_EQ(doubles(wide.columns(0, 5)), before);  // the memory beside the result is untouched
}

TEST_P(Gemm, LinearLayer) {
  const Tensor x = randoms({6, 10}), w = randoms({4, 10}), d_y = randoms({6, 4});
  const Tensor y = randoms({6, 4}), d_x = randoms({6, 10}), d_w = random({4, 10});
  const Doubles d_w_before = doubles(d_w);
  linear_forward(context(), x, w, y);
  linear_dgrad(context(), d_y, w, d_x);
  linear_wgrad(context(), d_y, x, d_w);
  const auto loss = [&](const Doubles& xs, const Doubles& ws) {
    double sum = 0.0;
    const Doubles g = doubles(d_y);
    for (std::size_t t = 0; t < 6; ++t) {
      for (std::size_t o = 0; o < 4; ++o) {
        for (std::size_t i = 0; i < 10; ++i) sum += g[t * 4 + o] * xs[t * 10 + i] * ws[o * 10 + i];
      }
    }
    return sum;
  };
  EXPECT_LE(relative_error(y, product(x, false, w, true)), bound_for(dtype(), kForwardBound));
  EXPECT_LE(relative_error(d_x, central_differences([&](const Doubles& v) { return loss(v, doubles(w)); }, doubles(x))),
            bound_for(dtype(), kBackwardBound));
  EXPECT_LE(
      relative_error(d_w, plus(d_w_before,
                               central_differences([&](const Doubles& v) { return loss(doubles(x), v); }, doubles(w)))),
      kBackwardBound);
}

// Adds 4000 products of one sign. In bfloat16 the sum would stall at 256.
TEST_P(Gemm, SumsInFloat32) {
  const Tensor a = randoms({2, 4000}), c = random({2, 2});
  gemm(context(), a, false, a, true, c, Write::kAssign);
  EXPECT_LE(relative_error(c, product(a, false, a, true)), kForwardBound);
}

TEST_P(Gemm, NothingToDo) {
  const Tensor c = randoms({0, 4});
  EXPECT_NO_THROW(gemm(context(), randoms({0, 3}), false, randoms({4, 3}), true, c, Write::kAssign));
  EXPECT_THROW(gemm(context(), randoms({2, 0}), false, randoms({4, 0}), true, randoms({2, 4}), Write::kAssign),
               InternalError);
}

TEST_P(Gemm, MeasuringTakesTheSameScratch) {
  expect_measured([&](const Context& op) {
    const Tensor a = op.arena->allocate({70, 30}, dtype()), b = op.arena->allocate({50, 30}, dtype());
    linear_forward(op, a, b, op.arena->allocate({70, 50}, dtype()));
  });
}

TEST_P(Gemm, WrongShapesThrow) {
  EXPECT_THROW(linear_forward(context(), randoms({6, 10}), randoms({4, 9}), randoms({6, 4})), InternalError);
  EXPECT_THROW(linear_forward(context(), randoms({6, 10}), randoms({4, 10}), randoms({5, 4})), InternalError);
}

TESSERA_BOTH_TYPES(Gemm);

}  // namespace
}  // namespace tessera
