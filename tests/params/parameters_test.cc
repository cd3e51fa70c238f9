#include "params/parameters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/comm/ranks.h"

namespace tessera {
namespace {

struct Moments {
  double mean = 0.0, deviation = 0.0, largest = 0.0;
};

Moments moments(const float* x, std::int64_t count) {
  Moments m;
  for (std::int64_t i = 0; i < count; ++i) {
    m.mean += x[i] / static_cast<double>(count);
    m.largest = std::max(m.largest, std::abs(static_cast<double>(x[i])));
  }
  for (std::int64_t i = 0; i < count; ++i) m.deviation += std::pow(x[i] - m.mean, 2) / static_cast<double>(count);
  m.deviation = std::sqrt(m.deviation);
  return m;
}

// With 40,000 draws the deviation's own error is about 1 / sqrt(2 · 40,000) = 0.4 %. The bounds are five times that.
TEST(Parameters, DistributionsAndBounds) {
  Parameters parameters;
  const ParamId normal = parameters.add({"normal", {200, 200}, {.std = 1.0f}});
  const ParamId cut = parameters.add({"cut", {200, 200}, {.std = 0.5f, .bound = 0.5f}});
  const ParamId halves =
      parameters.add({"halves", {4, 200, 100}, {.std = 0.02f, .bound = 2.0f}, Init{.std = 0.1f, .bound = 2.0f}});
  const ParamId ones = parameters.add({"ones", {5}, {}});
  parameters.allocate(DType::kBFloat16);
  parameters.initialise(1);
  EXPECT_NEAR(moments(parameters.master(normal).data<float>(), 40'000).deviation, 1.0, 0.02);
  EXPECT_NEAR(moments(parameters.master(normal).data<float>(), 40'000).mean, 0.0, 0.025);
  const Moments cut_moments = moments(parameters.master(cut).data<float>(), 40'000);
  EXPECT_LE(cut_moments.largest, 0.5);
  // A normal distribution cut at one deviation has 0.5396 of it.
  EXPECT_NEAR(cut_moments.deviation, 0.5 * 0.5396, 0.01);
  for (std::int64_t e = 0; e < 4; ++e) {  // gate rows, then up rows, per expert
    const Tensor expert = parameters.master(halves)[e];
    EXPECT_NEAR(moments(expert.data<float>(), 10'000).deviation, 0.02, 0.001);
    EXPECT_NEAR(moments(expert.data<float>() + 10'000, 10'000).deviation, 0.1, 0.005);
  }
  EXPECT_EQ(parameters.master(ones).data<float>()[4], 1.0f);
  for (std::int64_t i = 0; i < 40'000; ++i) {
    ASSERT_EQ(parameters.weight(normal).data<BFloat16>()[i].bits,
              BFloat16(parameters.master(normal).data<float>()[i]).bits);
  }
}

TEST(Parameters, PlacesOfABufferThatLacksRanges) {
  const LeftOut none, left_out({{4, 8}, {8, 12}, {20, 24}});
  EXPECT_EQ(none.place(7), 7);
  EXPECT_EQ(none.size(), 0);
  EXPECT_EQ(left_out.size(), 12);
  EXPECT_FALSE(none.contains(7));
  for (const std::int64_t flat : {4, 7, 8, 11, 20, 23}) EXPECT_TRUE(left_out.contains(flat)) << flat;
  for (const std::int64_t flat : {0, 3, 12, 19, 24}) EXPECT_FALSE(left_out.contains(flat)) << flat;
  std::vector<std::int64_t> places, others;
  for (const std::int64_t flat : {0, 3, 4, 8, 12, 13, 19, 20, 24, 30}) places.push_back(left_out.place(flat));
  EXPECT_EQ(places, (std::vector<std::int64_t>{0, 3, 4, 4, 4, 5, 11, 12, 12, 18}));
  left_out.for_each_other(30, [&](const LeftOut::Range& range) {
    others.push_back(range.begin);
    others.push_back(range.end);
  });
  EXPECT_EQ(others, (std::vector<std::int64_t>{0, 4, 12, 20, 24, 30}));
}

// Parameters of odd sizes lie between those without a copy. Each copy must have its own master's rounded numbers.
TEST(Parameters, SomeHaveNoCopy) {
  Parameters parameters;
  std::vector<ParamId> ids, without;
  for (int i = 0; i < 7; ++i) {
    ids.push_back(parameters.add({fmt::format("x{}", i), {3, 5 + 11 * i}, {.std = 1.0f}}));
    if (i == 1 || i == 2 || i == 5) without.push_back(ids.back());
  }
  const std::size_t with_all = parameters.num_bytes(DType::kBFloat16);
  parameters.leave_out_copies(without);
  parameters.allocate(DType::kBFloat16);
  EXPECT_LT(parameters.num_bytes(DType::kBFloat16), with_all);
  EXPECT_THROW(parameters.leave_out_copies({}), InternalError);
  const auto expect_copies = [&] {
    for (const ParamId id : ids) {
      if (!parameters.has_copy(id)) continue;
      const Tensor copy = parameters.weight(id), master = parameters.master(id);
      const auto [begin, end] = parameters.flat_range(id);
      EXPECT_EQ(parameters.shadows({begin, end}).raw(), copy.raw());
      for (std::int64_t j = 0; j < master.num_elements(); ++j) {
        ASSERT_EQ(copy.data<BFloat16>()[j].bits, BFloat16(master.data<float>()[j]).bits) << id << " " << j;
      }
    }
  };
  parameters.initialise(1);
  expect_copies();
  const std::vector<float> numbers(15 * 3, 0.25f);
  for (const ParamId id : ids) parameters.set(id, 2, std::span(numbers).first(9));
  for (const ParamId id : ids) EXPECT_EQ(parameters.master(id).data<float>()[10], 0.25f);
  expect_copies();
  for (const ParamId id : ids) parameters.master(id).data<float>()[1] = 3.0f;
  Arena no_scratch(0);
  parameters.refresh_shadows({.arena = &no_scratch});
  expect_copies();
  EXPECT_THROW(parameters.shadows({0, parameters.flat_range(ids.back()).end}), InternalError);
}

TEST(Parameters, NumbersDependOnSeedAndNameOnly) {
  Parameters alone, among;
  const ParamId a = alone.add({"x", {10, 10}, {.std = 1.0f}});
  among.add({"other", {3, 7}, {.std = 1.0f}});
  const ParamId b = among.add({"x", {10, 10}, {.std = 1.0f}});
  const ParamId c = among.add({"y", {10, 10}, {.std = 1.0f}});
  alone.allocate(DType::kFloat32);
  among.allocate(DType::kFloat32);
  alone.initialise(5);
  among.initialise(5);
  const auto same = [](const Tensor& x, const Tensor& y) { return std::memcmp(x.raw(), y.raw(), x.num_bytes()) == 0; };
  EXPECT_TRUE(same(alone.master(a), among.master(b)));
  EXPECT_FALSE(same(among.master(b), among.master(c)));
  const std::vector<float> before(among.master(b).data<float>(), among.master(b).data<float>() + 100);
  among.initialise(6);
  EXPECT_FALSE(std::equal(before.begin(), before.end(), among.master(b).data<float>()));
}

// The first sum of a product replaces the old gradient of its weight. All other gradients start from 0.
TEST(Parameters, GradientsOfProductsAreAssignedFirst) {
  Parameters parameters;
  const ParamId norm = parameters.add({"norm", {5}, {}});
  const ParamId linear =
      parameters.add({.name = "linear", .shape = {3, 7}, .init = {}, .gemm = GemmKind::kLinear, .cut = {}});
  const ParamId gate = parameters.add({"gate", {2, 3}, {}});
  const ParamId grouped =
      parameters.add({.name = "grouped", .shape = {2, 3, 4}, .init = {}, .gemm = GemmKind::kGrouped, .cut = {}});
  parameters.allocate(DType::kFloat32);
  EXPECT_EQ(parameters.gradient_write(linear), Write::kAccumulate) << "before any step";
  for (int step = 0; step < 2; ++step) {
    const Tensor all = parameters.all_gradients();
    std::fill_n(all.data<float>(), all.num_elements(), 3.0f);
    parameters.clear_gradients();
    for (const ParamId id : {norm, gate}) {
      EXPECT_EQ(moments(parameters.gradient(id).data<float>(), parameters.gradient(id).num_elements()).largest, 0.0);
    }
    for (const ParamId id : {linear, grouped}) {
      EXPECT_THROW(parameters.finish_gradients(), InternalError);
      EXPECT_EQ(parameters.gradient_write(id), Write::kAssign);
      EXPECT_EQ(parameters.gradient_write(id), Write::kAccumulate);
    }
    EXPECT_NO_THROW(parameters.finish_gradients());
  }
}

// The same holds for slots, each time that a slot starts new sums: per micro-batch, or per step.
TEST(Parameters, GradientsOfProductsInSlotsAreAssignedFirst) {
  for (const bool keep : {false, true}) {
    comm_test::with_ranks(2, [&](ProcessGroup& world) {
      Parameters parameters(std::make_shared<Mesh>(world, resolve({}, 2)),
                            {.keep_gradients = keep, .weights_at_once = {.layers = 1, .vocabulary = 1, .together = 1}});
      const ParamId norm = parameters.add({"norm", {5}, {}});
      const ParamId linear =
          parameters.add({.name = "linear", .shape = {3, 7}, .init = {}, .gemm = GemmKind::kLinear, .cut = {}});
      const ParamId gate = parameters.add({"gate", {2, 3}, {}});
      parameters.allocate(DType::kFloat32);
      const auto expect_started = [&](Write write) {
        for (const ParamId id : {norm, gate}) {
          EXPECT_EQ(moments(parameters.gradient(id).data<float>(), parameters.gradient(id).num_elements()).largest,
                    0.0);
        }
        EXPECT_EQ(parameters.gradient_write(linear), write);
        EXPECT_EQ(parameters.gradient_write(linear), Write::kAccumulate);
      };
      const auto fill = [&] {
        for (const ParamId id : {norm, linear, gate}) {
          std::fill_n(parameters.gradient(id).data<float>(), parameters.gradient(id).num_elements(), 3.0f);
        }
      };
      parameters.clear_gradients();
      parameters.acquire_gradients(0);
      expect_started(Write::kAssign);
      fill();
      parameters.release_gradients(0);
      // Without an end of the step, the next step starts anew. So does a pass without products.
      for (const bool with_products : {true, false}) {
        parameters.clear_gradients();
        parameters.acquire_gradients(0, with_products);
        expect_started(with_products ? Write::kAssign : Write::kAccumulate);
        if (!with_products) {
          EXPECT_EQ(moments(parameters.gradient(linear).data<float>(), 21).largest, 0.0);
        }
        fill();
        parameters.release_gradients(0);
      }
      parameters.acquire_gradients(0);  // starts the next micro-batch
      if (keep) {
        EXPECT_EQ(parameters.gradient(norm).data<float>()[4], 3.0f);
      } else {
        expect_started(Write::kAssign);
      }
      fill();
      parameters.release_gradients(0);
      parameters.finish_gradients();
      const float sum = keep ? 6.0f : 12.0f;  // the sum over ranks and over two passes
      const Parameters::Range range = parameters.shard_range(linear);
      for (std::int64_t i = 0; i < range.end - range.begin; ++i) {
        EXPECT_EQ(parameters.gradient_shard(linear).data<float>()[i], sum);
      }
      parameters.clear_gradients();
      parameters.acquire_gradients(0);
      const auto end = [&] {
        parameters.release_gradients(0);
        parameters.finish_gradients();
      };
      EXPECT_THROW(end(), InternalError) << "no product";
    });
  }
}

/// Returns a gradient that bfloat16 cannot hold. It depends on the rank and the pass.
float gradient_number(int rank, int pass, std::int64_t i) {
  return std::sin(static_cast<float>(1000 * rank + 100 * pass + i));
}

// Ranks send what a slot has summed, rounded to bfloat16: each micro-batch, or the step. Shards add that up in float32.
TEST(Parameters, GradientsAreSentInBfloat16) {
  constexpr int kRanks = 3, kPasses = 2;
  for (const bool keep : {false, true}) {
    for (const DType reduce : {DType::kFloat32, DType::kBFloat16}) {
      comm_test::with_ranks(kRanks, [&](ProcessGroup& world) {
        Parameters parameters(std::make_shared<Mesh>(world, resolve({}, kRanks)),
                              {.keep_gradients = keep, .reduce = reduce});
        const std::vector<ParamId> ids = {parameters.add({"a", {5}, {}}), parameters.add({"b", {37, 11}, {}})};
        parameters.allocate(DType::kFloat32);
        parameters.clear_gradients();
        for (int pass = 0; pass < kPasses; ++pass) {
          parameters.acquire_gradients(0);
          for (const ParamId id : ids) {
            const Tensor gradient = parameters.gradient(id);
            for (std::int64_t i = 0; i < gradient.num_elements(); ++i) {
              gradient.data<float>()[i] += gradient_number(world.rank(), pass, i);
            }
          }
          parameters.release_gradients(0);
        }
        parameters.finish_gradients();
        const auto as_sent = [&](float x) { return reduce == DType::kBFloat16 ? static_cast<float>(BFloat16(x)) : x; };
        const auto expected = [&](std::int64_t i) {
          float shard = 0.0f;
          for (int sum = 0; sum < (keep ? 1 : kPasses); ++sum) {
            float of_ranks = 0.0f;
            for (int rank = 0; rank < kRanks; ++rank) {
              const float of_pass = gradient_number(rank, sum, i);
              of_ranks += as_sent(keep ? of_pass + gradient_number(rank, 1, i) : of_pass);
            }
            shard += of_ranks;
          }
          return shard;
        };
        for (const ParamId id : ids) {
          const Parameters::Range range = parameters.shard_range(id);
          for (std::int64_t i = range.begin; i < range.end; ++i) {
            ASSERT_EQ(parameters.gradient_shard(id).data<float>()[i - range.begin], expected(i)) << i;
          }
        }
      });
    }
  }
}

TEST(Parameters, NamesAreUniqueAndViewsAligned) {
  Parameters parameters;
  parameters.add({"a", {3}, {}});
  EXPECT_THROW(parameters.add({"a", {4}, {}}), InternalError);
  const ParamId b = parameters.add({"b", {5, 2}, {}});
  EXPECT_EQ(parameters.num_bytes(DType::kBFloat16), 64u * 18u);  // each is rounded up to 32 numbers of 4·4 + 2 bytes
  Parameters with_small_moments(nullptr, {.optimizer = adamw_tensors(DType::kBFloat16)});
  with_small_moments.add({"a", {3}, {}});
  with_small_moments.add({"b", {5, 2}, {}});
  EXPECT_EQ(with_small_moments.num_bytes(DType::kBFloat16), 64u * 14u);
  parameters.allocate(DType::kBFloat16);
  for (const Tensor& tensor : {parameters.master(b), parameters.weight(b), parameters.gradient(b)}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.raw()) % kAlignment, 0u);
  }
}

}  // namespace
}  // namespace tessera
