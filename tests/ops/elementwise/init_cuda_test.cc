#include "ops/elementwise/init.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

using InitialCuda = ParityTest;

// Logarithms and cosines may differ in the last bit of a float64. Rounding to float32 seldom shows that.
TEST_F(InitialCuda, IsTheCpus) {
  const Tensor x = poisoned({100003}, DType::kFloat32);
  for (const InitPattern& pattern :
       {InitPattern{.first = {.std = 0.02f, .bound = 2.0f}, .second = {.std = 0.5f}, .run = 64},
        InitPattern{.first = {.std = 1.0f, .bound = 0.7f}, .second = {}, .run = 100000}}) {
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{6} << 32}) {
      expect_close([&](const Side& s) { draw_initial(s.op, Philox(3, 4), pattern, begin, s(x)); }, {x}, 1e-7);
    }
  }
}

}  // namespace
}  // namespace tessera
