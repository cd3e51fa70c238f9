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
