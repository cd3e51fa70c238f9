// Tests how converters determine the precision of every GEMM site.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "base/error.h"
#include "config/job_config.h"
#include "config/resolve_recipes.h"
#include "model/model.h"

namespace tessera {
namespace {

using mx::ScalingMode;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

const char* const kLinear = "--model.converters=quantize.linear.mx";
const char* const kGrouped = "--model.converters=quantize.grouped_mm.mx";
const char* const kBoth = "--model.converters=quantize.linear.mx,quantize.grouped_mm.mx";

/// A model with a dense layer, an MoE layer and an MTP module. All sizes are multiples of 32.
const char* const kToml = R"(
[model.args]
vocab_size = 258
dim = 64
inter_dim = 96
moe_inter_dim = 32
n_layers = 2
n_dense_layers = 1
n_heads = 2
num_experts = 4
num_shared_experts = 1
top_k = 2
q_lora_rank = 32
kv_lora_rank = 64
qk_nope_head_dim = 32
qk_rope_head_dim = 32
v_head_dim = 32
num_mtp_modules = 1
)";

const std::vector<std::string> kAttention = {"attention.wq_a", "attention.wq_b", "attention.wkv_a", "attention.wkv_b",
                                             "attention.wo"};

/// Returns names of sites: `dense` in the dense layer, followed by `moe` in the MoE layer and in the MTP module.
std::vector<std::string> sites(const std::vector<std::string>& dense, const std::vector<std::string>& moe) {
  std::vector<std::string> names;
  for (const std::string& part : dense) names.push_back("layers.0." + part);
  for (const char* block : {"layers.1.", "mtp.0.block."}) {
    for (const std::string& part : moe) names.push_back(block + part);
  }
  return names;
}

std::vector<std::string> join(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<std::string> linear_sites() {
  return sites(join(kAttention, {"feed_forward.w13", "feed_forward.w2"}),
               join(kAttention, {"moe.shared_experts.w13", "moe.shared_experts.w2"}));
}

std::vector<std::string> grouped_sites() { return sites({}, {"moe.experts.w13", "moe.experts.w2"}); }

/// The parameters of a configuration's model and their precisions. It has names and shapes only, and takes no memory.
struct Resolved {
  Parameters parameters;
  PrecisionTable table;

  explicit Resolved(const std::vector<std::string>& overrides) {
    const JobConfig config = parse_job_config(kToml, overrides);
    config.validate();
    Model model(config.model.args, {.seq_len = 16});
    parameters = std::move(model.parameters());
    table = resolve_recipes(config.recipes(), parameters);
  }

  std::vector<std::string> quantized() const {
    std::vector<std::string> names;
    for (ParamId id = 0; id < table.size(); ++id) {
      if (table[id].quantizes()) names.push_back(module_name(parameters.spec(id)));
    }
    return names;
  }
  SitePrecision at(const std::string& module) const {
    for (ParamId id = 0; id < table.size(); ++id) {
      if (module_name(parameters.spec(id)) == module) return table[id];
    }
    ADD_FAILURE() << "no module " << module;
    return {};
  }
};

std::string recipe_error(const std::vector<std::string>& overrides) {
  try {
    const Resolved resolved(overrides);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Recipe, ConvertersChooseTheSites) {
  EXPECT_THAT(Resolved({}).table, IsEmpty());
  EXPECT_THAT(Resolved({kLinear}).quantized(), ::testing::UnorderedElementsAreArray(linear_sites()));
  EXPECT_THAT(Resolved({kGrouped}).quantized(), ::testing::UnorderedElementsAreArray(grouped_sites()));
  EXPECT_THAT(Resolved({kBoth}).quantized(),
              ::testing::UnorderedElementsAreArray(join(linear_sites(), grouped_sites())));
  const std::vector<std::string> one_matrix = Resolved({kLinear, "--model.args.q_lora_rank=0"}).quantized();
  EXPECT_THAT(one_matrix, ::testing::Contains("layers.0.attention.wq"));
  EXPECT_THAT(one_matrix, Each(Not(HasSubstr("wq_"))));
}

// The filter has no effect on these modules, even if it is empty.
TEST(Recipe, SomeModulesAreNeverQuantized) {
  const Resolved resolved({kBoth, "--quantize.linear.mx.filter_fqns=", "--quantize.grouped_mm.mx.fqns=layers,mtp"});
  EXPECT_THAT(resolved.quantized(), ::testing::UnorderedElementsAreArray(join(linear_sites(), grouped_sites())));
  for (const char* module :
       {"output", "tok_embeddings", "norm", "layers.0.attention_norm", "layers.0.ffn_norm", "layers.0.attention.q_norm",
        "layers.0.attention.kv_norm", "layers.1.moe.router.gate", "mtp.0.eh_proj", "mtp.0.embedding_norm"}) {
    EXPECT_FALSE(resolved.at(module).quantizes()) << module;
  }
}

// convert_output converts the output projection, whatever the filter says. It changes no other module.
TEST(Recipe, TheOutputProjectionIsConvertedOnRequest) {
  const std::string request = "--quantize.linear.mx.convert_output", whole_blocks = "--model.args.vocab_size=288";
  const std::vector<std::string> with_output = join(linear_sites(), {"output"});
  EXPECT_THAT(Resolved({kLinear, request, whole_blocks}).quantized(),
              ::testing::UnorderedElementsAreArray(with_output));
  EXPECT_THAT(Resolved({kLinear, request, whole_blocks, "--quantize.linear.mx.filter_fqns="}).quantized(),
              ::testing::UnorderedElementsAreArray(with_output));
  EXPECT_THAT(Resolved({kLinear, request, whole_blocks, "--quantize.linear.mx.filter_fqns=layers,mtp"}).quantized(),
              ElementsAre("output"));
  EXPECT_THAT(Resolved({kGrouped, request}).quantized(), ::testing::UnorderedElementsAreArray(grouped_sites()));
  EXPECT_THAT(recipe_error({kLinear, request}), AllOf(HasSubstr("output is 258 x 64"), HasSubstr("convert_output")));
}

TEST(Recipe, PatternsArePartsOfNames) {
  const auto left = [](const std::string& filter) {
    return Resolved({kLinear, "--quantize.linear.mx.filter_fqns=" + filter}).quantized();
  };
  // These are TorchTitan's published flags for DeepSeek-V3.
  EXPECT_THAT(left("output,router.gate,wq,wkv,wo,feed_forward.w2,shared_experts"),
              ElementsAre("layers.0.feed_forward.w13"));
  EXPECT_THAT(left("attention,shared_experts,feed_forward.w1"), ElementsAre("layers.0.feed_forward.w2"));
  EXPECT_THAT(left("attention,shared_experts,feed_forward.w3"), ElementsAre("layers.0.feed_forward.w2"));
  EXPECT_THAT(left("attention,shared_experts,feed_forward.w13"), ElementsAre("layers.0.feed_forward.w2"));
  EXPECT_THAT(left("layers.0,mtp,attention,w2"), ElementsAre("layers.1.moe.shared_experts.w13"));

  const auto chosen = [](const std::string& fqns) {
    return Resolved({kGrouped, "--quantize.grouped_mm.mx.fqns=" + fqns}).quantized();
  };
  EXPECT_THAT(chosen("layers.1.moe.experts"),
              UnorderedElementsAre("layers.1.moe.experts.w13", "layers.1.moe.experts.w2"));
  EXPECT_THAT(chosen(".experts.w3"), UnorderedElementsAre("layers.1.moe.experts.w13", "mtp.0.block.moe.experts.w13"));
  EXPECT_THAT(chosen("mtp"), UnorderedElementsAre("mtp.0.block.moe.experts.w13", "mtp.0.block.moe.experts.w2"));
}

// Without these errors, a run that is meant for low precision could silently train without it.
TEST(Recipe, ConvertersThatFindNothingAreErrors) {
  EXPECT_THAT(
      recipe_error({kGrouped, "--quantize.grouped_mm.mx.fqns="}),
      AllOf(HasSubstr("quantize.grouped_mm.mx has no module to convert"), HasSubstr("layers.N.moe.experts.w13")));
  EXPECT_THAT(recipe_error({kLinear, "--quantize.linear.mx.filter_fqns=layers,mtp"}),
              AllOf(HasSubstr("quantize.linear.mx leaves no module to convert"), HasSubstr("layers.N.attention.wo")));
  EXPECT_THAT(recipe_error({kGrouped, "--quantize.grouped_mm.mx.fqns=shared_experts"}),
              AllOf(HasSubstr("'shared_experts'"), HasSubstr("grouped GEMM"), Not(HasSubstr("shared_experts.w13"))));
}

TEST(Recipe, PatternsThatMatchNothingListTheModules) {
  const auto modules = AllOf(HasSubstr("layers.N.attention.wkv_a"), HasSubstr("layers.N.moe.experts.w13"),
                             HasSubstr("mtp.N.block.moe.router.gate"), HasSubstr("output"), HasSubstr("w1, w3"),
                             Not(HasSubstr("layers.0")), Not(HasSubstr(".weight")));
  EXPECT_THAT(recipe_error({kLinear, "--quantize.linear.mx.filter_fqns=output,wqkv"}),
              AllOf(HasSubstr("quantize.linear.mx.filter_fqns"), HasSubstr("'wqkv'"), modules));
  EXPECT_THAT(recipe_error({kGrouped, "--quantize.grouped_mm.mx.fqns=expert.w2"}),
              AllOf(HasSubstr("quantize.grouped_mm.mx.fqns"), HasSubstr("'expert.w2'"),
                    HasSubstr("layers.N.moe.experts.w13, layers.N.moe.experts.w2"), Not(HasSubstr("attention"))));
  // The program does not check the patterns of a converter that is not in use.
  EXPECT_EQ(recipe_error({kLinear, "--quantize.grouped_mm.mx.fqns=expert.w2"}), "no error");
}

struct Expected {
  const char* name;
  Precision forward, wgrad;  // dgrad has the precision of fprop in every recipe
  mx::Format activation, weight;
};

constexpr mx::Format format(ScalingMode mode, std::int32_t along = 32, std::int32_t across = 1) {
  return {.mode = mode, .along = along, .across = across};
}
constexpr mx::Format kRceil = format(ScalingMode::kRceil), kFloor = format(ScalingMode::kFloor);
const Expected kRecipes[] = {
    {"mxfp8", Precision::kMxfp8, Precision::kMxfp8, kRceil, kRceil},
    {"mxfp8_wgrad_with_hp", Precision::kMxfp8, Precision::kHigh, kRceil, kRceil},
    {"mxfp8_emulated", Precision::kMxfp8Emulated, Precision::kMxfp8Emulated, kRceil, kRceil},
    {"fp8_blockwise",
     Precision::kFp8Blockwise,
     Precision::kFp8Blockwise,
     {.scale_type = mx::ScaleType::kFloat32, .along = 128},
     {.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128}},
    // TorchTitan's names, which only the linear converter has.
    {"mxfp8_cublas", Precision::kMxfp8, Precision::kMxfp8, kFloor, kFloor},
    {"mxfp8_cublas_rceil", Precision::kMxfp8, Precision::kMxfp8, kRceil, kRceil},
};

void expect_precision(const SitePrecision& site, const Expected& expected) {
  EXPECT_EQ(site.fprop, expected.forward);
  EXPECT_EQ(site.dgrad, expected.forward);
  EXPECT_EQ(site.wgrad, expected.wgrad);
  for (const mx::Format& format : {site.input, site.wgrad_input, site.gradient, site.wgrad_gradient}) {
    EXPECT_EQ(format, expected.activation);
  }
  EXPECT_EQ(site.weight, expected.weight);
}

TEST(Recipe, PrecisionsAndFormats) {
  for (const Expected& expected : kRecipes) {
    SCOPED_TRACE(expected.name);
    const std::string linear = fmt::format("--quantize.linear.mx.recipe_name={}", expected.name);
    const std::string grouped = fmt::format("--quantize.grouped_mm.mx.recipe_name={}", expected.name);
    if (std::string(expected.name).starts_with("mxfp8_cublas")) {
      EXPECT_THAT(recipe_error({kGrouped, grouped}),
                  AllOf(HasSubstr(expected.name), HasSubstr("mxfp8, mxfp8_wgrad_with_hp, mxfp8_emulated")));
      const Resolved resolved({kBoth, linear});
      expect_precision(resolved.at("layers.0.attention.wo"), expected);
      expect_precision(resolved.at("layers.1.moe.experts.w2"), kRecipes[0]);  // each converter has its own recipe
      continue;
    }
    const Resolved resolved({kBoth, linear, grouped});
    for (const std::string& module : join(linear_sites(), grouped_sites())) {
      SCOPED_TRACE(module);
      expect_precision(resolved.at(module), expected);
    }
    EXPECT_FALSE(resolved.at("output").quantizes());
  }
}

TEST(Recipe, ScalingModesAndBlockShapes) {
  const auto formats = [](const std::vector<std::string>& keys) {
    std::vector<std::string> overrides = {kBoth};
    for (const std::string& key : keys) overrides.push_back("--quantize.linear.mx." + key);
    const Resolved resolved(overrides);
    // Options of one converter do not apply to the other.
    EXPECT_EQ(resolved.at("layers.1.moe.experts.w13").input, kRceil);
    const SitePrecision site = resolved.at("layers.0.feed_forward.w13");
    EXPECT_EQ(site.wgrad_input, site.weight.along == 128 ? site.weight : site.input);
    EXPECT_EQ(site.gradient, site.input);
    EXPECT_EQ(site.wgrad_gradient, site.input);
    return std::pair(site.input, site.weight);
  };
  EXPECT_EQ(formats({"scaling_mode=floor"}), std::pair(kFloor, kFloor));
  EXPECT_EQ(formats({"scaling_mode=rceil"}), std::pair(kRceil, kRceil));
  EXPECT_EQ(formats({"scaling_mode=ceil"}), std::pair(format(ScalingMode::kCeil), format(ScalingMode::kCeil)));
  EXPECT_EQ(formats({"scaling_mode=even"}), std::pair(format(ScalingMode::kEven), format(ScalingMode::kEven)));
  EXPECT_EQ(formats({"block_shape=1x32"}), std::pair(kRceil, kRceil));
  EXPECT_EQ(formats({"block_shape=32x32"}), std::pair(kRceil, format(ScalingMode::kRceil, 32, 32)));
  EXPECT_EQ(formats({"block_shape=128x128"}),
            std::pair(format(ScalingMode::kRceil, 128), format(ScalingMode::kRceil, 128, 128)));
  EXPECT_EQ(formats({"recipe_name=mxfp8_wgrad_with_hp", "scaling_mode=even", "block_shape=32x32"}),
            std::pair(format(ScalingMode::kEven), format(ScalingMode::kEven, 32, 32)));
  // The recipe and the key say the same.
  EXPECT_EQ(formats({"recipe_name=mxfp8_cublas", "scaling_mode=floor"}), std::pair(kFloor, kFloor));
  EXPECT_EQ(formats({"recipe_name=mxfp8_cublas_rceil", "scaling_mode=rceil"}), std::pair(kRceil, kRceil));
  EXPECT_EQ(formats({"recipe_name=mxfp8_cublas", "block_shape=32x32"}),
            std::pair(kFloor, format(ScalingMode::kFloor, 32, 32)));
}

// Blocks of 256 run along the model's dims. Those along the tokens have 128, and so has the gradient of gate and up
// where they are not whole blocks wide.
TEST(Recipe, BlocksOf256) {
  const mx::Format rows = format(ScalingMode::kRceil, 128), square = format(ScalingMode::kRceil, 128, 128);
  const mx::Format widest = format(ScalingMode::kRceil, 256), widest_square = format(ScalingMode::kRceil, 256, 256);
  const Resolved resolved({kBoth, "--quantize.linear.mx.block_shape=256x256",
                           "--quantize.grouped_mm.mx.block_shape=256x256", "--model.args.moe_inter_dim=384",
                           "--model.args.inter_dim=512"});
  for (const auto& [module, of_gradient] : {std::pair{"layers.0.attention.wo", widest},
                                            {"layers.0.feed_forward.w13", widest},
                                            {"layers.1.moe.experts.w13", rows},
                                            {"layers.1.moe.experts.w2", widest}}) {
    SCOPED_TRACE(module);
    const SitePrecision site = resolved.at(module);
    EXPECT_EQ(site.input, widest);
    EXPECT_EQ(site.weight, widest_square);
    EXPECT_EQ(site.gradient, of_gradient);
    EXPECT_EQ(site.wgrad_input, square);
    EXPECT_EQ(site.wgrad_gradient, rows);
  }
}

TEST(Recipe, OnHopperMxfp8HasOneScaleFor128NumbersByDefault) {
  const auto blocks = [](Recipe recipe, BlockChoice asked) {
    const RecipeOptions options{.recipe = recipe, .fqns = {}, .block_shape = asked};
    const Recipes of_linear = on_hopper({.linear = options, .grouped_mm = {}});
    EXPECT_FALSE(of_linear.grouped_mm);
    EXPECT_EQ(on_hopper({.linear = {}, .grouped_mm = options}).grouped_mm->block_shape, of_linear.linear->block_shape);
    return of_linear.linear->block_shape;
  };
  for (const Recipe recipe :
       {Recipe::kMxfp8, Recipe::kMxfp8Cublas, Recipe::kMxfp8CublasRceil, Recipe::kMxfp8WgradWithHp}) {
    EXPECT_EQ(blocks(recipe, BlockChoice::kOfRecipe), BlockChoice::k128x128);
    EXPECT_EQ(blocks(recipe, BlockChoice::k1x32), BlockChoice::k1x32);
  }
  for (const Recipe recipe : {Recipe::kMxfp8Emulated, Recipe::kFp8Blockwise}) {
    EXPECT_EQ(blocks(recipe, BlockChoice::kOfRecipe), BlockChoice::kOfRecipe);
  }
}

TEST(Recipe, ContradictionsAreErrors) {
  const auto linear = [](const std::string& recipe, const std::string& key) {
    return recipe_error({kLinear, "--quantize.linear.mx.recipe_name=" + recipe, "--quantize.linear.mx." + key});
  };
  EXPECT_THAT(linear("mxfp8_cublas", "scaling_mode=rceil"),
              AllOf(HasSubstr("quantize.linear.mx.recipe_name"), HasSubstr("floor"), HasSubstr("scaling_mode")));
  EXPECT_THAT(linear("mxfp8_cublas_rceil", "scaling_mode=even"),
              AllOf(HasSubstr("quantize.linear.mx.recipe_name"), HasSubstr("rceil"), HasSubstr("scaling_mode")));
  for (const char* key : {"scaling_mode=floor", "scaling_mode=rceil", "block_shape=32x32", "block_shape=1x32"}) {
    EXPECT_THAT(linear("fp8_blockwise", key),
                AllOf(HasSubstr("quantize.linear.mx"), HasSubstr("fp8_blockwise"), HasSubstr("leave")))
        << key;
  }
  EXPECT_EQ(linear("fp8_blockwise", "block_shape=128x128"), "no error");
  EXPECT_THAT(recipe_error({kGrouped, "--quantize.grouped_mm.mx.recipe_name=fp8_blockwise",
                            "--quantize.grouped_mm.mx.block_shape=32x32"}),
              HasSubstr("quantize.grouped_mm.mx"));
}

TEST(Recipe, UnknownNamesListWhatThereIs) {
  EXPECT_THAT(
      recipe_error({"--quantize.linear.mx.recipe_name=mxfp9"}),
      AllOf(HasSubstr("mxfp9"), HasSubstr("mxfp8, "), HasSubstr("mxfp8_wgrad_with_hp"), HasSubstr("mxfp8_emulated"),
            HasSubstr("fp8_blockwise"), HasSubstr("mxfp8_cublas, "), HasSubstr("mxfp8_cublas_rceil")));
  EXPECT_THAT(recipe_error({"--quantize.grouped_mm.mx.recipe_name=mxfp4"}),
              AllOf(HasSubstr("mxfp4"), HasSubstr("fp8_blockwise"), Not(HasSubstr("cublas"))));
  for (const std::string section : {"quantize.linear.mx", "quantize.grouped_mm.mx"}) {
    EXPECT_THAT(recipe_error({"--" + section + ".scaling_mode=round"}),
                AllOf(HasSubstr(section), HasSubstr("round"), HasSubstr("floor, rceil, ceil, even")));
    EXPECT_THAT(recipe_error({"--" + section + ".block_shape=64x64"}),
                AllOf(HasSubstr(section), HasSubstr("64x64"), HasSubstr("1x32, 32x32, 128x128")));
    EXPECT_THAT(recipe_error({"--" + section + ".unaligned=pad"}), AllOf(HasSubstr("pad"), HasSubstr("error, bf16")));
  }
  EXPECT_THAT(recipe_error({"--model.converters=quantize.linear.mx,quantize.linear.float8"}),
              AllOf(HasSubstr("model.converters"), HasSubstr("'quantize.linear.float8'"),
                    HasSubstr("quantize.linear.mx"), HasSubstr("quantize.grouped_mm.mx")));
}

TEST(Recipe, SitesThatBlocksDoNotDivide) {
  const std::string inter = "--model.args.inter_dim=48", moe_inter = "--model.args.moe_inter_dim=40";
  EXPECT_THAT(recipe_error({kLinear, inter}), AllOf(HasSubstr("layers.0.feed_forward.w2 is 64 x 48"),
                                                    HasSubstr("quantize.linear.mx.unaligned"), HasSubstr("bf16")));
  EXPECT_EQ(recipe_error({kLinear, inter, "--quantize.linear.mx.filter_fqns=feed_forward.w2"}), "no error");
  EXPECT_THAT(recipe_error({kGrouped, moe_inter}),
              AllOf(HasSubstr("layers.1.moe.experts.w13 is 80 x 64"), HasSubstr("quantize.grouped_mm.mx.unaligned")));
  EXPECT_EQ(recipe_error({kLinear, "--model.args.moe_inter_dim=32"}), "no error");
  EXPECT_EQ(recipe_error({inter, moe_inter}), "no error");

  std::vector<std::string> others = linear_sites();
  std::erase(others, "layers.0.feed_forward.w2");
  const Resolved resolved({kLinear, inter, "--quantize.linear.mx.unaligned=bf16"});
  EXPECT_THAT(resolved.quantized(), ::testing::UnorderedElementsAreArray(others));
  // A permission of one converter does not apply to the other.
  EXPECT_THAT(
      recipe_error({kBoth, moe_inter, "--model.args.num_shared_experts=0", "--quantize.linear.mx.unaligned=bf16"}),
      HasSubstr("layers.1.moe.experts.w13"));
  // Blocks of 128 that the matrix cuts off are filled with zeros, so sizes of 96 and 64 are allowed.
  for (const char* choice :
       {"--quantize.linear.mx.recipe_name=fp8_blockwise", "--quantize.linear.mx.block_shape=128x128"}) {
    EXPECT_THAT(Resolved({kLinear, choice}).quantized(), ::testing::UnorderedElementsAreArray(linear_sites()));
  }
}

/// Returns the words of each line but the first, by the line's first word.
std::map<std::string, std::vector<std::string>> rows(const std::string& text) {
  std::map<std::string, std::vector<std::string>> result;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  EXPECT_THAT(line, AllOf(HasSubstr("module"), HasSubstr("fprop"), HasSubstr("dgrad"), HasSubstr("wgrad")));
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name, word;
    words >> name;
    std::vector<std::string> rest;
    while (words >> word) rest.push_back(word);
    EXPECT_TRUE(result.emplace(name, rest).second) << name << " is there twice";
  }
  return result;
}

TEST(Recipe, TableForPeople) {
  const Resolved resolved({kBoth, "--quantize.linear.mx.filter_fqns=output,wo",
                           "--quantize.linear.mx.recipe_name=mxfp8_wgrad_with_hp",
                           "--quantize.linear.mx.scaling_mode=even", "--quantize.linear.mx.block_shape=32x32",
                           "--quantize.grouped_mm.mx.recipe_name=fp8_blockwise"});
  auto table = rows(describe_precisions(resolved.parameters, resolved.table));
  std::vector<std::string> names;
  for (const auto& [name, words] : table) names.push_back(name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(join(join(linear_sites(), grouped_sites()), {"output"})));
  EXPECT_THAT(table["layers.0.feed_forward.w13"],
              ElementsAre("192", "x", "64", "mxfp8", "mxfp8", "bf16", "32x32", "even"));
  EXPECT_THAT(table["layers.0.attention.wo"], ElementsAre("64", "x", "64", "bf16", "bf16", "bf16"));
  EXPECT_THAT(table["mtp.0.block.moe.experts.w2"], ElementsAre("4", "x", "64", "x", "32", "fp8_blockwise",
                                                               "fp8_blockwise", "fp8_blockwise", "128x128", "float32"));

  const Resolved emulated({kBoth, "--quantize.linear.mx.recipe_name=mxfp8_emulated"});
  table = rows(describe_precisions(emulated.parameters, emulated.table));
  EXPECT_THAT(table["layers.1.attention.wkv_a"],
              ElementsAre("96", "x", "64", "mxfp8_emulated", "mxfp8_emulated", "mxfp8_emulated", "1x32", "rceil"));
  // This configuration has no converters.
  const Resolved high({});
  for (const auto& [name, words] : rows(describe_precisions(high.parameters, high.table))) {
    EXPECT_EQ(std::count(words.begin(), words.end(), "bf16"), 3) << name;
  }
}

}  // namespace
}  // namespace tessera
