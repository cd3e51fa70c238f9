#include "model/config.h"

#include <cmath>

#include "base/error.h"

namespace tessera {

float ModelConfig::softmax_scale(std::int64_t seq_len) const {
  const double scale = 1.0 / std::sqrt(static_cast<double>(qk_head_dim()));
  if (seq_len <= original_seq_len) return static_cast<float>(scale);
  const double m = 0.1 * mscale * std::log(static_cast<double>(rope_factor)) + 1.0;
  return static_cast<float>(scale * m * m);
}

void ModelConfig::validate() const {
  // Far above any model, and small enough that no product of two sizes overflows.
  static constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
  const auto positive = [](std::string_view key, std::int64_t value) {
    require(0 < value && value <= kMaxSize, "model.args.{} is {}; expected a number from 1 to {}", key, value,
            kMaxSize);
  };
  positive("vocab_size", vocab_size);
  positive("dim", dim);
  positive("inter_dim", inter_dim);
  positive("n_layers", n_layers);
  positive("n_heads", n_heads);
  positive("kv_lora_rank", kv_lora_rank);
  positive("qk_nope_head_dim", qk_nope_head_dim);
  positive("qk_rope_head_dim", qk_rope_head_dim);
  positive("v_head_dim", v_head_dim);
  positive("original_seq_len", original_seq_len);
  if (q_lora_rank != 0) positive("q_lora_rank", q_lora_rank);
  require(qk_rope_head_dim % 2 == 0, "model.args.qk_rope_head_dim is {}; expected an even number (RoPE turns pairs)",
          qk_rope_head_dim);
  const auto positive_number = [](std::string_view key, float value) {
    require(0.0f < value && value < HUGE_VALF, "model.args.{} is {}; expected a finite number above 0", key, value);
  };
  positive_number("norm_eps", norm_eps);
  positive_number("route_scale", route_scale);
  positive_number("beta_fast", beta_fast);
  positive_number("beta_slow", beta_slow);
  require(1.0f < rope_theta && rope_theta < HUGE_VALF, "model.args.rope_theta is {}; expected a finite number above 1",
          rope_theta);
  require(1.0f <= rope_factor && rope_factor < HUGE_VALF,
          "model.args.rope_factor is {}; expected a finite number from 1", rope_factor);
  for (const auto& [key, value] : {std::pair{"mscale", mscale},
                                   {"load_balance_coeff", load_balance_coeff},
                                   {"seq_balance_loss_coeff", seq_balance_loss_coeff},
                                   {"mtp_loss_weight", mtp_loss_weight}}) {
    require(0.0f <= value && value < HUGE_VALF, "model.args.{} is {}; expected a finite number from 0", key, value);
  }
  require(0 <= n_dense_layers && n_dense_layers <= n_layers,
          "model.args.n_dense_layers is {}; expected 0 to n_layers = {}", n_dense_layers, n_layers);
  if (num_mtp_modules != 0) positive("num_mtp_modules", num_mtp_modules);
  constexpr std::int64_t kMaxLayers = 1024;  // more than any model has; the table of parameters takes their square
  for (const auto& [key, value] : {std::pair{"n_layers", n_layers}, {"num_mtp_modules", num_mtp_modules}}) {
    require(value <= kMaxLayers, "model.args.{} is {}; expected at most {}", key, value, kMaxLayers);
  }
  require(-1 <= eos_id && eos_id < vocab_size, "model.args.eos_id is {}; expected -1 to vocab_size - 1 = {}", eos_id,
          vocab_size - 1);
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const double per_layer = number(dim) * (3.0 * number(moe_inter_dim) * number(num_experts + num_shared_experts) +
                                          number(n_heads) * number(qk_head_dim() + v_head_dim) + number(inter_dim)) +
                           number(n_heads) * (number(kv_lora_rank) * number(qk_nope_head_dim + v_head_dim) +
                                              number(q_lora_rank) * number(qk_head_dim()));
  require(number(vocab_size) * number(dim) + number(n_layers + num_mtp_modules) * per_layer < 0x1p50,
          "model.args describe a model of more than 2^50 parameters");
  if (n_dense_layers == n_layers) return;

  positive("moe_inter_dim", moe_inter_dim);
  positive("num_experts", num_experts);
  positive("top_k", top_k);
  if (num_shared_experts != 0) positive("num_shared_experts", num_shared_experts);
  require(top_k <= num_experts, "model.args.top_k is {}, but there are only num_experts = {}", top_k, num_experts);
  require(n_expert_groups >= 0, "model.args.n_expert_groups is {}; expected 0 (none) or more", n_expert_groups);
  if (n_expert_groups == 0) return;
  require(num_experts % n_expert_groups == 0, "model.args.num_experts = {} do not divide into n_expert_groups = {}",
          num_experts, n_expert_groups);
  require(1 <= n_limited_groups && n_limited_groups <= n_expert_groups,
          "model.args.n_limited_groups is {}; expected 1 to n_expert_groups = {}", n_limited_groups, n_expert_groups);
  const std::int64_t reachable = num_experts / n_expert_groups * n_limited_groups;
  require(top_k <= reachable, "model.args.top_k is {}, but n_limited_groups = {} of n_expert_groups = {} hold only {}",
          top_k, n_limited_groups, n_expert_groups, reachable);
}

namespace {

struct Flavor {
  const char* name;
  ModelConfig config;
};

const Flavor kFlavors[] = {
    {"debugmodel", {}},
    {"16B",
     {.vocab_size = 102400,
      .dim = 2048,
      .inter_dim = 10944,
      .moe_inter_dim = 1408,
      .n_layers = 27,
      .n_dense_layers = 1,
      .n_heads = 16,
      .num_experts = 64,
      .num_shared_experts = 2,
      .top_k = 6}},
    {"236B",
     {.vocab_size = 102400,
      .dim = 5120,
      .inter_dim = 12288,
      .moe_inter_dim = 1536,
      .n_layers = 60,
      .n_dense_layers = 1,
      .n_heads = 128,
      .num_experts = 160,
      .num_shared_experts = 2,
      .top_k = 6,
      .route_scale = 16.0f,
      .n_expert_groups = 8,
      .n_limited_groups = 3,
      .q_lora_rank = 1536,
      .mscale = 1.0f}},
    {"671B",
     {.vocab_size = 129280,
      .dim = 7168,
      .inter_dim = 18432,
      .moe_inter_dim = 2048,
      .n_layers = 61,
      .n_dense_layers = 3,
      .n_heads = 128,
      .num_experts = 256,
      .num_shared_experts = 1,
      .top_k = 8,
      .score_func = ScoreFunction::kSigmoid,
      .route_norm = true,
      .route_scale = 2.5f,
      .n_expert_groups = 8,
      .n_limited_groups = 4,
      .q_lora_rank = 1536,
      .mscale = 1.0f}},
};

}  // namespace

ModelConfig model_flavor(std::string_view name) {
  for (const Flavor& flavor : kFlavors) {
    if (name == flavor.name) return flavor.config;
  }
  fail("model.flavor is '{}'; expected one of {}", name, fmt::join(model_flavor_names(), ", "));
}

std::vector<std::string> model_flavor_names() {
  std::vector<std::string> names;
  for (const Flavor& flavor : kFlavors) names.emplace_back(flavor.name);
  return names;
}

double flop_per_token(const ModelConfig& config, const ParameterCounts& counts, std::int64_t seq_len) {
  const double attention = static_cast<double>(config.n_layers * config.n_heads) *
                           static_cast<double>(config.qk_head_dim() + config.v_head_dim) * static_cast<double>(seq_len);
  return 6.0 * (static_cast<double>(counts.active - counts.embedding) + attention);
}

}  // namespace tessera
