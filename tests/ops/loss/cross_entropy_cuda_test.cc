#include "ops/loss/cross_entropy.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class CrossEntropyCuda : public ParityTest {
 protected:
  Tensor labels(std::int64_t tokens, std::int64_t vocab) {
    std::vector<std::int32_t> values;
    for (std::int64_t t = 0; t < tokens; ++t) {
      values.push_back(t % 5 == 3 ? kIgnoredLabel : static_cast<std::int32_t>((t * 7919 + vocab - 1) % vocab));
    }
    return ints(values);
  }
};

TEST_F(CrossEntropyCuda, LossesAndGradients) {
  // The vocabularies have one entry, fewer entries than threads, an odd number, and the models' numbers. Some give a
  // thread several vectors and a tail.
  for (const std::int64_t vocab : {1, 77, 2048, 4097, 33'016, 102'400, 129'280}) {
    const std::int64_t tokens = vocab > 10'000 ? 6 : 50;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const ArenaScope scope(arena_);
      const Tensor logits = random({tokens, vocab}, DType::kFloat32, 8.0), of = labels(tokens, vocab);
      const Tensor sums = poisoned({1, tokens, 3}, DType::kFloat32), losses = poisoned({tokens}, DType::kFloat32);
      const Tensor d_logits = poisoned({tokens, vocab}, dtype);
      expect_close(
          [&](const Side& side) {
            cross_entropy_sums(side.op, side(logits), side(of), 0, side(sums)[0]);
            cross_entropy(side.op, side(sums), side(logits), side(of), 0, 0.5f, side(losses), side(d_logits));
          },
          {sums, losses, d_logits});
    }
  }
}

TEST_F(CrossEntropyCuda, InPlaceAndWithoutGradient) {
  for (const bool in_place : {true, false}) {
    const Tensor logits = random({30, 513}, DType::kFloat32, 50.0), of = labels(30, 513);
    const Tensor sums = poisoned({1, 30, 3}, DType::kFloat32), losses = poisoned({30}, DType::kFloat32);
    const Tensor d_logits = in_place ? logits : Tensor();
    const auto run = [&](const Side& side) {
      cross_entropy_sums(side.op, side(logits), side(of), 0, side(sums)[0]);
      cross_entropy(side.op, side(sums), side(logits), side(of), 0, 2.0f, side(losses), side(d_logits));
    };
    if (in_place) {
      expect_close(run, {losses, logits});
    } else {
      expect_close(run, {losses});
    }
  }
}

// Two ranks have half of the vocabulary each. Their maxima are far apart.
TEST_F(CrossEntropyCuda, VocabularyOfTwoRanks) {
  constexpr std::int64_t kTokens = 40, kVocab = 96;
  const Tensor parts[] = {random({kTokens, kVocab}, DType::kFloat32, 3.0),
                          random({kTokens, kVocab}, DType::kFloat32, 20.0)};
  const Tensor of = labels(kTokens, 2 * kVocab), sums = poisoned({2, kTokens, 3}, DType::kFloat32);
  const Tensor losses = poisoned({kTokens}, DType::kFloat32);
  const Tensor d_logits[] = {poisoned({kTokens, kVocab}, DType::kFloat32),
                             poisoned({kTokens, kVocab}, DType::kFloat32)};
  expect_close(
      [&](const Side& side) {
        for (std::int64_t rank = 0; rank < 2; ++rank) {
          cross_entropy_sums(side.op, side(parts[rank]), side(of), rank * kVocab, side(sums)[rank]);
        }
        for (std::int64_t rank = 0; rank < 2; ++rank) {
          cross_entropy(side.op, side(sums), side(parts[rank]), side(of), rank * kVocab, 0.5f, side(losses),
                        side(d_logits[rank]));
        }
      },
      {sums, losses, d_logits[0], d_logits[1]});
}

TEST_F(CrossEntropyCuda, ALabelOutsideOfTheVocabularyIsNaN) {
  const Tensor logits = random({2, 9}), of = ints({9, -1}), sums = poisoned({1, 2, 3}, DType::kFloat32);
  const Tensor losses = random({2});
  expect_same(
      [&](const Side& side) {
        if (side.op.target() == Device::kCpu) {
          for (std::int64_t t = 0; t < 2; ++t) losses.data<float>()[t] = NAN;
          return;
        }
        cross_entropy_sums(side.op, side(logits), side(of), 0, side(sums)[0]);
        cross_entropy(side.op, side(sums), side(logits), side(of), 0, 1.0f, side(losses), {});
      },
      {losses});
}

}  // namespace
}  // namespace tessera
