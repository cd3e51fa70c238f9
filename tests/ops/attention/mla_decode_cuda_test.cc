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
};

TEST_F(MlaDecodeCuda, StoreAndDecode) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check({.num_heads = 2, .dim_nope = 3, .dim_rope = 2, .dim_latent = 5, .scale = 0.4f}, 1, dtype);
    check({.num_heads = 3, .dim_nope = 8, .dim_rope = 8, .dim_latent = 40, .scale = 0.2f}, 37, dtype);
    check({.num_heads = 16, .dim_nope = 128, .dim_rope = 64, .dim_latent = 512, .scale = 0.07f}, 300, dtype);
  }
}

}  // namespace
}  // namespace tessera
