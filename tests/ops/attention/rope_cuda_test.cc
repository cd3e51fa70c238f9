#include "ops/attention/rope.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

using RopeCuda = ParityTest;

TEST_F(RopeCuda, BothDirections) {
  struct Case {
    std::int64_t num_heads, head_dim, rope_dim;
  };
  // The cases are the model's queries and shared key, pairs that are not in lanes, and heads that do not start in
  // lanes.
  for (const Case& c : {Case{16, 192, 64}, {1, 64, 64}, {3, 10, 6}, {2, 20, 8}, {1, 2, 2}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const std::int64_t gap : {0, 8, 3}) {
        for (const RopeDirection direction : {RopeDirection::kForward, RopeDirection::kBackward}) {
          const ArenaScope scope(arena_);
          const std::int64_t width = c.num_heads * c.head_dim, half = c.rope_dim / 2;
          Tensor x = random({133, width + gap}, dtype), y = poisoned({133, width + gap}, dtype);
          if (gap > 0) x = x.columns(gap, width + gap), y = y.columns(0, width);
          std::vector<std::int32_t> positions;
          for (std::int32_t t = 0; t < 133; ++t) positions.push_back(t * 7 % 100);
          const Tensor positions_T = ints(positions), cos = random({100, half}), sin = random({100, half});
          const auto run = [&](const Side& side, const Tensor& to) {
            rope(side.op, side(x), c.num_heads, c.rope_dim, side(positions_T), side(cos), side(sin), direction, to);
          };
          if (c.head_dim == c.rope_dim) expect_close([&](const Side& side) { run(side, side(y)); }, {y});
          expect_close([&](const Side& side) { run(side, side(x)); }, {x});
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
