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
    const Tensor wkv_b = random({dims.num_heads * (dims.dim_nope + dims.dim_v), dims.dim_latent}, dtype);
    const Tensor o = poisoned({kTokens, dims.num_heads * dims.dim_v}, dtype);
    const auto decode = [&](const Side& side) {
      mla_decode(side.op, dims, {side(q), side(q_latent), side(wkv_b), side(cache), side(slots), side(at)}, side(o));
    };
    expect_close(decode, {o}, kBackwardBound);
    expect_close_though_late(q, poisoned(q.shape(), dtype), decode, {o});
    expect_close_though_late(q_latent, poisoned(q_latent.shape(), dtype), decode, {o});
    // Earlier rows of the cache may be read before the kernel in front ends.
    const Tensor without_new_rows = poisoned(cache.shape(), dtype);
    std::memcpy(without_new_rows.raw(), cache.raw(), cache.num_bytes());
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t slot = slots.data<std::int32_t>()[t], position = at.data<std::int32_t>()[t];
      const Tensor stored = without_new_rows[slot].rows(position, position + 1);
      std::memset(stored.raw(), 0xff, stored.num_bytes());
    }
    expect_close_though_late(cache, without_new_rows, decode, {o});
  }

  /// Holds new tokens for a cache of 4 texts.
  struct NewTokens {
    std::int64_t num_tokens, num_heads, nope, rope, latent;
    std::int64_t gap = 0;  // between the rows of kv_a
    bool rotates = true;
  };
  static constexpr std::int64_t kPositions = 9;
  struct Prepared {
    Tensor kv_a, weight, q, wkv_b, q_latent, cos, sin, slots, positions, cache;
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
            .wkv_b = random({num_heads * (nope + 8), latent}, dtype),
            .q_latent = poisoned({num_tokens, num_heads * latent}, dtype),
            .cos = random({kPositions, rope / 2}),
            .sin = random({kPositions, rope / 2}),
            .slots = ints(slots),
            .positions = ints(positions),
            .cache = random({4, kPositions, latent + rope}, dtype),
            .num_heads = num_heads,
            .rope_dim = rotates ? rope : 0};
  }
  void check_prepared(const NewTokens& sizes, DType dtype) {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads, {}", sizes.num_tokens, sizes.num_heads, name_of(dtype)));
    const ArenaScope scope(arena_);
    const Prepared x = make(sizes, dtype);
    expect_close([&](const Side& side) { prepare(side, x); }, {x.cache, x.q, x.q_latent});
  }
  static void prepare(const Side& side, const Prepared& x) {
    prepare_mla_decode(side.op,
                       {.kv_a = side(x.kv_a),
                        .norm_weight_C = side(x.weight),
                        .norm_eps = 1e-5f,
                        .q = side(x.q),
                        .wkv_b = side(x.wkv_b),
                        .q_latent = side(x.q_latent),
                        .num_heads = x.num_heads,
                        .rope_dim = x.rope_dim,
                        .cos_PM = side(x.cos),
                        .sin_PM = side(x.sin)},
                       side(x.slots), side(x.positions), side(x.cache));
  }

  /// Decodes up to 150 tokens of one text. The last attends to all `positions` rows of the cache, the one before it to
  /// one row less, and so on. The rows [first, end) are NaN. The outputs must be NaN from the first of these rows on,
  /// and numbers before it.
  void check_nan(const MlaDecodeDims& dims, std::int64_t positions, std::int64_t first, std::int64_t end, DType dtype) {
    SCOPED_TRACE(fmt::format("latent {}, rows [{}, {}) of {} are NaN, {}", dims.dim_latent, first, end, positions,
                             name_of(dtype)));
    const ArenaScope scope(arena_);
    const std::int64_t row = dims.dim_latent + dims.dim_rope, width = dims.num_heads * dims.dim_v;
    const Tensor cache = random({1, positions, row}, dtype), bad = cache[0].rows(first, end);
    std::memset(bad.raw(), 0xff, bad.num_bytes());
    std::vector<std::int32_t> at(static_cast<std::size_t>(std::min<std::int64_t>(positions, 150)));
    std::iota(at.begin(), at.end(), static_cast<std::int32_t>(positions) - static_cast<std::int32_t>(at.size()));
    const Tensor position_T = ints(at), slot_T = ints(std::vector<std::int32_t>(at.size(), 0));
    const auto num_texts = static_cast<std::int64_t>(at.size());
    const Tensor q = random({num_texts, dims.num_heads * (dims.dim_nope + dims.dim_rope)}, dtype);
    const Tensor q_latent = random({num_texts, dims.num_heads * dims.dim_latent}, dtype);
    const Tensor wkv_b = random({dims.num_heads * (dims.dim_nope + dims.dim_v), dims.dim_latent}, dtype);
    const Tensor o = poisoned({num_texts, width}, dtype);
    run_on_gpu(
        [&](const Side& side) {
          mla_decode(side.op, dims, {side(q), side(q_latent), side(wkv_b), side(cache), side(slot_T), side(position_T)},
                     side(o));
        },
        {o});
    for (std::int64_t t = 0; t < num_texts; ++t) {
      const Doubles numbers = doubles(o.rows(t, t + 1));
      EXPECT_EQ(std::ranges::count_if(numbers, [](double x) { return std::isnan(x); }),
                at[static_cast<std::size_t>(t)] < first ? 0 : width)
          << t;
    }
  }
};

TEST_F(MlaDecodeCuda, StoreAndDecode) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check({.num_heads = 2, .dim_nope = 3, .dim_rope = 2, .dim_latent = 5, .dim_v = 3, .scale = 0.4f}, 1, dtype);
    check({.num_heads = 3, .dim_nope = 8, .dim_rope = 8, .dim_latent = 40, .dim_v = 8, .scale = 0.2f}, 37, dtype);
    // On tensor cores in bfloat16: part of a tile, whole tiles, a third tile of two blocks, heads that do not exist.
    check({.num_heads = 16, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .dim_v = 128, .scale = 0.07f}, 300,
          dtype);
    check({.num_heads = 16, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .dim_v = 128, .scale = 0.07f}, 1024,
          dtype);
    check({.num_heads = 21, .dim_nope = 8, .dim_rope = 64, .dim_latent = 256, .dim_v = 24, .scale = 0.2f}, 2101, dtype);
  }
}

TEST_F(MlaDecodeCuda, NewTokensAreMadeReadyAsOnTheCpu) {
  for (const DType dtype : kActivationTypes) {
    for (const NewTokens& sizes : {NewTokens{1, 16, 128, 64, 512}, NewTokens{4, 128, 128, 64, 512},
                                   NewTokens{2, 3, 8, 8, 40, 8, /*rotates=*/false}, NewTokens{8, 2, 8, 8, 40}}) {
      check_prepared(sizes, dtype);
    }
  }
}

// The library's products multiply these by W_k: there are too many tokens, or the rows are not whole 16 bytes.
TEST_F(MlaDecodeCuda, ManyNewTokensOrOddSizes) {
  for (const DType dtype : kActivationTypes) {
    check_prepared({9, 2, 8, 8, 40}, dtype);
    check_prepared({3, 5, 3, 2, 7, 3}, dtype);
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
  expect_close_though_late(x.q, poisoned(x.q.shape(), DType::kBFloat16), run, {x.q_latent, x.q});
}

// A GPU cannot throw. It stores nothing for such a token, and computes the others.
TEST_F(MlaDecodeCuda, ATokenOutsideTheCacheIsLeftOut) {
  for (const std::int32_t slot : {-1, 4}) {
    SCOPED_TRACE(slot);
    const Prepared x = make({3, 16, 128, 64, 512}, DType::kBFloat16);
    auto *slots = x.slots.data<std::int32_t>(), *positions = x.positions.data<std::int32_t>();
    slots[1] = slot;
    const Tensor before = poisoned(x.cache.shape(), DType::kBFloat16);
    std::memcpy(before.raw(), x.cache.raw(), x.cache.num_bytes());
    const MlaDecodeDims dims{
        .num_heads = 16, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .dim_v = 8, .scale = 0.07f};
    const Tensor o = random({3, 16 * 8}, DType::kBFloat16);
    run_on_gpu(
        [&](const Side& side) {
          prepare(side, x);
          mla_decode(side.op, dims,
                     {side(x.q), side(x.q_latent), side(x.wkv_b), side(x.cache), side(x.slots), side(x.positions)},
                     side(o));
        },
        {x.cache, o});
    for (std::int32_t s = 0; s < x.cache.dim(0); ++s) {
      for (std::int32_t p = 0; p < kPositions; ++p) {
        const Tensor row = x.cache[s].rows(p, p + 1), old = before[s].rows(p, p + 1);
        const bool is_new = (s == slots[0] && p == positions[0]) || (s == slots[2] && p == positions[2]);
        EXPECT_EQ(std::memcmp(row.raw(), old.raw(), row.num_bytes()) != 0, is_new) << s << " " << p;
      }
    }
    for (std::int64_t t = 0; t < 3; ++t) {
      const Doubles numbers = doubles(o.rows(t, t + 1));
      EXPECT_EQ(std::ranges::count_if(numbers, [](double number) { return std::isnan(number); }),
                t == 1 ? o.dim(1) : 0);
    }
  }
}

// Warps or blocks take the positions in turn. One may have none, only NaN, or NaN before or after numbers.
TEST_F(MlaDecodeCuda, ANanInTheCacheIsInTheOutput) {
  const MlaDecodeDims plain{.num_heads = 2, .dim_nope = 8, .dim_rope = 8, .dim_latent = 40, .dim_v = 8, .scale = 0.2f};
  const MlaDecodeDims tiles{
      .num_heads = 2, .dim_nope = 8, .dim_rope = 64, .dim_latent = 256, .dim_v = 24, .scale = 0.2f};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const MlaDecodeDims& dims : {plain, tiles}) {
      check_nan(dims, 150, 0, 1, dtype);
      check_nan(dims, 150, 20, 21, dtype);
      check_nan(dims, 150, 100, 101, dtype);
      check_nan(dims, 150, 64, 96, dtype);  // all that a block has
      check_nan(dims, 150, 0, 150, dtype);
    }
  }
  check_nan(tiles, 2100, 2090, 2091, DType::kBFloat16);  // in a block's third tile
}

}  // namespace
}  // namespace tessera
