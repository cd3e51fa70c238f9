#include "ops/elementwise/embedding.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class EmbeddingCuda : public ParityTest {
 protected:
  /// Returns ids of tokens. A third of them are one token. The others occur from a few to many times, and some lie just
  /// outside of the table's ids.
  Tensor tokens(std::int64_t count, std::int32_t first_id, std::int32_t num_ids) {
    const Philox philox(5, stream_++);
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < count; ++t) {
      const double u = philox.uniform(static_cast<std::uint64_t>(t));
      ids.push_back(t % 3 == 0 ? first_id + num_ids / 2
                               : first_id - 2 + static_cast<std::int32_t>(u * u * (num_ids + 4)));
    }
    return ints(ids);
  }
};

TEST_F(EmbeddingCuda, Forward) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t dim : {1, 45, 64, 2048}) {
      const ArenaScope scope(arena_);
      const Tensor tokens_T = tokens(300, 10, 50), table = random({50, dim}, dtype), x = poisoned({300, dim}, dtype);
      expect_same([&](const Side& side) { embedding_forward(side.op, side(tokens_T), side(table), 10, side(x)); }, {x});
    }
  }
}

// Both sides add in the order of t, so the bytes are the same. 16384 tokens are a tile.
TEST_F(EmbeddingCuda, Backward) {
  for (const DType dtype : kActivationTypes) {
    for (const auto& [count, num_ids, dim] : {std::tuple{1, 1, 1},
                                              {300, 50, 45},
                                              {2000, 300, 64},
                                              {1200, 40, 2048},
                                              {16384, 100'000, 8},
                                              {20000, 300'000, 8},
                                              {33000, 3, 64},
                                              {700, 9, 2056}}) {
      const ArenaScope scope(arena_);
      const Tensor tokens_T = tokens(count, 10, num_ids), d_x = random({count, dim}, dtype);
      const Tensor d_table = random({num_ids, dim});
      expect_same([&](const Side& side) { embedding_backward(side.op, side(tokens_T), side(d_x), 10, side(d_table)); },
                  {d_table});
    }
  }
}

}  // namespace
}  // namespace tessera
