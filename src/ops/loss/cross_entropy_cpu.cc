#include <cmath>

#include "ops/cpu/math.h"
#include "ops/cpu/operand_output.h"
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

/// Returns the size of a thread's row of bfloat16 logits in float32.
std::size_t widened_bytes(const Tensor& logits_TV) {
  return logits_TV.dtype() == DType::kFloat32 ? 0 : static_cast<std::size_t>(logits_TV.dim(1)) * sizeof(float);
}

/// Returns row t of the logits in float32: the row itself, or a widened copy in `scratch`.
float* row_in_float(const Tensor& logits_TV, std::int64_t t, const ThreadScratch& scratch) {
  if (logits_TV.dtype() == DType::kFloat32) return row_of<float>(logits_TV, t);
  const BFloat16* row = row_of<BFloat16>(logits_TV, t);
  auto* widened = reinterpret_cast<float*>(scratch.mine());
  for (std::int64_t v = 0; v < logits_TV.dim(1); ++v) widened[v] = load(row[v]);
  return widened;
}

}  // namespace

void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  const std::int64_t num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  const ThreadScratch scratch(context, widened_bytes(logits_TV));
  if (context.measuring()) return;
  parallel_ranges(num_tokens, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t label = labels_T.data<std::int32_t>()[t];
      float* sums = row_of<float>(sums_T3, t);
      std::fill(sums, sums + 3, 0.0f);
      if (label == kIgnoredLabel) continue;
      float* row = row_in_float(logits_TV, t, scratch);
      const std::int64_t at = label - first_id;
      if (0 <= at && at < vocab) sums[2] = row[at];
      sums[0] = row_max(row, vocab);
      sums[1] = exp_and_sum(row, sums[0], vocab);
    }
  });
}

void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV) {
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  const bool has_gradient = d_logits_TV.plain.defined() || d_logits_TV.quantized();
  const DType dtype = d_logits_TV.plain.defined() ? d_logits_TV.plain.dtype() : logits_TV.dtype();
  const OperandOutput output(context, d_logits_TV, vocab, dtype);
  const ThreadScratch scratch(context, widened_bytes(logits_TV));
  if (context.measuring()) return;
  // Computes row t of the gradient, and returns the loss.
  const auto row_gradient = [&]<typename T>(std::int64_t t, T* d_row) {
    const std::int32_t label = labels_T.data<std::int32_t>()[t];
    if (label == kIgnoredLabel) {
      if (has_gradient) std::fill(d_row, d_row + vocab, T(0.0f));
      return 0.0f;
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
    const float loss = std::log(sum) + max - target;
    if (!has_gradient) return loss;
    const float own_max = sums_of(first_id / vocab)[0];
    float* exps = row_in_float(logits_TV, t, scratch);
    if (logits_TV.dtype() != DType::kFloat32) exp_and_sum(exps, own_max, vocab);
    const float factor = scale / sum * std::exp(own_max - max);
    const std::int64_t at = label - first_id;
    const bool is_here = 0 <= at && at < vocab;
    const float at_label = is_here ? exps[at] * factor - scale : 0.0f;
    for (std::int64_t v = 0; v < vocab; ++v) store(d_row[v], exps[v] * factor);
    if (is_here) store(d_row[at], at_label);
    return loss;
  };
  for_float_type(dtype, [&]<typename T>(T) {
    parallel_ranges(num_tokens, output.rows_per_task(8), [&](std::int64_t begin, std::int64_t end) {
      T* rows = has_gradient ? output.rows<T>(begin) : nullptr;
      for (std::int64_t t = begin; t < end; ++t) {
        losses_T.data<float>()[t] = row_gradient(t, has_gradient ? rows + (t - begin) * vocab : nullptr);
      }
      output.finish<T>(begin, end);
    });
  });
}

}  // namespace tessera::cpu
