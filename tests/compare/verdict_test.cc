// Tests the verdict on planted differences.
#include "compare/verdict.h"

#include <gmock/gmock.h>

#include <limits>

#include "compare/statistics.h"
#include "tests/compare/support.h"

namespace tessera {
namespace {

using compare_test::Noise;
using compare_test::plant;
using compare_test::Planted;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = Verdict::Kind;

Verdict judge(const Planted& planted, double margin = kDefaultMargin) {
  return judge(planted.steps, planted.pairs, margin, planted.length);
}

TEST(Verdict, IdenticalRunsAreEquivalentWithAnyNumberOfSeeds) {
  for (const std::int64_t seeds : {1, 2, 3}) {
    const Verdict verdict = judge(plant(seeds, 300, [](double loss, auto, auto) { return loss; }));
    EXPECT_EQ(verdict.kind, Kind::kEquivalent);
    EXPECT_TRUE(verdict.identical);
    EXPECT_EQ(verdict.text, "equivalent: the same losses at every step");
  }
}

TEST(Verdict, OneOtherBitIsNotIdentical) {
  Planted planted = plant(1, 300, [](double loss, auto, auto) { return loss; });
  planted.pairs[0].candidate[7] = std::nextafter(planted.pairs[0].candidate[7], 0.0);
  const Verdict verdict = judge(planted);
  EXPECT_EQ(verdict.kind, Kind::kNotEnoughEvidence);
  EXPECT_THAT(verdict.text, StartsWith("not enough evidence: 2 more seeds (difference "));
}

/// Makes 200 comparisons with independent noise of 1 % on every loss. Nearly all must be equivalent. The test for
/// growth may err in 1 % of the cases. Nothing else may call such a run worse or better.
TEST(Verdict, NoiseOfOnePercentIsEquivalent) {
  int equivalent = 0, growing = 0;
  constexpr int kComparisons = 200;
  for (int i = 0; i < kComparisons; ++i) {
    const Noise noise(1000 + static_cast<std::uint64_t>(i));
    const Verdict verdict = judge(plant(
        4, 2000, [&](double loss, auto seed, auto step) { return loss * (1.0 + 0.01 * noise(seed, step)); },
        static_cast<std::uint64_t>(i)));
    equivalent += verdict.kind == Kind::kEquivalent ? 1 : 0;
    growing += verdict.growing ? 1 : 0;
    EXPECT_TRUE(verdict.growing || (verdict.kind != Kind::kWorse && verdict.kind != Kind::kBetter)) << verdict.text;
  }
  EXPECT_GE(equivalent, kComparisons * 95 / 100);
  EXPECT_LE(growing, kComparisons / 100);
}

constexpr int kRepetitions = 2000;

/// Returns differences of `count` seeds whose true difference is the margin. There the verdict errs as often as it ever
/// does.
std::vector<double> differences_at_margin(const Noise& noise, std::int64_t count, int repetition) {
  std::vector<double> differences;
  for (std::int64_t k = 0; k < count; ++k) {
    differences.push_back(kDefaultMargin * (1.0 + 0.2 * noise(k, repetition)));
  }
  return differences;
}

Kind decide_on(const std::vector<double>& differences) {
  return decide(mean(differences), standard_deviation(differences), std::ssize(differences), kDefaultMargin);
}

/// The promise of the test: if the true difference is the margin, the verdict is "equivalent" in at most 5 % of the
/// cases, and "worse" in at most 5 %.
TEST(Verdict, FalseVerdictsAreRare) {
  for (const std::int64_t count : {3, 5, 10}) {
    const Noise noise(static_cast<std::uint64_t>(count));
    int equivalent = 0, worse = 0;
    for (int i = 0; i < kRepetitions; ++i) {
      const Kind kind = decide_on(differences_at_margin(noise, count, i));
      equivalent += kind == Kind::kEquivalent ? 1 : 0;
      worse += kind == Kind::kWorse ? 1 : 0;
    }
    EXPECT_NEAR(equivalent, 0.05 * kRepetitions, 35) << count;  // 3.6 deviations of the count
    EXPECT_NEAR(worse, 0.05 * kRepetitions, 35) << count;
  }
}

/// docs/compare.md says what adding seeds after a look does. Who adds as many as the verdict asks for, once, raises the
/// error from 5 % to about 10 %.
TEST(Verdict, AddingSeedsAfterALookErrsMoreOften) {
  const Noise noise(7);
  int equivalent = 0;
  for (int i = 0; i < kRepetitions; ++i) {
    std::vector<double> differences = differences_at_margin(noise, 3, i);
    if (decide_on(differences) == Kind::kNotEnoughEvidence) {
      const std::int64_t more =
          seeds_to_add(mean(differences), standard_deviation(differences), std::ssize(differences), kDefaultMargin);
      if (more > kMaxMoreSeeds) continue;
      differences = differences_at_margin(noise, 3 + more, i);  // the first three are the same as before
    }
    equivalent += decide_on(differences) == Kind::kEquivalent ? 1 : 0;
  }
  EXPECT_NEAR(equivalent, 0.10 * kRepetitions, 40);
}

TEST(Verdict, ARunThatDivergesSlowlyIsWorse) {
  const Noise noise(3);
  // In the last tenth of the steps the loss is 3 % higher on average.
  const auto slow = [&](double loss, std::int64_t seed, std::int64_t step) {
    const double part = static_cast<double>(step) / 1000.0;
    return loss * (1.0 + 0.035 * part * part * part + 0.005 * noise(seed, step));
  };
  const Verdict verdict = judge(plant(3, 1000, slow));
  EXPECT_EQ(verdict.kind, Kind::kWorse);
  EXPECT_FALSE(verdict.growing);
  EXPECT_NEAR(verdict.difference, 0.035 * 0.86, 0.002);
  EXPECT_THAT(verdict.text, AllOf(StartsWith("worse by 3."), HasSubstr("margin 0.25 %")));
}

TEST(Verdict, ADivergenceWithinTheMarginIsNotEquivalent) {
  const Noise noise(4);
  const auto slower = [&](double loss, std::int64_t seed, std::int64_t step) {
    return loss * (1.0 + 0.0018 * static_cast<double>(step) / 1000.0 + 0.0005 * noise(seed, step));
  };
  const Verdict verdict = judge(plant(4, 1000, slower));
  EXPECT_LT(verdict.difference + verdict.half_width, kDefaultMargin);
  EXPECT_EQ(verdict.kind, Kind::kWorse);
  EXPECT_TRUE(verdict.growing);
  EXPECT_THAT(verdict.text, HasSubstr("and growing: at this rate"));
  EXPECT_NEAR(verdict.growth_rate, 0.0018, 0.0005);
  // The same distance without growth does no harm.
  const auto constant = [&](double loss, std::int64_t seed, std::int64_t step) {
    return loss * (1.0 + 0.0018 * 0.95 + 0.0005 * noise(seed, step));
  };
  EXPECT_EQ(judge(plant(4, 1000, constant)).kind, Kind::kEquivalent);
}

TEST(Verdict, LossesThatAreNotFinite) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL}) {
    for (const std::int64_t at : {1, 150, 300}) {
      Planted planted = plant(3, 300, [&](double loss, std::int64_t seed, std::int64_t step) {
        return seed == 2 && step == at ? bad : loss;
      });
      const Verdict verdict = judge(planted);
      EXPECT_EQ(verdict.kind, Kind::kWorse);
      EXPECT_EQ(verdict.text, fmt::format("worse: the loss is not finite at step {} (seed 2)", at));
      for (LossPair& pair : planted.pairs) std::swap(pair.baseline, pair.candidate);
      expect_error([&] { judge(planted); }, {"baseline", "not finite", "seed 2", fmt::format("step {}", at)});
      // The verdict refuses such losses even if both sides have them.
      for (LossPair& pair : planted.pairs) pair.candidate = pair.baseline;
      expect_error([&] { judge(planted); }, {"not finite"});
    }
  }
}

TEST(Verdict, ABaselineWhoseLossIsNotAboveZeroAtTheEndIsRefused) {
  for (const double last : {0.0, -1.0}) {
    Planted planted = plant(3, 300, [](double loss, std::int64_t, std::int64_t) { return loss; });
    for (LossPair& pair : planted.pairs) std::fill(pair.baseline.end() - 30, pair.baseline.end(), last);
    expect_error([&] { judge(planted); }, {"baseline", "at the end", "above 0"});
  }
}

TEST(Verdict, WorseAndBetterAreMirrored) {
  const Noise noise(5);
  for (const double sign : {1.0, -1.0}) {
    const Verdict verdict = judge(plant(3, 500, [&](double loss, std::int64_t seed, std::int64_t) {
      return loss * (1.0 + sign * (0.01 + 0.001 * noise(seed, 0)));
    }));
    EXPECT_EQ(verdict.kind, sign > 0 ? Kind::kWorse : Kind::kBetter);
    EXPECT_NEAR(verdict.difference, sign * 0.01, 0.001);
    EXPECT_THAT(verdict.text, StartsWith(sign > 0 ? "worse by 1." : "better by 1."));
  }
}

TEST(Verdict, ATooSmallSample) {
  const Noise noise(6);
  const auto candidate = [&](double loss, std::int64_t seed, std::int64_t) {
    return loss * (1.0 + 0.0005 * noise(seed, 0));
  };
  EXPECT_THAT(judge(plant(1, 300, candidate)).text, StartsWith("not enough evidence: 2 more seeds"));
  const Verdict two = judge(plant(2, 300, candidate));
  EXPECT_EQ(two.kind, Kind::kNotEnoughEvidence);
  EXPECT_GE(two.more_seeds, 1);
  EXPECT_EQ(judge(plant(6, 300, candidate)).kind, Kind::kEquivalent);
}

/// For every sample, the number of further seeds decides, and no smaller number does.
TEST(Verdict, TheNumberOfSeedsToAddIsTheSmallestThatDecides) {
  int asked = 0;
  for (const double mean : {0.0, 0.0008, 0.002, 0.0025, 0.004, -0.003, -0.0012}) {
    for (const double deviation : {0.0005, 0.002, 0.004}) {
      for (const std::int64_t count : {2, 3, 5, 8}) {
        if (decide(mean, deviation, count, kDefaultMargin) != Kind::kNotEnoughEvidence) continue;
        ++asked;
        const std::int64_t more = seeds_to_add(mean, deviation, count, kDefaultMargin);
        ASSERT_GE(more, 1);
        for (std::int64_t k = 1; k < std::min(more, kMaxMoreSeeds + 1); ++k) {
          EXPECT_EQ(decide(mean, deviation, count + k, kDefaultMargin), Kind::kNotEnoughEvidence);
        }
        if (more > kMaxMoreSeeds) continue;
        const Kind kind = decide(mean, deviation, count + more, kDefaultMargin);
        EXPECT_EQ(kind, std::abs(mean) < kDefaultMargin ? Kind::kEquivalent : mean > 0 ? Kind::kWorse : Kind::kBetter);
      }
    }
  }
  EXPECT_GT(asked, 20);
}

/// The same holds for losses. The noise between seeds is so large that three seeds do not decide. As many more as the
/// verdict asks for do decide, with the same mean and scatter.
TEST(Verdict, AsManySeedsAsItAsksForDecide) {
  const auto comparison = [](std::int64_t copies) {
    return plant(3 * copies, 400, [](double loss, std::int64_t seed, std::int64_t) {
      return loss * (1.0 + 0.0003 + 0.0035 * static_cast<double>(seed % 3 - 1));
    });
  };
  const Verdict verdict = judge(comparison(1));
  ASSERT_EQ(verdict.kind, Kind::kNotEnoughEvidence);
  ASSERT_GT(verdict.more_seeds, 3);
  ASSERT_LE(verdict.more_seeds, kMaxMoreSeeds);
  EXPECT_THAT(verdict.text, HasSubstr(fmt::format("{} more seeds", verdict.more_seeds)));
  const double deviation = standard_deviation(verdict.differences);
  EXPECT_EQ(decide(verdict.difference, deviation, 3 + verdict.more_seeds, kDefaultMargin), Kind::kEquivalent);
  EXPECT_EQ(decide(verdict.difference, deviation, 2 + verdict.more_seeds, kDefaultMargin), Kind::kNotEnoughEvidence);
  EXPECT_EQ(judge(comparison(2 + verdict.more_seeds / 3)).kind, Kind::kEquivalent);
}

TEST(Verdict, MoreSeedsThanAnyoneTrains) {
  const Verdict verdict = judge(plant(3, 300, [](double loss, std::int64_t seed, std::int64_t) {
    return loss * (1.0 + 0.3 * static_cast<double>(seed - 2));
  }));
  EXPECT_THAT(verdict.text, StartsWith("not enough evidence: more than 100 more seeds"));
}

TEST(Verdict, AMarginThatCannotBe) {
  const Planted planted = plant(3, 30, [](double loss, auto, auto) { return loss; });
  for (const double margin : {0.0, -0.1, HUGE_VAL, std::numeric_limits<double>::quiet_NaN()}) {
    expect_error([&] { judge(planted, margin); }, {"margin"});
  }
}

TEST(Verdict, RunsThatLoggedOtherStepsAreNotIdentical) {
  Planted planted = plant(3, 300, [](double loss, auto, auto) { return loss; });
  planted.pairs[1].same_lines = false;
  const Verdict verdict = judge(planted);
  EXPECT_FALSE(verdict.identical);
  EXPECT_EQ(verdict.kind, Kind::kEquivalent);
  EXPECT_THAT(verdict.text, StartsWith("equivalent (difference"));
}

/// A run may break down at a step that the other run did not log.
TEST(Verdict, ABreakThatTheCommonStepsDoNotShow) {
  Planted planted = plant(3, 300, [](double loss, auto, auto) { return loss; });
  planted.pairs[1].broken = Break{7, "gradient norm"};
  const Verdict verdict = judge(planted);
  EXPECT_EQ(verdict.kind, Kind::kWorse);
  EXPECT_TRUE(verdict.broken);
  EXPECT_EQ(verdict.text, "worse: the gradient norm is not finite at step 7 (seed 2)");
}

/// The interval is 0.06 % to 0.74 %: certainly above 0, but perhaps within the margin. More seeds decide.
TEST(Verdict, WorseIsCertainlyBeyondTheMargin) {
  for (const double sign : {1.0, -1.0}) {
    const double difference = sign * 0.004, deviation = 0.002;
    EXPECT_EQ(decide(difference, deviation, 3, kDefaultMargin), Kind::kNotEnoughEvidence);
    const std::int64_t more = seeds_to_add(difference, deviation, 3, kDefaultMargin);
    EXPECT_GT(more, 1);
    EXPECT_EQ(decide(difference, deviation, 3 + more, kDefaultMargin), sign > 0 ? Kind::kWorse : Kind::kBetter);
  }
}

/// Returns the verdict on 4 seeds whose gap opens after the middle of the run. The seeds' gaps are their mean times 1
/// plus or minus `scatter`, so the mean is sqrt(3) / scatter standard errors.
Verdict verdict_on_opening_gap(double scatter) {
  Planted planted = plant(4, 1000, [](double loss, auto, auto) { return loss; });
  for (LossPair& pair : planted.pairs) {
    const double gap = 0.0012 * (1.0 + (pair.seed % 2 == 0 ? scatter : -scatter));
    for (std::size_t i = 0; i < pair.baseline.size(); ++i) {
      pair.baseline[i] = 4.0 + 4.0 * std::exp(-static_cast<double>(i) / 50.0);
      pair.candidate[i] = pair.baseline[i] + (i > 700 ? 4.0 * gap : 0.0);
    }
  }
  return judge(planted);
}

/// Growth counts if it is certain to 99 %. With 4 seeds this takes 4.541 standard errors or more.
TEST(Verdict, GrowthMustBeCertain) {
  const Verdict certain = verdict_on_opening_gap(std::sqrt(3.0) / 4.7);
  EXPECT_TRUE(certain.growing) << certain.text;
  EXPECT_EQ(certain.kind, Kind::kWorse);
  const Verdict doubtful = verdict_on_opening_gap(std::sqrt(3.0) / 4.4);
  EXPECT_GT(doubtful.difference, doubtful.half_width);  // the gap itself is certain
  EXPECT_GT(doubtful.difference + doubtful.growth_rate, kDefaultMargin);
  EXPECT_FALSE(doubtful.growing) << doubtful.text;
  EXPECT_EQ(doubtful.kind, Kind::kEquivalent);
}

/// Tests each of the three minimums by itself, from just below it.
TEST(Verdict, RunsThatHaveHardlyLearnedAreTooShort) {
  const auto same = [](double loss, auto, auto) { return loss; };
  Planted planted = plant(3, 10, same);
  planted.length = {.tokens = 320, .warmup_steps = 200};
  const Verdict tiny = judge(planted);
  EXPECT_EQ(tiny.kind, Kind::kTooShort);
  EXPECT_STREQ(name_of(tiny.kind), "too short to say");
  EXPECT_THAT(tiny.text, StartsWith("too short to say: 320 tokens (enough: 100000), 0 steps after the warm-up (enough: "
                                    "200)"));
  EXPECT_THAT(tiny.text, HasSubstr("; so far the losses are the same"));
  EXPECT_EQ(tiny.more_seeds, 0);
  EXPECT_EQ(tiny.evidence.tokens, 320);

  planted = plant(3, 300, same);
  planted.length.tokens = 99'999;
  EXPECT_THAT(judge(planted).text, StartsWith("too short to say: 99999 tokens (enough: 100000);"));
  planted.length = {.tokens = 100'000, .warmup_steps = 151};
  EXPECT_THAT(judge(planted).text, StartsWith("too short to say: 149 steps after the warm-up (enough: 151);"));
  planted.length.warmup_steps = 150;
  EXPECT_EQ(judge(planted).kind, Kind::kEquivalent);
  planted = plant(3, 119, same);
  planted.length.tokens = 100'000;
  EXPECT_THAT(judge(planted).text, StartsWith("too short to say: 99 steps after the warm-up (enough: 100);"));
  planted = plant(3, 120, same);
  EXPECT_EQ(judge(planted).kind, Kind::kEquivalent);
}

/// A candidate that learns a twentieth less must be beyond the margin. If the loss has hardly fallen, it is not.
TEST(Verdict, ALossThatHasNotFallenShowsNoDifference) {
  Planted planted = plant(3, 300, [](double loss, auto, auto) { return loss; });
  const auto fall_by = [&](double nats) {
    for (LossPair& pair : planted.pairs) {
      for (std::size_t i = 0; i < pair.baseline.size(); ++i) {
        pair.baseline[i] = i < 30 ? 4.0 + nats : 4.0;
        pair.candidate[i] = pair.baseline[i] * 1.02;
      }
    }
  };
  fall_by(0.199);
  EXPECT_EQ(judge(planted).text,
            "too short to say: the baseline's loss has fallen by 0.199 nats (enough: a fall of 0.200)");
  fall_by(-1.0);
  EXPECT_THAT(judge(planted).text, HasSubstr("the baseline's loss has risen by 1.000 nats"));
  fall_by(0.201);
  EXPECT_THAT(judge(planted).text, StartsWith("worse by 2.00 %"));
  // A wider margin sees less, and needs a larger fall.
  EXPECT_THAT(judge(planted, 0.005).text, HasSubstr("enough: a fall of 0.400"));
}

TEST(Verdict, ABreakIsWorseHoweverShortTheRuns) {
  Planted planted = plant(3, 10, [](double loss, std::int64_t seed, std::int64_t step) {
    return seed == 2 && step == 4 ? std::numeric_limits<double>::quiet_NaN() : loss;
  });
  planted.length = {.tokens = 320, .warmup_steps = 200};
  EXPECT_EQ(judge(planted).text, "worse: the loss is not finite at step 4 (seed 2)");
}

/// A constant gap becomes a larger part of a loss that falls. It does not grow.
TEST(Verdict, AConstantGapDoesNotGrowWithAFallingLoss) {
  const Noise noise(9);
  Planted planted = plant(4, 1000, [](double loss, auto, auto) { return loss; });
  for (LossPair& pair : planted.pairs) {
    for (std::size_t i = 0; i < pair.baseline.size(); ++i) {
      pair.baseline[i] = 8.0 - 0.004 * static_cast<double>(i);
      pair.candidate[i] = pair.baseline[i] + 0.008 + 1e-4 * noise(pair.seed, static_cast<std::int64_t>(i));
    }
  }
  const Verdict verdict = judge(planted);
  EXPECT_EQ(verdict.kind, Kind::kEquivalent) << verdict.text;
  EXPECT_FALSE(verdict.growing);
  EXPECT_NEAR(verdict.growth_rate, 0.0, 1e-4);
}

/// Tests the reason why no number of seeds within reach decides: the scatter, or a mean near the margin.
TEST(Verdict, TheReasonForManySeeds) {
  const auto verdict_of = [](double difference, double scatter) {
    return judge(plant(3, 300, [&](double loss, std::int64_t seed, std::int64_t) {
      return loss * (1.0 + difference + scatter * static_cast<double>(seed - 2));
    }));
  };
  const Verdict near = verdict_of(kDefaultMargin * 1.01, 0.0005), scattered = verdict_of(0.0, 0.3);
  EXPECT_GT(near.more_seeds, kMaxMoreSeeds);
  EXPECT_TRUE(near.near_margin);
  EXPECT_GT(scattered.more_seeds, kMaxMoreSeeds);
  EXPECT_FALSE(scattered.near_margin);
}

}  // namespace
}  // namespace tessera
