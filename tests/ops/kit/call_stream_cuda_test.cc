#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/kit/call_stream.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

using CallStreamCuda = ParityTest;

// Each part takes so long that the others would run ahead if they did not wait.
TEST_F(CallStreamCuda, ComesBehindWhatWasBeforeAndBeforeWhatFollows) {
  const Shape shape{2048, 2048};
  const Tensor x = random(shape, DType::kBFloat16), w = random(shape, DType::kBFloat16);
  const Tensor before = poisoned(shape, DType::kBFloat16), aside = poisoned(shape, DType::kBFloat16),
               meanwhile = poisoned(shape, DType::kBFloat16), after = poisoned(shape, DType::kBFloat16);
  expect_same(
      [&](const Side& side) {
        const Tensor xs = side(x), ws = side(w), befores = side(before), asides = side(aside),
                     meanwhiles = side(meanwhile), afters = side(after);
        as_graph(side, {before, aside, meanwhile, after}, [&] {
          for (int i = 0; i < 20; ++i) copy(side.op, i % 2 == 0 ? ws : xs, befores);
          CallStream stream(side.op, 24);
          for (int i = 0; i < 20; ++i) add(stream.beside(), befores, i % 2 == 0 ? xs : ws, asides);
          const Context& call = stream.begin();
          for (int i = 0; i < 5; ++i) add(call, befores, befores, meanwhiles);
          stream.join();
          add(side.op, asides, meanwhiles, afters);
        });
      },
      {before, aside, meanwhile, after});
}

// A call that goes on with the one before follows it and what ran beside it, while the main stream does other work.
TEST_F(CallStreamCuda, GoesOnWithTheCallBefore) {
  const Shape shape{2048, 2048};
  const Tensor x = random(shape, DType::kBFloat16), w = random(shape, DType::kBFloat16);
  const Tensor called = poisoned(shape, DType::kBFloat16), aside = poisoned(shape, DType::kBFloat16),
               meanwhile = poisoned(shape, DType::kBFloat16), sum = poisoned(shape, DType::kBFloat16),
               after = poisoned(shape, DType::kBFloat16);
  expect_same(
      [&](const Side& side) {
        const Tensor xs = side(x), ws = side(w), calleds = side(called), asides = side(aside),
                     meanwhiles = side(meanwhile), sums = side(sum), afters = side(after);
        as_graph(side, {called, aside, meanwhile, sum, after}, [&] {
          CallStream first(side.op, 24);
          for (int i = 0; i < 20; ++i) add(first.beside(), xs, i % 2 == 0 ? xs : ws, asides);
          const Context& call = first.begin();
          for (int i = 0; i < 5; ++i) add(call, ws, i % 2 == 0 ? xs : ws, calleds);
          first.join();
          for (int i = 0; i < 20; ++i) copy(side.op, i % 2 == 0 ? ws : xs, meanwhiles);
          CallStream second(side.op);
          add(second.begin(/*goes_on=*/true), calleds, asides, sums);
          second.join();
          add(side.op, sums, meanwhiles, afters);
        });
      },
      {called, aside, meanwhile, sum, after});
}

// The products run on fewer SMs, and with separate scratch.
TEST_F(CallStreamCuda, ProductsAreTheSame) {
  constexpr std::int64_t kRows = 2000, kDim = 512;
  const Tensor x = random({kRows, kDim}, DType::kBFloat16), w = random({kDim, kDim}, DType::kBFloat16);
  const Tensor aside = poisoned({kRows, kDim}, DType::kBFloat16), meanwhile = poisoned({kRows, kDim}, DType::kBFloat16);
  expect_close(
      [&](const Side& side) {
        const Tensor xs = side(x), ws = side(w), asides = side(aside), meanwhiles = side(meanwhile);
        CallStream stream(side.op, 24);
        for (int i = 0; i < 3; ++i) linear_forward(stream.beside(), xs, ws, asides);
        const Context& call = stream.begin();
        for (int i = 0; i < 3; ++i) linear_forward(call, xs, ws, meanwhiles);
        stream.join();
      },
      {aside, meanwhile});
}

}  // namespace
}  // namespace tessera
