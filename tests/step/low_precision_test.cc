// Tests the training step in low precision: gradients, recomputation, accumulation, quantized copies of the weights,
// measured errors, and where numbers stop being finite.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "config/resolve_recipes.h"
#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"
#include "run/trainer.h"
#include "tests/data/support.h"
#include "tests/run/run_config.h"
#include "tests/step/forward_backward.h"

namespace tessera {
namespace {

using data::TemporaryFolder;
using ::testing::ElementsAre;

const volatile std::sig_atomic_t kNoSignal = 0;

/// A model with dense, MoE and MTP layers, compressed queries, groups of experts and shared experts. Sizes are
/// multiples of 32. The tokens of a micro-batch (72) and an expert's rows are not.
const char* const kLowPrecisionModel = R"(
[model.args]
vocab_size = 288
dim = 64
inter_dim = 96
moe_inter_dim = 32
n_layers = 3
n_dense_layers = 1
n_heads = 2
num_experts = 8
num_shared_experts = 1
top_k = 2
score_func = "sigmoid"
route_norm = true
n_expert_groups = 4
n_limited_groups = 2
seq_balance_loss_coeff = 0.001
q_lora_rank = 32
kv_lora_rank = 64
qk_nope_head_dim = 32
qk_rope_head_dim = 32
v_head_dim = 32
num_mtp_modules = 1
eos_id = 257
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 36
steps = 8
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
[model]
converters = ["quantize.linear.mx", "quantize.grouped_mm.mx"]
)";

using Overrides = std::vector<std::string>;

Overrides joined(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Recipe {
  const char* name;
  Overrides overrides;

  friend void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }
};

Overrides both(const std::string& key) { return {"--quantize.linear.mx." + key, "--quantize.grouped_mm.mx." + key}; }

/// Both heads' projection: the model's and the multi-token prediction module's.
const char* const kOutput = "--quantize.linear.mx.convert_output";

const Recipe kRecipes[] = {
    {"mxfp8", {}},
    {"mxfp8_cublas", {"--quantize.linear.mx.recipe_name=mxfp8_cublas"}},
    {"mxfp8_cublas_rceil", {"--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil"}},
    {"mxfp8_wgrad_with_hp", both("recipe_name=mxfp8_wgrad_with_hp")},
    {"mxfp8_emulated", both("recipe_name=mxfp8_emulated")},
    {"fp8_blockwise", both("recipe_name=fp8_blockwise")},
    {"mxfp8_32x32", both("block_shape=32x32")},
    {"mxfp8_128x128", both("block_shape=128x128")},
    {"mxfp8_256x256", both("block_shape=256x256")},
    {"linear_only", {"--model.converters=quantize.linear.mx"}},
    {"grouped_only", {"--model.converters=quantize.grouped_mm.mx"}},
    {"mixed",
     {"--quantize.linear.mx.recipe_name=mxfp8_wgrad_with_hp", "--quantize.grouped_mm.mx.recipe_name=fp8_blockwise",
      "--quantize.linear.mx.filter_fqns=output,wkv_a,shared_experts"}},
    {"mxfp8_output", {kOutput}},
    {"mxfp8_wgrad_with_hp_output", joined(both("recipe_name=mxfp8_wgrad_with_hp"), {kOutput})},
    {"fp8_blockwise_output", joined(both("recipe_name=fp8_blockwise"), {kOutput})},
};
const Overrides kHigh = {"--model.converters="};

std::vector<std::int32_t> random_tokens(const Batch& batch, std::string_view stream) {
  const Philox random(5, stream_of(stream));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch.num_seqs() * (batch.seq_len() + 1)));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(random.words(i)[0] % 256);
  return tokens;
}

std::vector<float> numbers(const Tensor& tensor) {
  return {tensor.data<float>(), tensor.data<float>() + tensor.num_elements()};
}

/// NaN equals NaN here, if the bits are the same.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double sqnr_db(const std::vector<float>& actual, const std::vector<float>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double signal = 0.0, noise = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double x = static_cast<double>(expected[i]), d = static_cast<double>(actual[i]) - x;
    signal += x * x;
    noise += d * d;
  }
  return 10.0 * std::log10(signal / noise);
}

/// A step with its configuration and memory. The configuration must outlive the step.
struct SmallStep {
  JobConfig config;
  TrainingStep step;

  explicit SmallStep(const Overrides& overrides)
      : config(valid(parse_job_config(kLowPrecisionModel, overrides))), step(config) {
    step.allocate();
  }
  static JobConfig valid(JobConfig config) {
    config.validate();
    return config;
  }
  Batch batch(std::string_view stream = "tokens") const {
    Batch result = step.make_batch();
    result.fill(random_tokens(result, stream));
    return result;
  }
  std::vector<Batch> batches() const {
    std::vector<Batch> result;
    for (std::int64_t i = 0; i < config.micro_batches_per_step(); ++i) result.push_back(batch(fmt::format("{}", i)));
    return result;
  }
  bool quantizes(ParamId id) const { return step.model().quantized_weights().precision(id).quantizes(); }
};

ParamId id_of(const Model& model, const std::string& name) {
  ParamId id = 0;
  while (id < model.parameters().size() && model.parameters().spec(id).name != name) ++id;
  return id;
}

struct Gradients {
  double loss, mtp_loss;
  std::map<std::string, std::vector<float>> of;
  std::set<std::string> sites;  // sites in low precision
  std::vector<float> flat;      // with losses and loads: all that a micro-batch leaves
};

/// Returns the gradients of one micro-batch.
Gradients gradients_of(const Overrides& overrides) {
  SmallStep run(overrides);
  Model& model = run.step.model();
  const Batch batch = run.batch();
  const LossScale scale{.per_token = 1.0 / static_cast<double>(batch.num_valid()), .per_sequence = 0.5};
  forward_backward(model, run.step.context(), batch, scale);
  const LossSums sums = model.sums().losses();
  Gradients result{.loss = sums.main * scale.per_token,
                   .mtp_loss = sums.mtp * scale.per_token,
                   .of = {},
                   .sites = {},
                   .flat = numbers(model.parameters().all_gradients())};
  for (ParamId id = 0; id < model.parameters().size(); ++id) {
    const std::string& name = model.parameters().spec(id).name;
    result.of[name] = numbers(model.parameters().gradient(id));
    if (run.quantizes(id)) result.sites.insert(name);
  }
  for (const double sum : {sums.main, sums.mtp}) result.flat.push_back(static_cast<float>(sum));
  for (std::size_t i = 0; i < model.num_moe_layers(); ++i) {
    for (const double count : model.sums().counts_E(i)) result.flat.push_back(static_cast<float>(count));
  }
  return result;
}

std::string recompute(const char* mode) { return fmt::format("--activation_checkpoint.mode={}", mode); }

class LowPrecisionStep : public ::testing::TestWithParam<Recipe> {
 protected:
  static Overrides overrides(const Overrides& more = {}) { return joined(GetParam().overrides, more); }
};

// A product of two quantized operands has an SQNR of 28.5 dB (tests/params/precision_test.cc). Errors of products in a
// row add up. The deepest gradient has some twenty of them: 5 forward and 5 backward in each of four blocks, less the
// branches that a residual connection goes around. 28.5 - 10 log10(22) = 15 dB. Routing is fixed, because a token that
// goes elsewhere is no rounding error.
TEST_P(LowPrecisionStep, GradientsAreCloseToThoseOfHighPrecision) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    for (const char* q_lora_rank : {"32", "0"}) {
      const Overrides more = {fmt::format("--training.mixed_precision_param={}", dtype),
                              fmt::format("--model.args.q_lora_rank={}", q_lora_rank),
                              "--debug.moe_force_load_balance"};
      const Gradients high = gradients_of(joined(kHigh, more)), low = gradients_of(overrides(more));
      ASSERT_FALSE(low.sites.empty());
      EXPECT_NE(low.loss, high.loss);
      EXPECT_NEAR(low.loss, high.loss, 2e-2);
      EXPECT_NEAR(low.mtp_loss, high.mtp_loss, 2e-2);
      double worst = HUGE_VAL, best = 0.0;
      std::string worst_name;
      for (const auto& [name, gradient] : low.of) {
        const double sqnr = sqnr_db(gradient, high.of.at(name));
        EXPECT_GE(sqnr, 15.0) << name;
        EXPECT_NE(gradient, high.of.at(name)) << name;
        if (low.sites.contains(name)) {
          // bfloat16 alone would have more. Where the output projection's wgrad is in high precision, its gradient has
          // the error of the logits only.
          EXPECT_LE(sqnr, name == "output.weight" ? 50.0 : 40.0) << name;
        }
        if (sqnr < worst) worst = sqnr, worst_name = name;
        best = std::max(best, sqnr);
      }
      std::printf("%s %s q_lora %s: loss %+.1e, gradients %.1f dB (%s) to %.1f dB\n", GetParam().name, dtype,
                  q_lora_rank, low.loss - high.loss, worst, worst_name.c_str(), best);
    }
  }
}

TEST_P(LowPrecisionStep, RecomputationChangesNoBit) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const std::string type = fmt::format("--training.mixed_precision_param={}", dtype);
    const Gradients kept = gradients_of(overrides({type, recompute("none")}));
    for (const char* mode : {"selective", "full"}) {
      EXPECT_TRUE(same_bits(gradients_of(overrides({type, recompute(mode)})).flat, kept.flat)) << dtype << " " << mode;
    }
  }
}

// Weights that are quantized before each pass, in memory that units share, give the same steps and take less memory.
TEST_P(LowPrecisionStep, QuantizingWeightsForEachPassChangesNoBit) {
  const auto steps = [&](const Overrides& more) {
    SmallStep run(overrides(joined(more, {recompute("full")})));
    std::vector<float> numbers_of_steps;
    const std::vector<Batch> batches = run.batches();
    for (std::int64_t step = 1; step <= 3; ++step) {
      const StepResult result = run.step.run(step, batches);
      for (const double x : {result.loss, result.mtp_loss, result.grad_norm}) {
        numbers_of_steps.push_back(static_cast<float>(x));
      }
      // An evaluation between steps leaves weights in the shared memory, which are old after the next step.
      run.step.model().evaluate(run.step.context(), batches.front());
    }
    const std::vector<float> masters = numbers(run.step.model().parameters().all_masters());
    numbers_of_steps.insert(numbers_of_steps.end(), masters.begin(), masters.end());
    return std::pair(numbers_of_steps, run.step.model().quantized_weights().num_bytes());
  };
  const auto [kept, kept_bytes] = steps({});
  const auto [again, again_bytes] = steps({"--quantize.keep_weights=false"});
  EXPECT_TRUE(same_bits(again, kept));
  EXPECT_LT(again_bytes, kept_bytes / 2);
}

/// A probe that records what it observes of each site.
struct Observed : SiteProbe {
  struct Operand {
    Shape shape;
    std::vector<mx::Format> formats;  // of its observations; empty if never quantized
    std::int64_t num_rows = 0;
    std::size_t count = 0;
  };
  std::map<std::pair<ParamId, Role>, Operand> operands;

  void observe(const Context&, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
               std::int64_t num_rows) override {
    Operand& operand = operands[{site, role}];
    ++operand.count;
    operand.shape = plain.shape();
    operand.num_rows = num_rows;
    EXPECT_TRUE(plain.defined());
    if (quantized.defined()) {
      operand.formats.push_back(quantized.format);
      EXPECT_TRUE(quantized.elements.shape() == plain.shape());
    }
  }
};

// In every mode a probe sees each operand of each site once, in the format of the recipe. Two heads share the output
// projection. Observing changes nothing.
TEST_P(LowPrecisionStep, ProbesSeeEachOperandOnce) {
  for (const char* mode : {"none", "selective", "full"}) {
    SCOPED_TRACE(mode);
    SmallStep run(overrides({recompute(mode)}));
    Model& model = run.step.model();
    Observed observed;
    const LossScale scale{.per_token = 0.01, .per_sequence = 0.5};
    forward_backward(model, run.step.context(), run.batch(), scale, &observed);
    // Rows in use of an MoE layer's routed operands, including the padding of groups.
    std::map<std::string, std::int64_t> num_rows;
    for (std::size_t i = 0; i < model.num_moe_layers(); ++i) {
      const std::string& layer = model.moe_layer(i).name();
      const SitePrecision& site = model.quantized_weights().precision(id_of(model, layer + ".experts.w13"));
      const std::int64_t alignment = site.wgrad == Precision::kHigh ? 1 : site.wgrad_gradient.along;
      for (const double counted : model.sums().counts_E(i)) {
        const auto count = static_cast<std::int64_t>(counted);
        num_rows[layer] += (count + alignment - 1) / alignment * alignment;
      }
    }
    const std::vector<float> gradients = numbers(model.parameters().all_gradients());
    EXPECT_LE(run.step.context().arena->peak(), run.step.memory_plan().activations);
    for (ParamId id = 0; id < model.parameters().size(); ++id) {
      const ParamSpec& spec = model.parameters().spec(id);
      SCOPED_TRACE(spec.name);
      const SitePrecision& site = model.quantized_weights().precision(id);
      for (const SiteProbe::Role role :
           {SiteProbe::Role::kInput, SiteProbe::Role::kWeight, SiteProbe::Role::kGradient}) {
        const auto found = observed.operands.find({id, role});
        if (spec.gemm == GemmKind::kNone) {
          EXPECT_EQ(found, observed.operands.end());
          continue;
        }
        ASSERT_NE(found, observed.operands.end());
        const std::size_t times = spec.gemm == GemmKind::kOutput ? 2 : 1;
        EXPECT_EQ(found->second.count, times);
        const int last = spec.shape.num_dims() - 1;
        const Shape& shape = found->second.shape;
        if (role != SiteProbe::Role::kWeight) {
          EXPECT_EQ(shape[1], spec.shape[role == SiteProbe::Role::kInput ? last : last - 1]);
        }
        const bool routed = spec.gemm == GemmKind::kGrouped && role != SiteProbe::Role::kWeight;
        EXPECT_EQ(found->second.num_rows, routed ? num_rows.at(spec.name.substr(0, spec.name.find(".experts"))) : -1);
        if (!site.quantizes()) {
          EXPECT_TRUE(found->second.formats.empty());
          continue;
        }
        const mx::Format& format = role == SiteProbe::Role::kWeight     ? site.weight
                                   : role == SiteProbe::Role::kGradient ? site.gradient
                                                                        : site.input;
        EXPECT_EQ(found->second.formats, std::vector(times, format));
      }
    }
    set_zero(run.step.context(), model.parameters().all_gradients());
    forward_backward(model, run.step.context(), run.batch(), scale);
    EXPECT_TRUE(same_bits(numbers(model.parameters().all_gradients()), gradients));
  }
}

/// Returns the elements and the scales of a quantized matrix as bytes.
std::vector<std::uint8_t> bytes_of(const mx::Quantized& q) {
  std::vector<std::uint8_t> bytes;
  if (!q.defined()) return bytes;
  bytes.assign(q.element_bytes(), q.element_bytes() + q.elements.num_bytes());
  bytes.insert(bytes.end(), q.scale_bytes(), q.scale_bytes() + q.scales.num_bytes());
  return bytes;
}

/// Expects the quantized weights to equal what quantizing the weights now gives.
void expect_fresh(const Model& model) {
  const Parameters& parameters = model.parameters();
  Arena arena(std::size_t{1} << 20);
  for (ParamId id = 0; id < parameters.size(); ++id) {
    if (!model.quantized_weights().precision(id).quantizes_weight()) continue;
    const ArenaScope scope(arena);
    const QuantizedWeight is = model.quantized_weights().weight(id);
    const auto allocate = [&](Shape shape, DType dtype) { return arena.allocate(shape, dtype); };
    QuantizedWeight should;
    should.rows = mx::allocate_quantized(is.rows.elements.shape(), is.rows.format, allocate);
    if (is.columns.defined()) {
      should.columns = mx::allocate_quantized(is.columns.elements.shape(), is.columns.format, allocate);
    }
    const Context op{.arena = &arena};
    quantize(op, parameters.rounded_weight(op, id), should.rows, should.columns);
    EXPECT_EQ(bytes_of(is.rows), bytes_of(should.rows)) << parameters.spec(id).name;
    EXPECT_EQ(bytes_of(is.columns), bytes_of(should.columns)) << parameters.spec(id).name;
  }
}

// The weights that a step leaves behind are the ones that the next step multiplies with.
TEST_P(LowPrecisionStep, WeightsAreQuantizedAgainAfterTheOptimizer) {
  SmallStep run(overrides());
  const std::vector<Batch> batches = run.batches();
  const double before = run.step.evaluate(batches[0]);
  expect_fresh(run.step.model());
  for (std::int64_t step = 1; step <= 2; ++step) {
    run.step.run(step, batches);
    expect_fresh(run.step.model());
  }
  const double after = run.step.evaluate(batches[0]);
  EXPECT_LT(after, before);
  run.step.refresh_weights();
  EXPECT_EQ(run.step.evaluate(batches[0]), after);
}

// A weight whose products read its quantized form has no bfloat16 copy. Where it has to be read, its master is rounded.
TEST(LowPrecision, WeightsThatAreOnlyReadQuantizedHaveNoCopy) {
  SmallStep run({"--training.mixed_precision_param=bfloat16", "--model.converters=quantize.grouped_mm.mx"});
  run.step.run(1, run.batches());
  const Parameters& parameters = run.step.model().parameters();
  Arena arena(std::size_t{1} << 20);
  std::int64_t without_copy = 0;
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const bool quantized = run.step.model().quantized_weights().precision(id).quantizes_weight();
    if (quantized) {
      without_copy += parameters.master(id).num_elements();
      EXPECT_THROW(parameters.weight(id), InternalError);
    } else {
      EXPECT_EQ(parameters.weight(id).raw(), parameters.rounded_weight({.arena = &arena}, id).raw());
    }
    const ArenaScope scope(arena);
    const Tensor rounded = parameters.rounded_weight({.arena = &arena}, id), master = parameters.master(id);
    ASSERT_EQ(rounded.dtype(), DType::kBFloat16);
    for (std::int64_t i = 0; i < master.num_elements(); ++i) {
      ASSERT_EQ(static_cast<float>(rounded.data<BFloat16>()[i]), static_cast<float>(BFloat16(master.data<float>()[i])))
          << parameters.spec(id).name << " " << i;
    }
  }
  EXPECT_GT(without_copy, 0);
  const std::int64_t with_copy = parameters.all_masters().dim(0) - without_copy;  // all are multiples of the alignment
  EXPECT_EQ(parameters.num_bytes(DType::kBFloat16) - parameters.num_bytes(DType::kFloat32),
            static_cast<std::size_t>(with_copy) * sizeof(BFloat16));
}

INSTANTIATE_TEST_SUITE_P(Recipes, LowPrecisionStep, ::testing::ValuesIn(kRecipes),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(LowPrecision, EmulationGivesTheSameBits) {
  for (const char* mode : {"none", "full"}) {
    const Gradients real = gradients_of({recompute(mode)});
    const Gradients emulated = gradients_of(joined(both("recipe_name=mxfp8_emulated"), {recompute(mode)}));
    EXPECT_EQ(real.sites, emulated.sites);
    EXPECT_TRUE(same_bits(real.flat, emulated.flat)) << mode;
  }
}

TEST(LowPrecision, NamesOfOneRecipeGiveTheSameBits) {
  const auto linear = [](const Overrides& keys) {
    Overrides all;
    for (const std::string& key : keys) all.push_back("--quantize.linear.mx." + key);
    return gradients_of(all).flat;
  };
  const std::vector<float> rceil = linear({}), floor = linear({"scaling_mode=floor"});
  EXPECT_TRUE(same_bits(linear({"recipe_name=mxfp8_cublas_rceil"}), rceil));
  EXPECT_TRUE(same_bits(linear({"recipe_name=mxfp8_cublas"}), floor));
  EXPECT_FALSE(same_bits(floor, rceil));
}

// The way in which weights' gradients are computed changes neither outputs nor their gradients, nor the gradients of
// what is not quantized. The others differ by one product of two quantized operands: 28.5 dB, and a little for sums
// over few tokens.
TEST(LowPrecision, HighWeightGradientsChangeNothingElse) {
  const Gradients low = gradients_of({}), high = gradients_of(both("recipe_name=mxfp8_wgrad_with_hp"));
  EXPECT_EQ(low.loss, high.loss);
  EXPECT_EQ(low.mtp_loss, high.mtp_loss);
  ASSERT_EQ(low.sites, high.sites);
  for (const auto& [name, gradient] : low.of) {
    if (low.sites.contains(name)) {
      EXPECT_GE(sqnr_db(gradient, high.of.at(name)), 27.0) << name;
      EXPECT_LE(sqnr_db(gradient, high.of.at(name)), 35.0) << name;
    } else {
      EXPECT_TRUE(same_bits(gradient, high.of.at(name))) << name;
    }
  }
}

/// Returns the gradients of a whole step of four sequences, in micro-batches of `micro_batch` sequences.
std::map<std::string, std::vector<float>> step_gradients(std::int64_t micro_batch, const Overrides& overrides) {
  SmallStep run(joined(overrides, {fmt::format("--training.local_batch_size={}", micro_batch)}));
  std::vector<std::int32_t> tokens;
  for (std::int64_t row = 0; row < 4; ++row) {
    const Philox random(6, static_cast<std::uint32_t>(row));
    for (std::int64_t i = 0; i <= run.config.training.seq_len; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random.words(static_cast<std::uint64_t>(i))[0] % 256));
    }
  }
  std::vector<Batch> batches;
  const std::size_t length = tokens.size() / static_cast<std::size_t>(run.config.micro_batches_per_step());
  for (std::size_t at = 0; at < tokens.size(); at += length) {
    batches.push_back(run.step.make_batch());
    batches.back().fill(std::span(tokens).subspan(at, length));
  }
  run.step.run(1, batches);
  const Parameters& parameters = run.step.model().parameters();
  std::map<std::string, std::vector<float>> gradients;
  for (ParamId id = 0; id < parameters.size(); ++id) {
    gradients[parameters.spec(id).name] = numbers(parameters.gradient(id));
  }
  return gradients;
}

// A step in two micro-batches has the numbers of a step in one, summed in another order, if no block differs. That
// holds with weight gradients in high precision, and with blocks that no micro-batch's end cuts (64 tokens each).
// bfloat16 has a relative rounding of 2^-9, which a rare quantized number turns into a step of its grid. 40 dB is far
// from the 28.5 dB of other blocks. The blocks of experts do differ: two such errors make 25.5 dB, less 2 dB for
// experts with few tokens.
TEST(LowPrecision, AccumulatedGradientsAreThoseOfOneBatch) {
  const Overrides base = {"--training.seq_len=32", "--debug.moe_force_load_balance"};
  for (const Overrides& recipe : {both("recipe_name=mxfp8_wgrad_with_hp"), Overrides{kRecipes[8].overrides}}) {
    const auto two = step_gradients(2, joined(base, recipe)), one = step_gradients(4, joined(base, recipe));
    for (const auto& [name, gradient] : two) EXPECT_GE(sqnr_db(gradient, one.at(name)), 40.0) << name;
  }
  const auto two = step_gradients(2, base), one = step_gradients(4, base);
  for (const auto& [name, gradient] : two) {
    const bool expert = name.find(".experts.") != std::string::npos;
    EXPECT_GE(sqnr_db(gradient, one.at(name)), expert ? 23.5 : 40.0) << name;
  }
}

/// A run over a dataset, with its files.
class LowPrecisionRun : public ::testing::Test {
 protected:
  LowPrecisionRun() { data::make_dataset(scratch_, 400, 3000, 0.1); }

  JobConfig config(const Overrides& overrides) const { return run_config(scratch_, kLowPrecisionModel, overrides); }
  std::vector<nlohmann::json> metrics() const {
    std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  /// Sets the first number of a parameter, or all its numbers, as a checkpoint would.
  static void plant(Trainer& trainer, const std::string& name, float value, bool all) {
    Parameters& parameters = trainer.model().parameters();
    bool found = false;
    for (ParamId id = 0; id < parameters.size(); ++id) {
      if (parameters.spec(id).name != name) continue;
      const Tensor master = parameters.master(id);
      std::fill_n(master.data<float>(), all ? master.num_elements() : 1, value);
      found = true;
    }
    ASSERT_TRUE(found) << name;
    Arena no_scratch(0);
    trainer.model().refresh_weights({.arena = &no_scratch});
  }

  TemporaryFolder scratch_;
};

TEST_F(LowPrecisionRun, LoadedWeightsAreQuantized) {
  const auto masters = [](Trainer& trainer) { return numbers(trainer.model().parameters().all_masters()); };
  std::optional<Trainer> trainer;  // only one at a time, since they share a folder
  trainer.emplace(config({"--checkpoint.enable", "--training.steps=2"}));
  trainer->run(kNoSignal);
  const auto trained = masters(*trainer);
  trainer.reset();

  trainer.emplace(config({"--checkpoint.enable", "--training.steps=2"}));  // resumes the run
  EXPECT_TRUE(same_bits(masters(*trainer), trained));
  expect_fresh(trainer->model());
  trainer.reset();

  const std::string folder = (scratch_ / "outputs" / "checkpoint" / "step-2").string();
  trainer.emplace(config({"--checkpoint.initial_load_path=" + folder, "--job.overwrite"}));
  EXPECT_TRUE(same_bits(masters(*trainer), trained));
  expect_fresh(trainer->model());
}

// The metrics have x, w and dy of every site in low precision, and of no other site. They have them at the steps that
// the key asks for, and at the first and the last step.
TEST_F(LowPrecisionRun, QuantizationErrorsAreInTheMetrics) {
  const JobConfig job = config(
      {"--metrics.quantization_error_freq=3", "--metrics.log_freq=4", "--quantize.linear.mx.filter_fqns=output,wkv_a"});
  Trainer trainer(job);
  std::set<std::string> sites;
  for (ParamId id = 0; id < trainer.model().parameters().size(); ++id) {
    if (!trainer.model().quantized_weights().precision(id).quantizes()) continue;
    sites.insert(module_name(trainer.model().parameters().spec(id)));
  }
  ASSERT_TRUE(sites.contains("mtp.0.block.moe.experts.w13"));
  ASSERT_FALSE(sites.contains("layers.0.attention.wkv_a"));
  trainer.run(kNoSignal);
  std::vector<int> steps, measured;
  for (const nlohmann::json& line : metrics()) {
    steps.push_back(line["step"]);
    if (!line.contains("quantization_sqnr_db")) continue;
    measured.push_back(line["step"]);
    std::set<std::string> names;
    for (const auto& [site, values] : line["quantization_sqnr_db"].items()) {
      names.insert(site);
      std::vector<std::string> operands;
      for (const auto& [operand, value] : values.items()) {
        operands.push_back(operand);
        // A Gaussian has 31.5 dB. Blocks with an outlier have more zeros. Operands with few numbers that count may have
        // more by chance.
        EXPECT_GT(value.get<double>(), 24.0) << site << " " << operand;
        EXPECT_LT(value.get<double>(), 45.0) << site << " " << operand;
      }
      EXPECT_THAT(operands, ::testing::UnorderedElementsAre("x", "w", "dy")) << site;
    }
    EXPECT_EQ(names, sites);
  }
  EXPECT_THAT(steps, ElementsAre(1, 3, 4, 6, 8));
  EXPECT_THAT(measured, ElementsAre(1, 3, 6, 8));
}

// The errors are those of the first micro-batch only. A second micro-batch halves the gradients, which quantization
// does not see, and changes nothing else.
TEST(LowPrecision, ErrorsAreThoseOfTheFirstMicroBatch) {
  SmallStep two({}), one({"--training.global_batch_size=2"});
  // The step changes the weights, so their errors are measured first.
  std::map<std::string, double> weights;
  const Model& model = one.step.model();
  for (ParamId id = 0; id < model.parameters().size(); ++id) {
    if (!one.quantizes(id)) continue;
    double numbers[2] = {};
    const Tensor sums_2(numbers, {2}, DType::kFloat64, Device::kCpu);
    Arena arena(std::size_t{1} << 20);
    quantization_error(one.step.context(), model.parameters().rounded_weight({.arena = &arena}, id),
                       model.quantized_weights().weight(id).rows, sums_2);
    weights[module_name(model.parameters().spec(id))] = ErrorSums{.signal = numbers[0], .noise = numbers[1]}.sqnr_db();
  }
  const StepResult of_two = two.step.run(1, two.batches(), true), of_one = one.step.run(1, one.batches(), true);
  ASSERT_FALSE(of_one.sqnr.empty());
  ASSERT_EQ(of_two.sqnr.size(), of_one.sqnr.size());
  ASSERT_EQ(weights.size(), of_one.sqnr.size());
  for (std::size_t i = 0; i < of_one.sqnr.size(); ++i) {
    const SiteSqnr &a = of_two.sqnr[i], &b = of_one.sqnr[i];
    EXPECT_EQ(a.module, b.module);
    EXPECT_EQ(a.x, b.x) << a.module;
    EXPECT_EQ(a.w, b.w) << a.module;
    EXPECT_EQ(a.w, weights.at(a.module)) << a.module;
    EXPECT_EQ(a.d_y, b.d_y) << a.module;
  }
}

TEST_F(LowPrecisionRun, MeasuringErrorsChangesNoResult) {
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<float>> weights;
  for (const char* freq : {"0", "1"}) {
    std::filesystem::remove_all(scratch_ / "outputs");
    Trainer trainer(config({fmt::format("--metrics.quantization_error_freq={}", freq), recompute("selective")}));
    losses.emplace_back();
    trainer.set_step_callback([&](std::int64_t, const StepResult& result) {
      losses.back().insert(losses.back().end(), {result.total_loss, result.grad_norm});
      EXPECT_EQ(result.sqnr.empty(), std::string(freq) == "0");
    });
    trainer.run(kNoSignal);
    weights.push_back(numbers(trainer.model().parameters().all_masters()));
    const std::vector<nlohmann::json> lines = metrics();
    EXPECT_EQ(lines.size(), 8u);
    for (const nlohmann::json& line : lines) EXPECT_EQ(line.contains("quantization_sqnr_db"), freq[0] == '1');
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_TRUE(same_bits(weights[0], weights[1]));
}

// Without low precision there are no errors to measure.
TEST_F(LowPrecisionRun, HighPrecisionHasNoQuantizationErrors) {
  Trainer trainer(config({"--model.converters=", "--metrics.quantization_error_freq=1"}));
  trainer.run(kNoSignal);
  const std::vector<nlohmann::json> lines = metrics();
  EXPECT_EQ(lines.size(), 8u);
  for (const nlohmann::json& line : lines) EXPECT_FALSE(line.contains("quantization_sqnr_db"));
}

struct Failure {
  const char* what;
  const char* parameter;
  float value;
  bool all;
  const char* message;
};
// Says where the first non-finite number is that a GEMM reads, in the order of computation.
const Failure kFailures[] = {
    // 1e38 times numbers of a norm's output overflows in the product. The norm of the latent turns that into NaN.
    {"overflow", "layers.1.attention.wkv_a.weight", 1e38f, true,
     "first non-finite numbers in the input of layers.1.attention.wkv_b"},
    {"overflow in SwiGLU", "layers.0.feed_forward.w13.weight", 1e30f, true, "the input of layers.0.feed_forward.w2"},
    {"overflow in an expert", "layers.2.moe.experts.w13", 1e30f, true, "the input of layers.2.moe.experts.w2"},
    {"NaN in a weight", "layers.1.attention.wo.weight", NAN, false, "the weight of layers.1.attention.wo"},
    {"NaN in the experts", "layers.2.moe.experts.w2", NAN, true, "the weight of layers.2.moe.experts.w2"},
    {"NaN in a norm", "layers.1.ffn_norm.weight", NAN, false, "the input of layers.1.moe"},
};

TEST_F(LowPrecisionRun, NonFiniteNumbersAreNamedByTheirGemm) {
  for (const Overrides& precision : {kHigh, Overrides{}, Overrides{recompute("full")},
                                     both("recipe_name=fp8_blockwise"), Overrides{recompute("selective")}}) {
    for (const Failure& failure : kFailures) {
      SCOPED_TRACE(fmt::format("{} {}", failure.what, fmt::join(precision, " ")));
      std::filesystem::remove_all(scratch_ / "outputs");
      Trainer trainer(config(precision));
      trainer.set_step_callback([&](std::int64_t step, const StepResult&) {
        if (step == 2) plant(trainer, failure.parameter, failure.value, failure.all);
      });
      expect_error([&] { trainer.run(kNoSignal); }, {"step 3", failure.message});
    }
  }
}

}  // namespace
}  // namespace tessera
