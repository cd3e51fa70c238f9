#include "ops/gemm/gemm.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct Product {
  std::int64_t m, n, k;
};

class GemmCuda : public ParityTest {
 protected:
  /// Returns a matrix whose rows are `gap` numbers further apart than they are long. The first row begins `gap` numbers
  /// in.
  Tensor with_gaps(std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t gap) {
    return random({rows, columns + gap}, dtype).columns(gap, columns + gap);
  }

  /// Checks a product. b has `dtype`, and so has a, unless `mixed` makes it float32.
  void check(const Product& p, DType dtype, DType dtype_c, std::int64_t gap, bool mixed = false) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const Write write : {Write::kAssign, Write::kAccumulate}) {
          SCOPED_TRACE(fmt::format("{} x {} x {} {} to {} gap {} {} {} {}", p.m, p.n, p.k, name_of(dtype),
                                   name_of(dtype_c), gap, transpose_a, transpose_b, write == Write::kAccumulate));
          const ArenaScope scope(arena_);
          const Tensor a =
              with_gaps(transpose_a ? p.k : p.m, transpose_a ? p.m : p.k, mixed ? DType::kFloat32 : dtype, gap);
          const Tensor b = with_gaps(transpose_b ? p.n : p.k, transpose_b ? p.k : p.n, dtype, gap);
          const Tensor c = write == Write::kAssign ? poisoned({p.m, p.n + gap}, dtype_c).columns(gap, p.n + gap)
                                                   : with_gaps(p.m, p.n, dtype_c, gap);
          expect_close(
              [&](const Side& side) { gemm(side.op, side(a), transpose_a, side(b), transpose_b, side(c), write); },
              {c});
        }
      }
    }
  }
};

TEST_F(GemmCuda, Shapes) {
  constexpr DType kF = DType::kFloat32, kB = DType::kBFloat16;
  for (const auto& [dtype, dtype_c] : {std::pair{kF, kF}, {kB, kB}, {kB, kF}}) {
    // The shapes are one number, multiples of nothing, a router's gate, a row, a column, and a projection with a tail.
    for (const Product& p :
         {Product{1, 1, 1}, {3, 5, 7}, {67, 129, 33}, {200, 64, 2048}, {1, 96, 128}, {96, 1, 128}, {130, 1408, 512}}) {
      check(p, dtype, dtype_c, 0);
    }
    for (const std::int64_t gap : {8, 3}) check({64, 96, 48}, dtype, dtype_c, gap);
    // A few rows, and one more. The contractions leave lanes and loads without work, or take several turns.
    for (const std::int64_t rows : {1, 2, 5, 8, 9}) {
      for (const std::int64_t contraction : {8, 264, 2312}) check({rows, 37, contraction}, dtype, dtype_c, 8);
    }
  }
}

// The heads' products of decoding, and one whose matrices are not aligned.
TEST_F(GemmCuda, OfABatch) {
  struct Case {
    std::int64_t m, n, k, count, step_a;
    bool transpose_b;
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Case& c : {Case{1, 512, 128, 16, 192, false},
                          {8, 128, 512, 16, 512, true},
                          {1, 128, 512, 16, 512, true},
                          {2, 9, 16, 3, 20, true},
                          {8, 264, 7, 5, 7, false},
                          {3, 40, 300, 2, 300, false},
                          {9, 512, 128, 16, 192, false},
                          {9, 128, 512, 16, 512, true},
                          {3, 7, 5, 4, 9, false}}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} {}", c.m, c.n, c.k, name_of(dtype)));
      const ArenaScope scope(arena_);
      const Tensor a = random({c.m, c.count * c.step_a}, dtype);
      const std::int64_t rows = c.transpose_b ? c.n : c.k, columns = c.transpose_b ? c.k : c.n;
      const Tensor b = random({c.count * rows, columns}, dtype);
      const Tensor y = poisoned({c.m, c.count * c.n}, dtype);
      const GemmBatch batch{.count = c.count, .step_a = c.step_a, .step_b = rows * columns, .step_c = c.n};
      expect_close(
          [&](const Side& side) {
            batched_gemm(side.op, side(a).columns(0, c.k), side(b).rows(0, rows), c.transpose_b,
                         side(y).columns(0, c.n), batch);
          },
          {y});
    }
  }
}

TEST_F(GemmCuda, OfTwoWeights) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Product& p : {Product{1, 3072, 264}, {5, 37, 2312}, {8, 6, 8}, {9, 37, 264}, {2, 5, 7}}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} {}", p.m, p.n, p.k, name_of(dtype)));
      const ArenaScope scope(arena_);
      const Tensor x = random({p.m, p.k}, dtype), w1 = random({p.n, p.k}, dtype), w2 = random({43, p.k}, dtype);
      const Tensor y1 = poisoned({p.m, p.n}, dtype), y2 = poisoned({p.m, 43}, dtype);
      const auto run = [&](const Side& side) {
        linear_pair_forward(side.op, side(x), {side(w1), side(w2)}, {side(y1), side(y2)});
      };
      expect_close(run, {y1, y2});
      expect_close_though_late(x, poisoned(x.shape(), dtype), run, {y1, y2});
    }
  }
}

TEST_F(GemmCuda, OfFewRowsThatComeLate) {
  constexpr std::int64_t kHeads = 4, kWidth = 64, kColumns = 300;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t rows : {1, 8}) {
      SCOPED_TRACE(fmt::format("{} rows {}", rows, name_of(dtype)));
      const ArenaScope scope(arena_);
      const Tensor a = random({rows, kHeads * kWidth}, dtype), stale = poisoned(a.shape(), dtype);
      const Tensor w = random({kColumns, kHeads * kWidth}, dtype), y = poisoned({rows, kColumns}, dtype);
      expect_close_though_late(a, stale, [&](const Side& side) { linear_forward(side.op, side(a), side(w), side(y)); },
                               {y});
      const Tensor b = random({kHeads * kWidth, 520}, dtype), z = poisoned({rows, kHeads * 520}, dtype);
      const auto of_heads = [&](const Side& side) {
        batched_gemm(side.op, side(a).columns(0, kWidth), side(b).rows(0, kWidth), /*transpose_b=*/false,
                     side(z).columns(0, 520),
                     {.count = kHeads, .step_a = kWidth, .step_b = kWidth * 520, .step_c = 520});
      };
      expect_close_though_late(a, stale, of_heads, {z});
    }
  }
}

TEST_F(GemmCuda, OfTwoTypes) {
  for (const DType dtype_c : {DType::kFloat32, DType::kBFloat16}) {
    for (const Product& p : {Product{1, 1, 1}, {67, 129, 33}, {200, 64, 2048}, {64, 256, 300}}) {
      for (const std::int64_t gap : {0, 8, 3}) check(p, DType::kBFloat16, dtype_c, gap, true);
    }
  }
}

TEST_F(GemmCuda, AsAGraph) {
  const Tensor a = random({256, 512}, DType::kBFloat16), b = random({128, 512}, DType::kBFloat16);
  const Tensor c = poisoned({256, 128}, DType::kBFloat16);
  expect_close(
      [&](const Side& side) { as_graph(side, {c}, [&] { linear_forward(side.op, side(a), side(b), side(c)); }); }, {c});
}

// tf32 would round these terms away.
TEST_F(GemmCuda, Float32IsNotRounded) {
  const Tensor a = random({64, 256}), b = random({64, 256}), c = poisoned({64, 64}, DType::kFloat32);
  for (std::int64_t i = 0; i < a.num_elements(); ++i) a.data<float>()[i] = 1.0f + 0x1p-13f * a.data<float>()[i];
  expect_close([&](const Side& side) { linear_forward(side.op, side(a), side(b), side(c)); }, {c}, 1e-6);
}

TEST_F(GemmCuda, Float32BesideBFloat16IsNotRounded) {
  const Tensor a = random({64, 256}), b = random({256, 48}, DType::kBFloat16), c = poisoned({64, 48}, DType::kFloat32);
  for (std::int64_t i = 0; i < a.num_elements(); ++i) a.data<float>()[i] = 1.0f + 0x1p-13f * a.data<float>()[i];
  expect_close([&](const Side& s) { gemm(s.op, s(a), false, s(b), false, s(c), Write::kAssign); }, {c}, 4e-6);
  const Tensor d = poisoned({256, 48}, DType::kFloat32), e = random({64, 48}, DType::kBFloat16);
  expect_close([&](const Side& s) { gemm(s.op, s(a), true, s(e), false, s(d), Write::kAssign); }, {d}, 4e-6);
}

TEST_F(GemmCuda, RowsOfLargerMatrices) {
  // A chunk of a batch is such a part. Its address may be at any row.
  const Tensor x = random({50, 72}, DType::kBFloat16), w = random({40, 72}, DType::kBFloat16);
  for (const std::int64_t first : {0, 1, 8}) {
    const Tensor y = poisoned({20, 40}, DType::kFloat32);
    const Tensor rows = x.rows(first, first + 20);
    expect_close([&](const Side& side) { linear_forward(side.op, side(rows), side(w), side(y)); }, {y});
  }
}

}  // namespace
}  // namespace tessera
