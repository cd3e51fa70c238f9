// Compares linear, grouped and MoE layers in low precision with the same layers in high precision. All numbers are
// Gaussian and the same in every run.
//
// Floors. A cast to MXFP8 with kRceil leaves an SQNR of 31.5 dB (tests/mx/block_test.cc). A product of two such
// operands has both errors: 28.5 dB. The floors of the GEMM and of the grouped layer are lower than that, because
// blocks may differ from independent Gaussians. The floors of the MoE layer, with two or three products and SwiGLU in a
// row, are TorchAO's (test/prototype/moe_training/test_training.py). Here they apply to a smaller layer of its kind.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <variant>

#include "device/cuda.h"
#include "ep/backends/local_dispatcher.h"
#include "model/moe.h"
#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

constexpr mx::Format kWide{.along = 128}, kSquare{.along = 32, .across = 32}, kWideSquare{.along = 128, .across = 128};
constexpr mx::Format kFloat{.scale_type = mx::ScaleType::kFloat32, .along = 128};
constexpr mx::Format kFloatSquare{.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128};

struct Recipe {
  const char* name;
  SitePrecision site;
};
constexpr Precision kMx = Precision::kMxfp8, kFp8 = Precision::kFp8Blockwise;
/// Returns a site whose three products have one precision.
SitePrecision in_all_products(Precision precision, const mx::Format& activation = {},
                              const mx::Format& wgrad_input = {}, const mx::Format& weight = {}) {
  return {.fprop = precision,
          .dgrad = precision,
          .wgrad = precision,
          .input = activation,
          .wgrad_input = wgrad_input,
          .gradient = activation,
          .wgrad_gradient = activation,
          .weight = weight};
}
const SitePrecision kHighPrecision;
const SitePrecision kMxfp8 = in_all_products(kMx);
const SitePrecision kWgradHigh{.fprop = kMx, .dgrad = kMx, .wgrad = Precision::kHigh};
const Recipe kRecipes[] = {
    {"mxfp8", kMxfp8},
    {"mxfp8_wgrad_with_hp", kWgradHigh},
    {"mxfp8_32x32", in_all_products(kMx, {}, {}, kSquare)},
    {"mxfp8_128x128", in_all_products(kMx, kWide, kWideSquare, kWideSquare)},
    {"fp8_blockwise", in_all_products(kFp8, kFloat, kFloat, kFloatSquare)},
};

double sqnr_db(const Doubles& actual, const Doubles& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double signal = 0.0, noise = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    signal += expected[i] * expected[i];
    noise += (actual[i] - expected[i]) * (actual[i] - expected[i]);
  }
  return 10.0 * std::log10(signal / noise);
}

void fill_gaussian(const Tensor& tensor, std::string_view stream, double deviation) {
  const Philox random(11, stream_of(stream));
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    const auto value = static_cast<float>(deviation * random.normal(static_cast<std::uint64_t>(i)));
    if (tensor.dtype() == DType::kFloat32) {
      tensor.data<float>()[i] = value;
    } else {
      tensor.data<BFloat16>()[i] = BFloat16(value);
    }
  }
}

/// Parameters with the precisions of their sites, and the context that layers get.
struct Sites {
  ModelConfig config;
  Parameters parameters;
  QuantizedWeights quantized;
  Environment environment{};

  /// Allocates and fills `parameters`, which must be complete. `precision_of(spec)` says what is quantized. Weights are
  /// Gaussian with the deviation `deviation_of(spec)`.
  template <typename PrecisionOf, typename DeviationOf>
  void fill(const Context& op, DType compute, PrecisionOf&& precision_of, DeviationOf&& deviation_of) {
    parameters.allocate(compute);
    PrecisionTable table;
    for (ParamId id = 0; id < parameters.size(); ++id) {
      fill_gaussian(parameters.master(id), parameters.spec(id).name, deviation_of(parameters.spec(id)));
      table.push_back(precision_of(parameters.spec(id)));
    }
    parameters.refresh_shadows(op);
    quantized = QuantizedWeights(op, parameters, table);
    quantized.allocate();
    quantized.refresh(op);
  }
  LayerContext context(const Context& op, const Batch& batch, Recompute recompute = Recompute::kNone) {
    environment.config = &config;
    environment.parameters = &parameters;
    environment.quantized = &quantized;
    return {.model = &environment, .op = op, .batch = &batch, .recompute = recompute, .gradients = &parameters};
  }
};

class LowPrecision : public TypedOperatorTest {
 protected:
  Tensor gaussian(Shape shape, std::string_view stream, double deviation = 1.0) {
    const Tensor tensor = arena_.allocate(shape, dtype());
    fill_gaussian(tensor, stream, deviation);
    return tensor;
  }
};

// Counts the bytes that a GPU's products read, without a GPU. MXFP8 with blocks of 32 is kept as bfloat16 in both
// orientations, with lines filled up to 64 numbers. For wide blocks, and where layers compute in float32, elements and
// scales are kept in both orientations.
TEST(QuantizedWeightsOnGpu, BytesAreThoseOfTheForms) {
  if (!cuda::is_built()) GTEST_SKIP() << "built without CUDA";
  Arena arena(Device::kCuda);
  const Context op{.arena = &arena};
  const auto bytes = [&](DType compute, const mx::Format& format) {
    Parameters parameters;
    parameters.add({"dense", {48, 160}, {}});
    parameters.add({"experts", {3, 32, 64}, {}});
    parameters.allocate_meta(compute);
    SitePrecision site;
    site.fprop = site.dgrad = Precision::kMxfp8;
    site.weight = format;
    return QuantizedWeights(op, parameters, {site, site}).num_bytes();
  };
  const auto aligned = [](std::int64_t size) { return static_cast<std::size_t>((size + 255) / 256 * 256); };
  EXPECT_EQ(bytes(DType::kBFloat16, {}),
            aligned(2 * 48 * 192) + aligned(2 * 160 * 64) + aligned(2 * 3 * 32 * 64) + aligned(2 * 3 * 64 * 64));
  const std::size_t elements = 2 * aligned(48 * 160) + 2 * aligned(3 * 32 * 64);
  const std::size_t scales = aligned(48 * 5) + aligned(160 * 2) + aligned(3 * 32 * 2) + aligned(3 * 64 * 1);
  EXPECT_EQ(bytes(DType::kFloat32, {}), elements + scales);
  EXPECT_EQ(bytes(DType::kBFloat16, {.along = 128, .across = 128}), elements + scales);
}

TEST_P(LowPrecision, FormsAreThoseThatTheGemmsRead) {
  const Batch batch(ModelConfig{}, 1, 1);
  struct NoProbe : SiteProbe {
    void observe(const Context&, ParamId, Role, const Tensor&, const mx::Quantized&, std::int64_t) override {}
  } probe;
  for (const Recipe& recipe : kRecipes) {
    SCOPED_TRACE(recipe.name);
    Sites sites;
    const LinearSite site(sites.parameters, {"w", {64, 32}, {}, {}, GemmKind::kLinear}, Sharding::kReplicated);
    const LinearSite high(sites.parameters, {"high", {64, 32}, {}, {}, GemmKind::kLinear}, Sharding::kReplicated);
    sites.fill(
        context(), dtype(), [&](const ParamSpec& spec) { return spec.name == "w" ? recipe.site : kHighPrecision; },
        [](const ParamSpec&) { return 1.0; });
    const bool wgrad_high = recipe.site.wgrad == Precision::kHigh;
    LayerContext layer = sites.context(context(), batch);
    for (SiteProbe* const observer : {static_cast<SiteProbe*>(nullptr), static_cast<SiteProbe*>(&probe)}) {
      layer.probe = observer;
      const bool probed = observer != nullptr;
      const InputForms x = site.input_forms(layer), both = x | high.input_forms(layer);
      const OperandForms d_y = site.gradient_forms(layer);
      const std::optional<mx::Format> none, of_rows = recipe.site.input, of_d_y_rows = recipe.site.gradient,
                                            of_d_y_columns = wgrad_high ? none : recipe.site.wgrad_gradient,
                                            of_x_columns = wgrad_high ? none : recipe.site.wgrad_input;
      const auto forms = [](const OperandForms& o) { return std::tuple(o.plain, o.rows, o.columns); };
      EXPECT_EQ(forms(x.forward), std::tuple(probed, of_rows, none));
      EXPECT_EQ(forms(x.wgrad), std::tuple(wgrad_high, none, of_x_columns));
      EXPECT_EQ(forms(both.forward), std::tuple(true, of_rows, none));
      EXPECT_EQ(forms(both.wgrad), std::tuple(true, none, of_x_columns));
      EXPECT_EQ(forms(d_y), std::tuple(wgrad_high || probed, of_d_y_rows, of_d_y_columns));
    }
    EXPECT_EQ(high.row_alignment(sites.quantized), 1);
    EXPECT_EQ(site.row_alignment(sites.quantized), wgrad_high ? 1 : recipe.site.wgrad_gradient.along);
  }
}

/// A linear or grouped layer: x [R, N], w [E, M, N]. Rows of zeros follow the rows of each group.
struct Layer {
  std::vector<std::int32_t> counts;  // rows of each expert; one entry means a linear layer
  std::int64_t m, n;
};

struct Sqnr {
  double y, d_x, d_w;
};

class SqnrFloors : public LowPrecision {
 protected:
  /// Measures the three GEMMs against float64 products of the same bfloat16 or float32 numbers.
  Sqnr measure(const Layer& layer, const SitePrecision& precision) {
    const ArenaScope scope(arena_);
    const auto experts = static_cast<std::int64_t>(layer.counts.size());
    const bool grouped = experts > 1;
    Sites sites;
    const auto make = [&]() -> std::variant<LinearSite, GroupedSite> {
      if (grouped) return GroupedSite(sites.parameters, {"w", {experts, layer.m, layer.n}, {}, {}, GemmKind::kGrouped});
      return LinearSite(sites.parameters, {"w", {layer.m, layer.n}, {}, {}, GemmKind::kLinear}, Sharding::kReplicated);
    };
    const std::variant<LinearSite, GroupedSite> w = make();
    const ParamId id = std::visit([](const GemmSite& site) { return site.id(); }, w);
    sites.fill(
        context(), dtype(), [&](const ParamSpec&) { return precision; }, [](const ParamSpec&) { return 0.02; });
    const Batch batch(sites.config, 1, 1);
    const LayerContext context = sites.context(this->context(), batch);
    std::vector<std::int32_t> offsets = {0};
    for (const std::int32_t count : layer.counts) offsets.push_back(offsets.back() + (count + 31) / 32 * 32);
    const Tensor offsets_E1 = ints(offsets);
    const std::int64_t rows = offsets.back();
    const Tensor x = gaussian({rows, layer.n}, "x"), d_y = gaussian({rows, layer.m}, "d_y", 1e-3);
    for (std::size_t e = 0; e < layer.counts.size(); ++e) {
      for (const Tensor& tensor : {x, d_y}) {
        const Tensor padding = tensor.rows(offsets[e] + layer.counts[e], offsets[e + 1]);
        std::memset(padding.raw(), 0, padding.num_bytes());
      }
    }
    const Tensor y = gaussian({rows, layer.m}, "other"), d_x = gaussian({rows, layer.n}, "other");
    const auto operands = [&](const GemmSite& site) {
      const InputForms forms = site.product_forms(context);
      return std::pair(quantized_operand(context, x, forms.forward | forms.wgrad),
                       quantized_operand(context, d_y, site.gradient_forms(context)));
    };
    if (const auto* experts_w = std::get_if<GroupedSite>(&w)) {
      const auto [q_x, q_dy] = operands(*experts_w);
      experts_w->forward(context, q_x, offsets_E1, y);
      experts_w->dgrad(context, q_dy, offsets_E1, d_x);
      experts_w->wgrad(context, q_dy, q_x, offsets_E1);
    } else {
      const auto& linear = std::get<LinearSite>(w);
      const auto [q_x, q_dy] = operands(linear);
      linear.forward(context, q_x, y);
      linear.dgrad(context, q_dy, d_x);
      linear.wgrad(context, q_dy, q_x);
    }

    const Doubles xs = doubles(x), ws = doubles(sites.parameters.weight(id)), d_ys = doubles(d_y);
    const auto m = static_cast<std::size_t>(layer.m), n = static_cast<std::size_t>(layer.n);
    Doubles y_expected(static_cast<std::size_t>(rows) * m, 0.0), d_x_expected(static_cast<std::size_t>(rows) * n, 0.0),
        d_w_expected(ws.size(), 0.0);
    for (std::size_t e = 0; e < layer.counts.size(); ++e) {
      for (auto r = static_cast<std::size_t>(offsets[e]); r < static_cast<std::size_t>(offsets[e + 1]); ++r) {
        for (std::size_t i = 0; i < m; ++i) {
          const double d = d_ys[r * m + i];
          double sum = 0.0;
          for (std::size_t j = 0; j < n; ++j) {
            const std::size_t at = (e * m + i) * n + j;
            sum += xs[r * n + j] * ws[at];
            d_x_expected[r * n + j] += d * ws[at];
            d_w_expected[at] += d * xs[r * n + j];
          }
          y_expected[r * m + i] = sum;
        }
      }
    }
    return {.y = sqnr_db(doubles(y), y_expected),
            .d_x = sqnr_db(doubles(d_x), d_x_expected),
            .d_w = sqnr_db(doubles(sites.parameters.gradient(id)), d_w_expected)};
  }

  static void print(const char* what, const Sqnr& sqnr) {
    std::printf("SQNR, %-34s y %.2f dB  d_x %.2f dB  d_w %.2f dB\n", what, sqnr.y, sqnr.d_x, sqnr.d_w);
  }
};

// A product in MXFP8 has at most 40 dB. One that was not quantized would have 54 or more: relative errors of 2^-24
// (float32) and 2^-9 (bfloat16) are 140 and 54 dB.
constexpr double kMostOfMxfp8 = 40.0;

// Each of the three sums is over 4096 numbers in one of the layers.
TEST_P(SqnrFloors, Gemm) {
  for (const Layer& layer : {Layer{{64}, 64, 4096}, Layer{{64}, 4096, 64}, Layer{{4096}, 64, 64}}) {
    const Sqnr sqnr = measure(layer, kMxfp8);
    print(fmt::format("GEMM {} tokens, {} x {}", layer.counts[0], layer.m, layer.n).c_str(), sqnr);
    for (const double db : {sqnr.y, sqnr.d_x, sqnr.d_w}) {
      EXPECT_GE(db, 28.0);
      EXPECT_LE(db, kMostOfMxfp8);
    }
  }
}

TEST_P(SqnrFloors, GroupedLayer) {
  const std::vector<Layer> layers = {
      {{70, 0, 26, 32}, 64, 4096}, {{70, 0, 26, 32}, 4096, 64}, {{4075, 1, 500}, 64, 64}};
  for (const Layer& layer : layers) {
    const Sqnr sqnr = measure(layer, kMxfp8);
    print(fmt::format("grouped {} tokens, {} x {}", fmt::join(layer.counts, "+"), layer.m, layer.n).c_str(), sqnr);
    EXPECT_GE(sqnr.y, 27.0);
    EXPECT_GE(sqnr.d_x, 25.0);
    EXPECT_GE(sqnr.d_w, 24.0);
    for (const double db : {sqnr.y, sqnr.d_x, sqnr.d_w}) EXPECT_LE(db, kMostOfMxfp8);
  }
}

// Products that are not quantized have only the errors of the compute type.
TEST_P(SqnrFloors, WeightGradientInHighPrecision) {
  for (const Layer& layer : {Layer{{512}, 64, 64}, Layer{{300, 20}, 64, 64}}) {
    const Sqnr sqnr = measure(layer, kWgradHigh);
    EXPECT_LE(sqnr.y, kMostOfMxfp8);
    EXPECT_LE(sqnr.d_x, kMostOfMxfp8);
    EXPECT_GE(sqnr.d_w, 120.0);  // float32 sums of numbers that are exact in both types
  }
}

TESSERA_BOTH_TYPES(LowPrecision);
TESSERA_BOTH_TYPES(SqnrFloors);

/// An MoE layer with its loss.
class MoeLayer : public LowPrecision {
 protected:
  struct Result {
    Doubles out, d_y;
    std::map<std::string, Doubles> gradients;
    std::vector<std::int32_t> counts;
  };
  struct Options {
    SitePrecision experts, shared;
    std::vector<float> bias{};  // added to the experts' scores; empty means 0
    Recompute recompute = Recompute::kNone;
  };

  static ModelConfig small() {
    ModelConfig config;
    config.dim = 64;
    config.moe_inter_dim = 96;
    config.num_experts = 6;
    config.num_shared_experts = 1;
    config.top_k = 2;
    config.score_func = ScoreFunction::kSigmoid;
    return config;
  }

  /// Runs forward and backward. The loss is the mean squared difference of the output from 1.
  Result run(const ModelConfig& config, std::int64_t num_tokens, const Options& options) {
    const ArenaScope scope(arena_);
    poison(arena_);
    Sites sites;
    sites.config = config;
    const Moe moe(sites.parameters, sites.config, "moe.", 0);
    const auto precision_of = [&](const ParamSpec& spec) {
      if (spec.gemm == GemmKind::kGrouped) return options.experts;
      return spec.gemm == GemmKind::kLinear ? options.shared : kHighPrecision;
    };
    // The deviations of TorchAO's layer of 5120 x 8192 are all 0.02. They are scaled to this layer's sizes, so that
    // activations have the same size.
    const auto deviation_of = [&](const ParamSpec& spec) {
      const bool down = spec.name.find("w2") != std::string::npos;
      const std::int64_t inter = down ? config.moe_inter_dim : config.dim;
      return 0.02 * std::sqrt((down ? 8192.0 : 5120.0) / static_cast<double>(inter));
    };
    sites.fill(context(), dtype(), precision_of, deviation_of);
    if (!options.bias.empty()) {
      std::copy(options.bias.begin(), options.bias.end(), sites.parameters.buffer(moe.expert_bias()).data<float>());
    }
    const Batch batch(config, 1, num_tokens);
    DispatchOptions dispatch = dispatch_options(config, dtype(), num_tokens);
    dispatch.max_alignment = moe.row_alignment(sites.quantized);
    ep::LocalDispatcher dispatcher(dispatch);
    LayerContext context = sites.context(this->context(), batch, options.recompute);
    sites.environment.dispatcher = &dispatcher;
    const Shape shape{num_tokens, config.dim};
    const InputForms forms = moe.y_forms(context);
    const GemmOperand y = quantized_operand(context, gaussian(shape, "y"), forms.forward | forms.wgrad);
    const Tensor out = context.allocate(shape), d_y = context.allocate(shape);
    MoeSaved saved;
    moe.allocate_saved(context, num_tokens, saved);
    const Tensor shared = context.allocate(shape);
    moe.forward(context, y, saved, out, shared, {});
    add(context.op, out, shared, out);

    const Doubles result = doubles(out);
    const Tensor d_out = context.allocate(shape);
    for (std::size_t i = 0; i < result.size(); ++i) {
      const auto d = static_cast<float>(2.0 * (result[i] - 1.0) / static_cast<double>(result.size()));
      if (dtype() == DType::kFloat32) {
        d_out.data<float>()[i] = d;
      } else {
        d_out.data<BFloat16>()[i] = BFloat16(d);
      }
    }
    moe.backward(context, y, saved, d_out, d_y);
    std::map<std::string, Doubles> gradients;
    for (ParamId id = 0; id < sites.parameters.size(); ++id) {
      gradients[sites.parameters.spec(id).name] = doubles(sites.parameters.gradient(id));
    }
    const auto* experts_counted = saved.routing.counts_E.data<std::int32_t>();
    return {.out = result,
            .d_y = doubles(d_y),
            .gradients = gradients,
            .counts = {experts_counted, experts_counted + config.num_experts}};
  }
};

// This is the layer of TorchAO's test, an eighth of it in each direction and with 4 of its 8 experts. A token takes one
// routed expert, and a shared one in high precision. The floor of the input's gradient depends on the layer as much as
// on the format. The parts of the shared expert and of the router have no errors of their own, so they lift it above
// the output's floor. The router's part grows with the sizes. With 8 experts of 1024 x 256 the floor is 27.7 dB, in
// exact arithmetic, too.
TEST_P(MoeLayer, SqnrFloors) {
  ModelConfig config = small();
  config.dim = 640;
  config.moe_inter_dim = 1024;
  config.num_experts = 4;
  config.top_k = 1;
  const Result high = run(config, 500, {.experts = kHighPrecision, .shared = kHighPrecision});
  for (const auto& [recipe, floor] : {std::pair(kMxfp8, 21.0), std::pair(kWgradHigh, 22.0)}) {
    const Result low = run(config, 500, {.experts = recipe, .shared = kHighPrecision});
    ASSERT_EQ(low.counts, high.counts);
    const double out = sqnr_db(low.out, high.out), d_y = sqnr_db(low.d_y, high.d_y);
    std::printf("SQNR, MoE layer: output %.2f dB  input's gradient %.2f dB\n", out, d_y);
    EXPECT_GE(out, 23.0);
    EXPECT_LE(out, kMostOfMxfp8);
    EXPECT_GE(d_y, 29.0);
    EXPECT_LE(d_y, kMostOfMxfp8);
    for (const auto& [name, gradient] : low.gradients) {
      const double sqnr = sqnr_db(gradient, high.gradients.at(name));
      std::printf("SQNR, MoE layer: gradient of %s %.2f dB\n", name.c_str(), sqnr);
      EXPECT_GE(sqnr, floor) << name;
    }
  }
}

/// Returns the numbers of expert e from [E, ..].
Doubles part_of(const Doubles& all, std::size_t e, std::size_t experts) {
  const std::size_t size = all.size() / experts;
  return {all.begin() + static_cast<std::ptrdiff_t>(e * size),
          all.begin() + static_cast<std::ptrdiff_t>((e + 1) * size)};
}

// The groups are padded: one has all tokens, some have a few, and some are empty.
TEST_P(MoeLayer, AnyRoutingHasItsGradients) {
  const std::vector<std::vector<float>> biases = {
      {}, {10, 0, 0, 0, -10, -10}, {-10, 10, -10, -10, 10, -10}, {-10, -10, -10, 0, 0, 0}};
  for (std::size_t i = 0; i < biases.size(); ++i) {
    const Result high = run(small(), 75, {.experts = kHighPrecision, .shared = kHighPrecision, .bias = biases[i]});
    const std::vector<std::int32_t>& counts = high.counts;
    EXPECT_TRUE(std::any_of(counts.begin(), counts.end(), [](std::int64_t c) { return c % 32 != 0; }));
    if (i > 0) {
      EXPECT_TRUE(std::count(counts.begin(), counts.end(), 0) >= 2);
      EXPECT_TRUE(i == 3 || std::count(counts.begin(), counts.end(), 75) >= 1);
    }
    for (const Recipe& recipe : kRecipes) {
      SCOPED_TRACE(fmt::format("{} {}", recipe.name, fmt::join(counts, " ")));
      const Result low = run(small(), 75, {.experts = recipe.site, .shared = recipe.site, .bias = biases[i]});
      ASSERT_EQ(low.counts, counts);
      // The output has the errors of three products in a row: 28.5 - 10 log10(3) = 23.7 dB. The weights' gradients have
      // those of four: 22.5 dB. The bounds are lower, since the numbers of an expert with few tokens average less.
      EXPECT_GE(sqnr_db(low.out, high.out), 22.0);
      EXPECT_GE(sqnr_db(low.d_y, high.d_y), 22.0);
      EXPECT_LE(sqnr_db(low.out, high.out), 40.0);
      for (const auto& [name, gradient] : low.gradients) {
        if (name.find(".experts.") == std::string::npos) {
          EXPECT_GE(sqnr_db(gradient, high.gradients.at(name)), 19.0) << name;
          continue;
        }
        for (std::size_t e = 0; e < counts.size(); ++e) {
          const Doubles expert = part_of(gradient, e, counts.size());
          if (counts[e] == 0) {
            EXPECT_EQ(expert, Doubles(expert.size(), 0.0)) << name << " " << e;
          } else {
            EXPECT_GE(sqnr_db(expert, part_of(high.gradients.at(name), e, counts.size())), 19.0) << name << " " << e;
          }
        }
      }
    }
  }
}

// What is gathered again for the backward equals what would have been kept.
TEST_P(MoeLayer, RecomputationChangesNoBit) {
  for (const Recipe& recipe : kRecipes) {
    SCOPED_TRACE(recipe.name);
    const Result kept = run(small(), 75, {.experts = recipe.site, .shared = recipe.site});
    const Result again =
        run(small(), 75, {.experts = recipe.site, .shared = recipe.site, .recompute = Recompute::kSelective});
    EXPECT_EQ(kept.out, again.out);
    EXPECT_EQ(kept.d_y, again.d_y);
    EXPECT_EQ(kept.gradients, again.gradients);
  }
}

// The precision of wgrad, and with it the padding of the groups, must change nothing else.
TEST_P(MoeLayer, HighWeightGradientsChangeNothingElse) {
  const Result low = run(small(), 75, {.experts = kMxfp8, .shared = kMxfp8});
  const Result high = run(small(), 75, {.experts = kWgradHigh, .shared = kWgradHigh});
  EXPECT_EQ(low.out, high.out);
  EXPECT_EQ(low.d_y, high.d_y);
  for (const auto& [name, gradient] : low.gradients) {
    if (name.find("gate") != std::string::npos) {
      EXPECT_EQ(gradient, high.gradients.at(name)) << name;
    } else {
      // The gradients differ by one product of two quantized operands, 28.5 dB.
      EXPECT_GE(sqnr_db(gradient, high.gradients.at(name)), 27.0) << name;
      EXPECT_LE(sqnr_db(gradient, high.gradients.at(name)), 40.0) << name;
    }
  }
}

TESSERA_BOTH_TYPES(MoeLayer);

}  // namespace
}  // namespace tessera
