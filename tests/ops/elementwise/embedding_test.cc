#include "ops/elementwise/embedding.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Embedding : public TypedOperatorTest {};

TEST_P(Embedding, RowsOutAndGradientsBack) {
  // Tokens repeat, and there are more columns than a task has.
  const Tensor tokens = ints({3, 0, 3, 1}), table = randoms({5, 70}), x = randoms({4, 70});
  embedding_forward(context(), tokens, table, 0, x);
  for (std::int64_t t = 0; t < 4; ++t) {
    const std::int32_t token = tokens.data<std::int32_t>()[t];
    EXPECT_EQ(doubles(x.rows(t, t + 1)), doubles(table.rows(token, token + 1)));
  }
  const Tensor d_x = randoms({4, 70}), d_table = random({5, 70});
  Doubles expected = doubles(d_table);
  for (std::size_t t = 0; t < 4; ++t) {
    for (std::size_t j = 0; j < 70; ++j) {
      expected[static_cast<std::size_t>(tokens.data<std::int32_t>()[t]) * 70 + j] += doubles(d_x)[t * 70 + j];
    }
  }
  embedding_backward(context(), tokens, d_x, 0, d_table);
  EXPECT_LE(relative_error(d_table, expected), kBackwardBound);
}

// There are several tasks of tokens and of columns. The backward is compared with differences.
TEST_P(Embedding, ManyTokens) {
  constexpr std::size_t kTokens = 140, kVocab = 3, kDim = 67;
  std::vector<std::int32_t> ids;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(kTokens); ++t)
    ids.push_back(t * t % 2 == 0 ? 0 : 2);  // token 1 never occurs
  const Tensor tokens = ints(ids), table = randoms({kVocab, kDim}), x = randoms({kTokens, kDim});
  const auto rows = [&](const Doubles& values) {
    Doubles result;
    for (const std::int32_t id : ids) {
      for (std::size_t j = 0; j < kDim; ++j) result.push_back(values[static_cast<std::size_t>(id) * kDim + j]);
    }
    return result;
  };
  embedding_forward(context(), tokens, table, 0, x);
  EXPECT_EQ(doubles(x), rows(doubles(table)));
  const Tensor d_x = randoms({kTokens, kDim}), d_table = random({kVocab, kDim});
  const Doubles expected =
      plus(doubles(d_table),
           central_differences([&](const Doubles& v) { return dot(rows(v), doubles(d_x)); }, doubles(table)));
  embedding_backward(context(), tokens, d_x, 0, d_table);
  EXPECT_LE(relative_error(d_table, expected), kBackwardBound);
}

// Each rank has a part of the table. The ranks' rows add up to those of the whole, and each part gets the gradients of
// its rows.
TEST_P(Embedding, ATableCutAmongRanks) {
  constexpr std::int64_t kVocab = 6, kDim = 9, kRows = 2;
  const Tensor tokens = ints({3, 0, 5, 1, 3}), table = randoms({kVocab, kDim}), d_x = randoms({5, kDim});
  const Tensor whole = randoms({5, kDim}), d_whole = random({kVocab, kDim}), d_parts = random({kVocab, kDim});
  for (const Tensor& d : {d_whole, d_parts}) std::fill_n(d.data<float>(), d.num_elements(), 0.0f);
  embedding_forward(context(), tokens, table, 0, whole);
  embedding_backward(context(), tokens, d_x, 0, d_whole);
  Doubles sum(5 * kDim, 0.0);
  for (std::int64_t first = 0; first < kVocab; first += kRows) {
    const Tensor part = randoms({5, kDim});
    embedding_forward(context(), tokens, table.rows(first, first + kRows), first, part);
    sum = plus(sum, doubles(part));
    embedding_backward(context(), tokens, d_x, first, d_parts.rows(first, first + kRows));
  }
  EXPECT_EQ(sum, doubles(whole));
  EXPECT_EQ(doubles(d_parts), doubles(d_whole));
}

TEST_P(Embedding, SameAtAnyNumberOfThreads) {
  const Tensor tokens = ints(std::vector<std::int32_t>(30, 1)), d_x = randoms({30, 200}), d_table = random({2, 200});
  expect_same_for_any_threads(
      [&] {
        std::fill_n(d_table.data<float>(), d_table.num_elements(), 0.0f);
        embedding_backward(context(), tokens, d_x, 0, d_table);
      },
      {d_table});
}

TESSERA_BOTH_TYPES(Embedding);

}  // namespace
}  // namespace tessera
