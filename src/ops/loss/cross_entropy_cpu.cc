#include <cmath>

#include "ops/cpu/math.h"
#include "ops/cpu/types.h"
#include "ops/loss/cross_entropy.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kLossLanes = 16;

float row_max(const float* x, std::int64_t length) {
  float lanes[kLossLanes];
  std::fill(lanes, lanes + kLossLanes, x[0]);
  std::int64_t j = 0;
  for (; j + kLossLanes <= length; j += kLossLanes) {
    for (std::int64_t lane = 0; lane < kLossLanes; ++lane) {
      lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    }
  }
  for (; j < length; ++j) lanes[0] = std::max(lanes[0], x[j]);
  return *std::max_element(lanes, lanes + kLossLanes);
}

/// Replaces x by exp(x - offset) and returns the sum.
float exp_and_sum(float* x, float offset, std::int64_t length) {
  float lanes[kLossLanes] = {};
  std::int64_t j = 0;
  for (; j + kLossLanes <= length; j += kLossLanes) {
    for (std::int64_t lane = 0; lane < kLossLanes; ++lane) {
      const float value = exp_fast(x[j + lane] - offset);
      x[j + lane] = value;
      lanes[lane] += value;
    }
  }
  float sum = 0.0f;
  for (; j < length; ++j) sum += x[j] = exp_fast(x[j] - offset);
  for (const float lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  const std::int64_t num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  if (context.measuring()) return;
  parallel_ranges(num_tokens, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t label = labels_T.data<std::int32_t>()[t];
      float* sums = row_of<float>(sums_T3, t);
      std::fill(sums, sums + 3, 0.0f);
      if (label == kIgnoredLabel) continue;
      float* row = row_of<float>(logits_TV, t);
      const std::int64_t at = label - first_id;
      if (0 <= at && at < vocab) sums[2] = row[at];
      sums[0] = row_max(row, vocab);
      sums[1] = exp_and_sum(row, sums[0], vocab);
    }
  });
}

void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const Tensor& d_logits_TV) {
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  if (context.measuring()) return;
  const auto rows = [&]<typename T>(T* d_logits) {
    parallel_ranges(num_tokens, 8, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int32_t label = labels_T.data<std::int32_t>()[t];
        T* d_row = d_logits == nullptr ? nullptr : d_logits + t * vocab;
        if (label == kIgnoredLabel) {
          losses_T.data<float>()[t] = 0.0f;
          if (d_row != nullptr) std::fill(d_row, d_row + vocab, T(0.0f));
          continue;
        }
        TESSERA_CHECK(0 <= label && label < num_ranks * vocab, "label {} of {}", label, num_ranks * vocab);
        const auto sums_of = [&](std::int64_t rank) { return sums_PT3.data<float>() + (rank * num_tokens + t) * 3; };
        float max = sums_of(0)[0];
        for (std::int64_t rank = 1; rank < num_ranks; ++rank) max = std::max(max, sums_of(rank)[0]);
        float sum = 0.0f, target = 0.0f;
        for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
          sum += sums_of(rank)[1] * std::exp(sums_of(rank)[0] - max);
          target += sums_of(rank)[2];
        }
        losses_T.data<float>()[t] = std::log(sum) + max - target;
        if (d_row == nullptr) continue;
        const float* exps = row_of<float>(logits_TV, t);
        const float factor = scale / sum * std::exp(sums_of(first_id / vocab)[0] - max);
        const std::int64_t at = label - first_id;
        const bool is_here = 0 <= at && at < vocab;
        const float at_label = is_here ? exps[at] * factor - scale : 0.0f;
        for (std::int64_t v = 0; v < vocab; ++v) store(d_row[v], exps[v] * factor);
        if (is_here) store(d_row[at], at_label);
      }
    });
  };
  if (!d_logits_TV.defined()) {
    rows(static_cast<float*>(nullptr));
  } else {
    for_float_type(d_logits_TV.dtype(), [&]<typename T>(T) { rows(d_logits_TV.data<T>()); });
  }
}

}  // namespace tessera::cpu
