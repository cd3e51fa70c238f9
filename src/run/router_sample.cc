#include "run/router_sample.h"

#include <algorithm>
#include <numeric>

#include "ep/backends/local_dispatcher.h"
#include "model/block.h"
#include "ops/gemm/gemm.h"

namespace tessera {
namespace {

/// Returns the indices of the `count` largest scores; ties go to the lower index.
std::vector<std::size_t> best(std::span<const float> scores, std::int64_t count) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](std::size_t a, std::size_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

/// Returns the experts that DeepseekV2's router chooses: by "group_limited_greedy" with groups, else by "greedy".
std::vector<std::size_t> v2_choice(const ModelConfig& config, std::vector<float> scores) {
  if (config.n_expert_groups > 1) {
    const std::size_t size = scores.size() / static_cast<std::size_t>(config.n_expert_groups);
    std::vector<float> group_scores;
    for (std::size_t begin = 0; begin < scores.size(); begin += size) {
      group_scores.push_back(*std::max_element(scores.begin() + begin, scores.begin() + begin + size));
    }
    std::vector<float> kept(scores.size());
    for (const std::size_t group : best(group_scores, config.n_limited_groups)) {
      std::copy_n(scores.begin() + group * size, size, kept.begin() + group * size);
    }
    scores = std::move(kept);
  }
  return best(scores, config.top_k);
}

std::int64_t count_different(const ModelConfig& config, const RouterOutputs& routing) {
  const std::int64_t num_tokens = routing.scores_TE.dim(0);
  std::int64_t num_different = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const float* scores = routing.scores_TE.data<float>() + t * config.num_experts;
    const std::vector<std::size_t> theirs = v2_choice(config, {scores, scores + config.num_experts});
    const std::int32_t* ours = routing.expert_ids_TK.data<std::int32_t>() + t * config.top_k;
    num_different += std::count_if(ours, ours + config.top_k, [&](std::int32_t expert) {
      return std::find(theirs.begin(), theirs.end(), static_cast<std::size_t>(expert)) == theirs.end();
    });
  }
  return num_different;
}

}  // namespace

std::vector<RoutingDifference> compare_with_v2_router(const SavedModel& saved, std::span<const std::int32_t> tokens) {
  ModelConfig config = saved.config().model;
  config.attn_mask_type = AttentionMask::kCausal;
  config.num_mtp_modules = 0;
  config.seq_balance_loss_coeff = 0.0f;
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  Batch batch(config, 1, num_tokens);
  std::vector<std::int32_t> row(tokens.begin(), tokens.end());
  row.push_back(0);  // label of the last token, which is not read
  batch.fill(row);

  const RopeTable rope(config, saved.config().seq_len, num_tokens);
  ep::LocalDispatcher dispatcher(dispatch_options(config, DType::kFloat32, num_tokens));
  const QuantizedWeights unquantized;
  const Shape shape{num_tokens, config.dim};
  std::vector<float> x(static_cast<std::size_t>(shape.num_elements())), out(x.size());
  {
    std::vector<float> table_VD;
    saved.read("tok_embeddings.weight", {config.vocab_size, config.dim}, [&](std::span<const float> numbers) {
      table_VD.insert(table_VD.end(), numbers.begin(), numbers.end());
    });
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      std::copy_n(table_VD.begin() + tokens[static_cast<std::size_t>(t)] * config.dim, config.dim,
                  x.begin() + t * config.dim);
    }
  }

  std::vector<RoutingDifference> differences;
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    Parameters parameters;
    const Block block(parameters, config, config.is_moe_layer(layer), fmt::format("layers.{}.", layer), layer);
    parameters.allocate_weights(DType::kFloat32);
    saved.load_tensors(parameters);
    const Environment environment{.config = &config,
                                  .parameters = &parameters,
                                  .quantized = &unquantized,
                                  .rope = &rope,
                                  .dispatcher = &dispatcher};
    const auto run = [&](Arena& arena) {
      const bool measuring = arena.device() == Device::kMeta;
      const LayerContext context{.model = &environment, .op = {.arena = &arena}, .batch = &batch};
      const auto tensor = [&](std::vector<float>& numbers) {
        return Tensor(measuring ? nullptr : numbers.data(), shape, DType::kFloat32, arena.device());
      };
      const ArenaScope scope(arena);
      BlockSaved kept;
      block.forward(context, tensor(x), kept, tensor(out), {});
      if (measuring || block.moe() == nullptr) return;
      differences.push_back({.layer = block.moe()->name(),
                             .num_different = count_different(config, kept.moe.routing),
                             .num_selections = num_tokens * config.top_k});
    };
    Arena measured;
    run(measured);
    Arena arena(measured.peak());
    run(arena);
    std::swap(x, out);
  }
  return differences;
}

}  // namespace tessera
