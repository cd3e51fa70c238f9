#include "ops/routing/routed_ffn.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

struct Sizes {
  std::int64_t num_tokens, num_experts, top_k, dim, hidden;
};

class RoutedFfnCuda : public ParityTest {
 protected:
  void check(const Sizes& sizes, DType dtype) {
    const auto& [num_tokens, num_experts, top_k, dim, hidden] = sizes;
    SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts, {} x {} {}", num_tokens, top_k, num_experts, dim, hidden,
                             name_of(dtype)));
    const ArenaScope scope(arena_);
    std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(num_experts));
    for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
      // Neighbours share some of their experts.
      ids.push_back(static_cast<std::int32_t>((slot / top_k * 2 + slot % top_k) % num_experts));
      ++counts[static_cast<std::size_t>(ids.back())];
    }
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    const Tensor w13 = random({num_experts, 2 * hidden, dim}, dtype, scale);
    const Tensor w2 = random({num_experts, dim, hidden}, dtype, scale);
    const Tensor expert_ids = ints(ids, {num_tokens, top_k}), counts_E = ints(counts);
    const Tensor weights = random({num_tokens, top_k}), y = random({num_tokens, dim}, dtype);
    const Tensor out = poisoned({num_tokens, dim}, dtype);
    expect_close(
        [&](const Side& side) {
          as_graph(side, {out}, [&] {
            routed_ffn(side.op, side(y), {side(w13), side(w2), side(expert_ids), side(weights), side(counts_E)},
                       side(out));
          });
        },
        {out});
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

}  // namespace
}  // namespace tessera
