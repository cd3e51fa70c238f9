#include "ops/loss/cross_entropy.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/parity.h"
#include "tests/ops/quantize/quantize_inputs.h"

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
    for (const DType from : kActivationTypes) {
      for (const DType to : kActivationTypes) {
        const ArenaScope scope(arena_);
        const Tensor logits = random({tokens, vocab}, from, 8.0), of = labels(tokens, vocab);
        const Tensor sums = poisoned({1, tokens, 3}, DType::kFloat32), losses = poisoned({tokens}, DType::kFloat32);
        const Tensor d_logits = poisoned({tokens, vocab}, to);
        expect_close(
            [&](const Side& side) {
              cross_entropy_sums(side.op, side(logits), side(of), 0, side(sums)[0]);
              cross_entropy(side.op, side(sums), side(logits), side(of), 0, 0.5f, side(losses), side(d_logits));
            },
            {sums, losses, d_logits});
      }
    }
  }
}

TEST_F(CrossEntropyCuda, InPlaceAndWithoutGradient) {
  for (const bool in_place : {true, false}) {
    for (const DType dtype : kActivationTypes) {
      const Tensor logits = random({30, 513}, dtype, 50.0), of = labels(30, 513);
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
}

// The quantized gradients are those that quantizing the plain gradient gives. They are written alone, or together with
// the plain gradient, which then replaces the logits. This rank has half of the vocabulary, so some labels belong to
// the other rank. Tiles and lanes divide only some of the sizes.
TEST_F(CrossEntropyCuda, QuantizedGradients) {
  const auto quantized = [&](const Tensor& x, const mx::Format& format) {
    GemmOperand operand;
    operand.rows = poisoned(x.shape(), format);
    operand.columns = poisoned(mx::transposed(x.shape()), format);
    return operand;
  };
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      for (const auto& [tokens, vocab] : {std::pair{50, 77}, {256, 384}, {130, 4104}}) {
        SCOPED_TRACE(fmt::format("{} {} x {} {}", name_of(dtype), tokens, vocab, describe(format)));
        const ArenaScope scope(arena_);
        const Tensor logits = random({tokens, vocab}, dtype, 8.0), of = labels(tokens, 2 * vocab);
        const Tensor in_place = arena_.allocate(logits.shape(), dtype), plain = poisoned(logits.shape(), dtype);
        std::memcpy(in_place.raw(), logits.raw(), logits.num_bytes());
        // The other rank has the same sums as this one.
        const Tensor sums = poisoned({2, tokens, 3}, DType::kFloat32);
        GemmOperand alone = quantized(logits, format), all = quantized(logits, format);
        all.plain = in_place;
        const Tensor losses[] = {poisoned({tokens}, DType::kFloat32), poisoned({tokens}, DType::kFloat32),
                                 poisoned({tokens}, DType::kFloat32)};
        std::vector<Tensor> outputs = {plain, in_place, losses[0], losses[1], losses[2]};
        for (const GemmOperand& x : {alone, all}) {
          outputs.insert(outputs.end(), {x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales});
        }
        run_on_gpu(
            [&](const Side& side) {
              for (std::int64_t rank = 0; rank < 2; ++rank) {
                cross_entropy_sums(side.op, side(logits), side(of), rank * vocab, side(sums)[rank]);
              }
              const auto gradient = [&](const Tensor& from, const Tensor& loss, const GemmOperand& to) {
                cross_entropy(side.op, side(sums), side(from), side(of), vocab, 0.5f, side(loss), side(to));
              };
              gradient(logits, losses[0], plain);
              gradient(logits, losses[1], alone);
              gradient(in_place, losses[2], all);
            },
            outputs);
        EXPECT_EQ(doubles(losses[1]), doubles(losses[0]));
        EXPECT_EQ(doubles(losses[2]), doubles(losses[0]));
        EXPECT_EQ(doubles(in_place), doubles(plain));
        const GemmOperand expected = quantized(logits, format);
        quantize(context(), plain, expected.rows, expected.columns);
        for (const GemmOperand& x : {alone, all}) {
          EXPECT_EQ(doubles(x.rows.elements), doubles(expected.rows.elements));
          EXPECT_EQ(doubles(x.rows.scales), doubles(expected.rows.scales));
          EXPECT_EQ(doubles(x.columns.elements), doubles(expected.columns.elements));
          EXPECT_EQ(doubles(x.columns.scales), doubles(expected.columns.scales));
        }
      }
    }
  }
}

// Two ranks have half of the vocabulary each. Their maxima are far apart.
TEST_F(CrossEntropyCuda, VocabularyOfTwoRanks) {
  constexpr std::int64_t kTokens = 40, kVocab = 96;
  for (const DType dtype : kActivationTypes) {
    const Tensor parts[] = {random({kTokens, kVocab}, dtype, 3.0), random({kTokens, kVocab}, dtype, 20.0)};
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
