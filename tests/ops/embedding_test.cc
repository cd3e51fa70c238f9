#include "ops/embedding.h"

#include "tests/ops/harness.h"

namespace tessera {
namespace {

class Embedding : public TypedOperatorTest {};

TEST_P(Embedding, RowsOutAndGradientsBack) {
  // Repeated tokens; more columns than a task has.
  const Tensor tokens = ints({3, 0, 3, 1}), table = randoms({5, 70}), x = randoms({4, 70});
  embedding_forward(context(), tokens, table, x);
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
  embedding_backward(context(), tokens, d_x, d_table);
  EXPECT_LE(relative_error(d_table, expected), kBackwardBound);
}

TEST_P(Embedding, SameAtAnyNumberOfThreads) {
  const Tensor tokens = ints(std::vector<std::int32_t>(30, 1)), d_x = randoms({30, 200}), d_table = random({2, 200});
  expect_same_for_any_threads(
      [&] {
        std::fill_n(d_table.data<float>(), d_table.num_elements(), 0.0f);
        embedding_backward(context(), tokens, d_x, d_table);
      },
      {d_table});
}

TESSERA_BOTH_TYPES(Embedding);

}  // namespace
}  // namespace tessera
