#include "ops/routing/routed_ffn.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct Sizes {
  std::int64_t num_tokens, num_experts, top_k, dim, hidden;
};

class RoutedFfnCuda : public ParityTest {
 protected:
  struct Operands {
    Tensor y, w13, w2, ids, weights, counts, out;
  };
  Operands make(const Sizes& sizes, DType dtype) {
    const auto& [num_tokens, num_experts, top_k, dim, hidden] = sizes;
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(num_experts));
    for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
      // Neighbours share some of their experts. The first expert is not the first token's first choice.
      ids.push_back(static_cast<std::int32_t>((slot / top_k * 2 + slot % top_k + 1) % num_experts));
      ++counts[static_cast<std::size_t>(ids.back())];
    }
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    return {.y = random({num_tokens, dim}, dtype),
            .w13 = random({num_experts, 2 * hidden, dim}, dtype, scale),
            .w2 = random({num_experts, dim, hidden}, dtype, scale),
            .ids = ints(ids, {num_tokens, top_k}),
            .weights = random({num_tokens, top_k}),
            .counts = ints(counts),
            .out = poisoned({num_tokens, dim}, dtype)};
  }
  static void run(const Side& side, const Operands& x) {
    routed_ffn(side.op, side(x.y), {side(x.w13), side(x.w2), side(x.ids), side(x.weights), side(x.counts)},
               side(x.out));
  }
  void check(const Sizes& sizes, DType dtype) {
    SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts, {} x {} {}", sizes.num_tokens, sizes.top_k,
                             sizes.num_experts, sizes.dim, sizes.hidden, name_of(dtype)));
    const ArenaScope scope(arena_);
    const Operands x = make(sizes, dtype);
    expect_close([&](const Side& side) { as_graph(side, {x.out}, [&] { run(side, x); }); }, {x.out});
  }
};

TEST_F(RoutedFfnCuda, AsOnTheCpu) {
  for (const DType dtype : kActivationTypes) {
    check({1, 8, 6, 2048, 1408}, dtype);  // a layer of the 16B model, with fewer experts
    check({8, 5, 3, 264, 136}, dtype);    // lanes without work
    check({3, 4, 1, 8, 8}, dtype);
    check({9, 4, 2, 128, 64}, dtype);  // more tokens, and sizes that are not aligned, take other kernels
    check({2, 3, 2, 36, 20}, dtype);
  }
}

TEST_F(RoutedFfnCuda, OfTokensOrChoicesThatComeLate) {
  const Operands x = make({2, 5, 3, 512, 256}, DType::kBFloat16);
  const auto run_it = [&](const Side& side) { run(side, x); };
  expect_close_though_late(x.y, poisoned(x.y.shape(), DType::kBFloat16), run_it, {x.out});
  expect_close_though_late(x.ids, ints({0, 0, 0, 0, 0, 0}, {2, 3}), run_it, {x.out});
}

}  // namespace
}  // namespace tessera
