#include <cmath>
#include <limits>
#include <span>

#include "ops/cpu/types.h"
#include "ops/routing/router.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kTokensPerTask = 64;
constexpr float kExcluded = -std::numeric_limits<float>::infinity();

void score(ScoreFunction function, std::span<const float> logits, std::span<float> scores) {
  if (function == ScoreFunction::kSigmoid) {
    for (std::size_t e = 0; e < scores.size(); ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float max = *std::max_element(logits.begin(), logits.end());
  float sum = 0.0f;
  for (std::size_t e = 0; e < scores.size(); ++e) sum += scores[e] = std::exp(logits[e] - max);
  for (float& value : scores) value /= sum;
}

/// Writes the indices of the `ids.size()` highest values to `ids`, in falling order. Ties go to the lower index. Marks
/// the values as kExcluded.
void take_top(std::span<float> values, std::span<std::int32_t> ids) {
  for (std::int32_t& id : ids) {
    // max_element returns the first of equal values.
    const auto best = std::max_element(values.begin(), values.end());
    id = static_cast<std::int32_t>(best - values.begin());
    *best = kExcluded;
  }
}

/// Sets the biased scores of all but the best groups to kExcluded.
void limit_groups(const RouterOptions& options, std::span<float> biased, std::span<float> group_scores,
                  std::span<std::int32_t> group_ids) {
  const std::size_t group_size = biased.size() / group_scores.size();
  for (std::size_t g = 0; g < group_scores.size(); ++g) {
    float first = kExcluded, second = kExcluded;
    for (const float value : biased.subspan(g * group_size, group_size)) {
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    group_scores[g] = group_size > 1 ? first + second : first;
  }
  const auto kept = group_ids.first(static_cast<std::size_t>(options.num_limited_groups));
  take_top(group_scores, kept);
  for (std::size_t g = 0; g < group_scores.size(); ++g) {
    if (std::find(kept.begin(), kept.end(), static_cast<std::int32_t>(g)) != kept.end()) continue;
    std::fill_n(biased.begin() + static_cast<std::ptrdiff_t>(g * group_size), group_size, kExcluded);
  }
}

}  // namespace

void router_forward(const Context& context, const RouterOptions& options, const Tensor& logits_TE,
                    const Tensor& expert_bias_E, const RouterOutputs& outputs) {
  const std::int64_t num_tokens = logits_TE.dim(0), num_experts = logits_TE.dim(1), top_k = options.top_k;
  const std::int64_t num_tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const ArenaScope scope(*context.arena);
  // Each task has biased scores and group scores in `work`, and its chosen groups in `work_ids`.
  const Tensor work = context.arena->allocate({num_tasks, 2 * num_experts}, DType::kFloat32);
  const Tensor work_ids = context.arena->allocate({num_tasks, num_experts}, DType::kInt32);
  if (context.measuring()) return;

  const auto experts = static_cast<std::size_t>(num_experts);
  const std::span<const float> bias(expert_bias_E.data<float>(), experts);
  parallel_for(num_tasks, [&](std::int64_t task) {
    const std::span<float> biased(row_of<float>(work, task), experts);
    const std::span<float> group_scores(biased.data() + num_experts, static_cast<std::size_t>(options.num_groups));
    const std::span<std::int32_t> group_ids(row_of<std::int32_t>(work_ids, task), experts);
    for (std::int64_t t = task * kTokensPerTask; t < std::min(num_tokens, (task + 1) * kTokensPerTask); ++t) {
      const std::span<float> scores(row_of<float>(outputs.scores_TE, t), experts);
      const std::span<std::int32_t> ids(row_of<std::int32_t>(outputs.expert_ids_TK, t),
                                        static_cast<std::size_t>(top_k));
      score(options.score_function, {row_of<float>(logits_TE, t), experts}, scores);
      if (options.force_load_balance) {
        for (std::int64_t k = 0; k < top_k; ++k) {
          ids[static_cast<std::size_t>(k)] = static_cast<std::int32_t>((t * top_k + k) % num_experts);
        }
      } else {
        for (std::size_t e = 0; e < experts; ++e) {
          const float sum = scores[e] + bias[e];
          biased[e] = std::isnan(sum) ? 0.0f : sum;
        }
        if (options.num_groups > 0) limit_groups(options, biased, group_scores, group_ids);
        take_top(biased, ids);
      }
      float* weights = row_of<float>(outputs.weights_TK, t);
      float sum = kRouteNormEpsilon;
      for (std::int64_t k = 0; k < top_k; ++k) {
        weights[k] = scores[static_cast<std::size_t>(ids[static_cast<std::size_t>(k)])];
        sum += weights[k];
      }
      const float factor = options.route_norm ? options.route_scale / sum : options.route_scale;
      for (std::int64_t k = 0; k < top_k; ++k) weights[k] *= factor;
    }
  });

  std::int32_t* counts = outputs.counts_E.data<std::int32_t>();
  std::fill(counts, counts + num_experts, 0);
  const std::int32_t* ids = outputs.expert_ids_TK.data<std::int32_t>();
  for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) ++counts[ids[slot]];
}

void balance_sums(const Context& context, const RouterOptions& options, const Tensor& scores_TE,
                  const Tensor& sums_B2E) {
  const std::int64_t num_tokens = scores_TE.dim(0), num_experts = scores_TE.dim(1), num_seqs = sums_B2E.dim(0);
  const std::int64_t first = options.first_token, per_seq = options.tokens_per_seq;
  const ArenaScope scope(*context.arena);
  const Tensor work = context.arena->allocate({num_seqs, num_experts}, DType::kFloat32);
  const Tensor work_ids = context.arena->allocate({num_seqs, options.top_k}, DType::kInt32);
  if (context.measuring()) return;
  const auto experts = static_cast<std::size_t>(num_experts);
  parallel_for(num_seqs, [&](std::int64_t b) {
    float* counts = sums_B2E.data<float>() + b * 2 * num_experts;
    float* shares = counts + num_experts;
    std::fill(counts, counts + 2 * num_experts, 0.0f);
    const std::span<float> values(row_of<float>(work, b), experts);
    const std::span<std::int32_t> ids(row_of<std::int32_t>(work_ids, b), static_cast<std::size_t>(options.top_k));
    const std::int64_t end = std::min(num_tokens, (b + 1) * per_seq - first);
    for (std::int64_t t = std::max<std::int64_t>(0, b * per_seq - first); t < end; ++t) {
      const std::span<const float> scores(row_of<float>(scores_TE, t), experts);
      float sum = 0.0f;
      for (const float s : scores) sum += s;
      for (std::size_t e = 0; e < experts; ++e) shares[e] += scores[e] / sum;
      std::copy(scores.begin(), scores.end(), values.begin());
      take_top(values, ids);
      for (const std::int32_t id : ids) counts[id] += 1.0f;
    }
  });
}

void balance_loss(const Context& context, const RouterOptions& options, const Tensor& sums_B2E, const Tensor& f_BE,
                  const Tensor& loss_1) {
  const std::int64_t num_seqs = sums_B2E.dim(0), num_experts = sums_B2E.dim(2);
  if (context.measuring()) return;
  const float length = static_cast<float>(options.seq_len);
  const float to_f = static_cast<float>(num_experts) / (static_cast<float>(options.top_k) * length);
  double balance = 0.0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    const float* counts = sums_B2E.data<float>() + b * 2 * num_experts;
    const float* shares = counts + num_experts;
    float* f_E = row_of<float>(f_BE, b);
    double loss = 0.0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      f_E[e] = counts[e] * to_f;
      loss += static_cast<double>(f_E[e]) * shares[e] / length;
    }
    balance += static_cast<float>(options.balance_coefficient * loss);
  }
  if (loss_1.defined()) loss_1.data<double>()[0] += balance;
}

void router_backward(const Context& context, const RouterOptions& options, const RouterOutputs& outputs,
                     const Tensor& d_weights_TK, float balance_scale, const Tensor& d_logits_TE) {
  const std::int64_t num_tokens = d_logits_TE.dim(0), num_experts = d_logits_TE.dim(1), top_k = options.top_k;
  if (context.measuring()) return;
  const auto experts = static_cast<std::size_t>(num_experts);
  parallel_ranges(num_tokens, kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::span<const float> scores(row_of<float>(outputs.scores_TE, t), experts);
      const std::int32_t* ids = row_of<std::int32_t>(outputs.expert_ids_TK, t);
      const float* weights = row_of<float>(outputs.weights_TK, t);
      const float* d_weights = row_of<float>(d_weights_TK, t);
      // d_row first holds the gradient of the scores, and then that of the logits.
      const std::span<float> d_row(row_of<float>(d_logits_TE, t), experts);
      std::fill(d_row.begin(), d_row.end(), 0.0f);

      if (options.route_norm) {
        // From w_k = c · s_k / (sum + eps) follows d_s_k = (c · d_w_k - sum_j d_w_j · w_j) / (sum + eps).
        float sum = kRouteNormEpsilon, dot = 0.0f;
        for (std::int64_t k = 0; k < top_k; ++k) {
          sum += scores[static_cast<std::size_t>(ids[k])];
          dot += d_weights[k] * weights[k];
        }
        for (std::int64_t k = 0; k < top_k; ++k) {
          d_row[static_cast<std::size_t>(ids[k])] += (options.route_scale * d_weights[k] - dot) / sum;
        }
      } else {
        for (std::int64_t k = 0; k < top_k; ++k) {
          d_row[static_cast<std::size_t>(ids[k])] += options.route_scale * d_weights[k];
        }
      }

      if (options.balance_coefficient != 0.0f) {
        // Per token, the loss contains c · f_i · (s_i / sum), where c = coefficient / S.
        const float* f = row_of<float>(outputs.balance_f_BE, (options.first_token + t) / options.tokens_per_seq);
        const float c = balance_scale * options.balance_coefficient / static_cast<float>(options.seq_len);
        float sum = 0.0f, dot = 0.0f;
        for (std::size_t e = 0; e < experts; ++e) {
          sum += scores[e];
          dot += f[e] * scores[e];
        }
        for (std::size_t e = 0; e < experts; ++e) d_row[e] += c * (f[e] - dot / sum) / sum;
      }

      if (options.score_function == ScoreFunction::kSigmoid) {
        for (std::size_t e = 0; e < experts; ++e) d_row[e] *= scores[e] * (1.0f - scores[e]);
      } else {
        float dot = 0.0f;
        for (std::size_t e = 0; e < experts; ++e) dot += d_row[e] * scores[e];
        for (std::size_t e = 0; e < experts; ++e) d_row[e] = scores[e] * (d_row[e] - dot);
      }
    }
  });
}

}  // namespace tessera::cpu
