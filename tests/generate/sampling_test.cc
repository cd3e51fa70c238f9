#include "generate/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, -1.0f, 3.0f, 2.0f};

/// Returns how often each token is drawn.
std::map<std::int32_t, double> frequencies(const SamplingOptions& options, int count = 20000) {
  const Philox random(7, 0);
  std::vector<std::int32_t> order;
  std::map<std::int32_t, double> result;
  for (int i = 0; i < count; ++i) {
    result[sample(kLogits, options, random.uniform(static_cast<std::uint64_t>(i)), order)] += 1.0 / count;
  }
  return result;
}

/// Returns the softmax over `tokens` only.
std::map<std::int32_t, double> softmax(const std::vector<std::int32_t>& tokens, double temperature) {
  std::map<std::int32_t, double> result;
  double total = 0.0;
  for (const std::int32_t token : tokens) {
    total += result[token] = std::exp(static_cast<double>(kLogits[static_cast<std::size_t>(token)]) / temperature);
  }
  for (auto& [token, probability] : result) probability /= total;
  return result;
}

void expect_near(const std::map<std::int32_t, double>& actual, const std::map<std::int32_t, double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [token, probability] : expected) EXPECT_NEAR(actual.at(token), probability, 0.015) << token;
}

TEST(Sampling, FollowsTheSoftmax) {
  expect_near(frequencies({}), softmax({0, 1, 2, 3, 4}, 1.0));
  expect_near(frequencies({.temperature = 3.0}), softmax({0, 1, 2, 3, 4}, 3.0));
}

TEST(Sampling, TopKKeepsTheMostLikely) {
  expect_near(frequencies({.top_k = 3}), softmax({1, 3, 4}, 1.0));
  expect_near(frequencies({.top_k = 2, .top_p = 1.0}), softmax({1, 3}, 1.0));
  expect_near(frequencies({.top_k = 99}), softmax({0, 1, 2, 3, 4}, 1.0));
  const auto only = frequencies({.top_k = 1});
  EXPECT_EQ(only.size(), 1u);
  EXPECT_EQ(only.count(1), 1u);  // the lower token of the tie
}

TEST(Sampling, TopPKeepsTheNucleus) {
  // The probabilities are 0.40, 0.40, 0.15, 0.05 and 0.01.
  expect_near(frequencies({.top_p = 0.5}), softmax({1, 3}, 1.0));
  expect_near(frequencies({.top_p = 0.9}), softmax({1, 3, 4}, 1.0));
  EXPECT_EQ(frequencies({.top_p = 1e-9}).size(), 1u);
  expect_near(frequencies({.top_k = 2, .top_p = 0.99}), softmax({1, 3}, 1.0));
}

TEST(Sampling, TemperatureZeroIsTheArgmax) {
  const auto only = frequencies({.temperature = 0.0});
  EXPECT_EQ(only.size(), 1u);
  EXPECT_EQ(only.count(1), 1u);
  EXPECT_EQ(frequencies({.temperature = 1e-6}).size(), 2u);  // the two tokens of the tie, and nothing overflows
}

TEST(Sampling, DamagedLogitsAreAnError) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = HUGE_VALF;
  std::vector<std::int32_t> order;
  for (const std::vector<float>& logits :
       {std::vector<float>{1.0f, kNan, 2.0f}, {kNan, kNan, kNan}, {1.0f, kInf, 2.0f}, {-kInf, -kInf, -kInf}}) {
    for (const SamplingOptions& options : {SamplingOptions{}, SamplingOptions{.temperature = 0.0},
                                           SamplingOptions{.top_k = 2}, SamplingOptions{.top_p = 0.9}}) {
      EXPECT_THROW(sample(logits, options, 0.5, order), Error);
    }
  }
  EXPECT_EQ(sample(std::vector<float>{-kInf, 0.0f, -kInf}, {.top_p = 0.9}, 1.0 - 1e-12, order), 1);
  EXPECT_EQ(sample(std::vector<float>{-kInf, 0.0f, -kInf}, {}, 1.0 - 1e-12, order), 1);
}

TEST(Sampling, ExtremeDrawsStayInside) {
  std::vector<std::int32_t> order;
  for (const double uniform : {1e-12, 0.5, 1.0 - 1e-12}) {
    const std::int32_t of_all = sample(kLogits, {}, uniform, order);
    EXPECT_TRUE(0 <= of_all && of_all < 5) << of_all;
    const std::int32_t of_two = sample(kLogits, {.top_k = 2}, uniform, order);
    EXPECT_TRUE(of_two == 1 || of_two == 3) << of_two;
    const std::int32_t of_nucleus = sample(kLogits, {.top_p = 0.3}, uniform, order);
    EXPECT_TRUE(of_nucleus == 1 || of_nucleus == 3) << of_nucleus;
  }
}

}  // namespace
}  // namespace tessera
