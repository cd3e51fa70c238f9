#include <numeric>

#include "ops/attention/mla_decode.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class MlaDecodeCuda : public ParityTest {
 protected:
  void check(const MlaDecodeDims& dims, std::int64_t positions, DType dtype) {
    SCOPED_TRACE(fmt::format("{} heads, latent {}, {} positions, {}", dims.num_heads, dims.dim_latent, positions,
                             name_of(dtype)));
    const ArenaScope scope(arena_);
    constexpr std::int64_t kTokens = 3, kSlots = 4;
    const auto last = static_cast<std::int32_t>(positions - 1);
    const std::int64_t row = dims.dim_latent + dims.dim_rope;
    const Tensor slots = ints({2, 0, 3}), at = ints({last, 0, last / 2});
    const Tensor cache = random({kSlots, positions, row}, dtype);
    const Tensor latent = random({kTokens, row + 3}, dtype).columns(3, 3 + dims.dim_latent);
    const Tensor k_rope = random({kTokens, dims.dim_rope}, dtype);
    expect_same(
        [&](const Side& side) {
          store_latents(side.op, side(latent), side(k_rope), side(slots), side(at), side(cache));
        },
        {cache});
    const Tensor q = random({kTokens, dims.num_heads * (dims.dim_nope + dims.dim_rope)}, dtype);
    const Tensor q_latent = random({kTokens, dims.num_heads * dims.dim_latent}, dtype);
    const Tensor o = poisoned({kTokens, dims.num_heads * dims.dim_latent}, dtype);
    expect_close(
        [&](const Side& side) {
          mla_decode(side.op, dims, {side(q), side(q_latent), side(cache), side(slots), side(at)}, side(o));
        },
        {o}, kBackwardBound);
  }

  /// Holds new tokens for a cache of 4 texts.
  struct NewTokens {
    std::int64_t num_tokens, num_heads, nope, rope, latent;
    std::int64_t gap = 0;  // between the rows of kv_a
    bool rotates = true;
  };
  static constexpr std::int64_t kPositions = 9;
  struct Prepared {
    Tensor kv_a, weight, q, cos, sin, slots, positions, cache;
    std::int64_t num_heads, rope_dim;
  };
  Prepared make(const NewTokens& sizes, DType dtype) {
    const auto& [num_tokens, num_heads, nope, rope, latent, gap, rotates] = sizes;
    std::vector<std::int32_t> slots, positions;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      slots.push_back(static_cast<std::int32_t>((t + 1) % 4));
      positions.push_back(static_cast<std::int32_t>((2 * t + 8) % kPositions));
    }
    return {.kv_a = random({num_tokens, latent + rope + gap}, dtype).columns(gap, latent + rope + gap),
            .weight = random({latent}, dtype),
            .q = random({num_tokens, num_heads * (nope + rope)}, dtype),
            .cos = random({kPositions, rope / 2}),
            .sin = random({kPositions, rope / 2}),
            .slots = ints(slots),
            .positions = ints(positions),
            .cache = random({4, kPositions, latent + rope}, dtype),
            .num_heads = num_heads,
            .rope_dim = rotates ? rope : 0};
  }
  static void prepare(const Side& side, const Prepared& x) {
    prepare_mla_decode(side.op,
                       {.kv_a = side(x.kv_a),
                        .norm_weight_C = side(x.weight),
                        .norm_eps = 1e-5f,
                        .q = side(x.q),
                        .num_heads = x.num_heads,
                        .rope_dim = x.rope_dim,
                        .cos_PM = side(x.cos),
                        .sin_PM = side(x.sin)},
                       side(x.slots), side(x.positions), side(x.cache));
  }

  /// Decodes after 1, 2, ... positions of a cache whose rows [first, end) are NaN. The outputs must be NaN from the
  /// first of these rows on, and numbers before it.
  void check_nan(std::int64_t positions, std::int64_t first, std::int64_t end, DType dtype) {
    SCOPED_TRACE(fmt::format("rows [{}, {}) of {} are NaN, {}", first, end, positions, name_of(dtype)));
    const ArenaScope scope(arena_);
    const MlaDecodeDims dims{.num_heads = 2, .dim_nope = 8, .dim_rope = 8, .dim_latent = 40, .scale = 0.2f};
    const std::int64_t row = dims.dim_latent + dims.dim_rope, width = dims.num_heads * dims.dim_latent;
    const Tensor cache = random({1, positions, row}, dtype), bad = cache[0].rows(first, end);
    std::memset(bad.raw(), 0xff, bad.num_bytes());
    std::vector<std::int32_t> at(static_cast<std::size_t>(positions));
    std::iota(at.begin(), at.end(), 0);
    const Tensor position_T = ints(at), slot_T = ints(std::vector<std::int32_t>(at.size(), 0));
    const Tensor q = random({positions, dims.num_heads * (dims.dim_nope + dims.dim_rope)}, dtype);
    const Tensor q_latent = random({positions, width}, dtype), o = poisoned({positions, width}, dtype);
    run_on_gpu(
        [&](const Side& side) {
          mla_decode(side.op, dims, {side(q), side(q_latent), side(cache), side(slot_T), side(position_T)}, side(o));
        },
        {o});
    for (std::int64_t t = 0; t < positions; ++t) {
      const Doubles numbers = doubles(o.rows(t, t + 1));
      EXPECT_EQ(std::ranges::count_if(numbers, [](double x) { return std::isnan(x); }), t < first ? 0 : width) << t;
    }
  }
};

TEST_F(MlaDecodeCuda, StoreAndDecode) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check({.num_heads = 2, .dim_nope = 3, .dim_rope = 2, .dim_latent = 5, .scale = 0.4f}, 1, dtype);
    check({.num_heads = 3, .dim_nope = 8, .dim_rope = 8, .dim_latent = 40, .scale = 0.2f}, 37, dtype);
    check({.num_heads = 16, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .scale = 0.07f}, 300, dtype);
  }
}

TEST_F(MlaDecodeCuda, NewTokensAreMadeReadyAsOnTheCpu) {
  for (const DType dtype : kActivationTypes) {
    for (const NewTokens& sizes : {NewTokens{1, 16, 128, 64, 512}, NewTokens{3, 5, 3, 2, 7, 3},
                                   NewTokens{4, 128, 128, 64, 512}, NewTokens{2, 3, 8, 8, 40, 8, /*rotates=*/false}}) {
      SCOPED_TRACE(fmt::format("{} tokens, {} heads, {}", sizes.num_tokens, sizes.num_heads, name_of(dtype)));
      const ArenaScope scope(arena_);
      const Prepared x = make(sizes, dtype);
      expect_close([&](const Side& side) { prepare(side, x); }, {x.cache, x.q});
    }
  }
}

TEST_F(MlaDecodeCuda, NewTokensThatComeLate) {
  const Prepared x = make({2, 4, 16, 8, 64}, DType::kBFloat16);
  const auto stored = [&](std::int64_t t) {
    const auto *slots = x.slots.data<std::int32_t>(), *positions = x.positions.data<std::int32_t>();
    return x.cache[slots[t]].rows(positions[t], positions[t] + 1);
  };
  const auto run = [&](const Side& side) { prepare(side, x); };
  expect_close_though_late(x.kv_a, poisoned(x.kv_a.shape(), DType::kBFloat16), run, {stored(0), stored(1)});
}

// 64 warps take the positions in turn. A warp may have none, only NaN, or NaN before or after numbers.
TEST_F(MlaDecodeCuda, ANanInTheCacheIsInTheOutput) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check_nan(150, 0, 1, dtype);
    check_nan(150, 20, 21, dtype);
    check_nan(150, 100, 101, dtype);
    check_nan(150, 8, 16, dtype);  // all that a block has at first
    check_nan(150, 0, 150, dtype);
  }
}

}  // namespace
}  // namespace tessera
