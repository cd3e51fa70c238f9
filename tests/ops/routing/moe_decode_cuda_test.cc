#include "ops/routing/moe_decode.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct Sizes {
  std::int64_t num_tokens, num_experts, top_k, dim, hidden, shared_hidden;
};

class MoeDecodeCuda : public ParityTest {
 protected:
  struct Operands {
    Tensor x, y, w13, w2, shared_w13, shared_w2, ids, weights, counts, out;
  };
  Operands make(const Sizes& sizes, DType dtype) {
    const auto& [num_tokens, num_experts, top_k, dim, hidden, shared_hidden] = sizes;
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(num_experts));
    for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
      // Neighbours share some of their experts. The first expert is not the first token's first choice.
      ids.push_back(static_cast<std::int32_t>((slot / top_k * 2 + slot % top_k + 1) % num_experts));
      ++counts[static_cast<std::size_t>(ids.back())];
    }
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    return {.x = random({num_tokens, dim}, dtype),
            .y = random({num_tokens, dim}, dtype),
            .w13 = random({num_experts, 2 * hidden, dim}, dtype, scale),
            .w2 = random({num_experts, dim, hidden}, dtype, scale),
            .shared_w13 = shared_hidden > 0 ? random({2 * shared_hidden, dim}, dtype, scale) : Tensor(),
            .shared_w2 = shared_hidden > 0 ? random({dim, shared_hidden}, dtype, scale) : Tensor(),
            .ids = ints(ids, {num_tokens, top_k}),
            .weights = random({num_tokens, top_k}),
            .counts = ints(counts),
            .out = poisoned({num_tokens, dim}, dtype)};
  }
  static void run(const Side& side, const Operands& x) {
    moe_decode(side.op, side(x.x), side(x.y),
               {.w13_E2FD = side(x.w13),
                .w2_EDF = side(x.w2),
                .shared_w13_2ID = side(x.shared_w13),
                .shared_w2_DI = side(x.shared_w2),
                .expert_ids_TK = side(x.ids),
                .weights_TK = side(x.weights),
                .counts_E = side(x.counts)},
               side(x.out));
  }
  void check(const Sizes& sizes, DType dtype) {
    SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts, {} x {}, {} shared, {}", sizes.num_tokens, sizes.top_k,
                             sizes.num_experts, sizes.dim, sizes.hidden, sizes.shared_hidden, name_of(dtype)));
    const ArenaScope scope(arena_);
    const Operands x = make(sizes, dtype);
    expect_close([&](const Side& side) { as_graph(side, {x.out}, [&] { run(side, x); }); }, {x.out});
  }
};

TEST_F(MoeDecodeCuda, AsOnTheCpu) {
  for (const DType dtype : kActivationTypes) {
    check({1, 8, 6, 1024, 352, 704}, dtype);  // as in the 16B model, but smaller
    check({1, 5, 3, 264, 136, 136}, dtype);   // lanes without work
    check({4, 5, 3, 264, 136, 0}, dtype);
    check({3, 4, 1, 8, 8, 24}, dtype);
    check({1, 12, 10, 128, 64, 64}, dtype);  // more parts than warps
    check({5, 4, 2, 128, 64, 64}, dtype);    // more tokens, and sizes that are not aligned, take other kernels
    check({2, 3, 2, 36, 20, 20}, dtype);
  }
}

// Without shared experts, the second kernel reads the choices before it waits. With the last sizes, the first kernel is
// long, and the second could begin meanwhile.
TEST_F(MoeDecodeCuda, OfTokensOrChoicesThatComeLate) {
  for (const Sizes& sizes :
       {Sizes{1, 5, 3, 512, 256, 512}, {1, 5, 3, 512, 256, 0}, {2, 5, 3, 512, 256, 0}, {1, 5, 3, 16384, 8, 0}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} shared", sizes.num_tokens, sizes.shared_hidden));
    const ArenaScope scope(arena_);
    const Operands x = make(sizes, DType::kBFloat16);
    const auto run_it = [&](const Side& side) { run(side, x); };
    const std::vector<std::int32_t> zeros(static_cast<std::size_t>(sizes.num_tokens * sizes.top_k));
    expect_close_though_late(x.x, poisoned(x.x.shape(), DType::kBFloat16), run_it, {x.out});
    expect_close_though_late(x.y, poisoned(x.y.shape(), DType::kBFloat16), run_it, {x.out});
    expect_close_though_late(x.ids, ints(zeros, x.ids.shape()), run_it, {x.out});
  }
}

}  // namespace
}  // namespace tessera
