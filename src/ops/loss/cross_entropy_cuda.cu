// One block of threads per row of logits, which it reads once for the sums and once for the gradient.
#include <cfloat>
#include <cub/block/block_reduce.cuh>

#include "ops/kit/launch.cuh"
#include "ops/loss/cross_entropy.h"

namespace tessera::cuda {
namespace {

/// Few enough that four blocks, 512 rows on 132 multiprocessors, run side by side with kInFlight vectors a thread.
constexpr int kThreads = 256, kInFlight = 4;
constexpr float kLog2E = 1.4426950408889634f;

/// The maximum of some numbers, and the sum of exp of them less it.
struct Sums {
  float max, sum;
};
/// exp(a - b), exactly 1 for a = b; 2^-22 relative for small differences.
__device__ float exp_of_difference(float a, float b) { return exp2f((a - b) * kLog2E); }

struct Merge {
  __device__ Sums operator()(const Sums& a, const Sums& b) const {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp_of_difference(a.max, max) + b.sum * exp_of_difference(b.max, max)};
  }
};

/// The vectors at v, v + kThreads · kCount, ... of a row; -inf beyond its end.
template <int kCount>
__device__ void load_row(const float* row, std::int64_t v, std::int64_t vocab, float (&x)[kInFlight][kCount]) {
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const std::int64_t at = v + i * std::int64_t{kThreads} * kCount;
    if (at < vocab) {
      load_lanes(row + at, x[i]);
    } else {
#pragma unroll
      for (float& number : x[i]) number = -INFINITY;
    }
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads, 4) sums_kernel(const float* logits_TV, const std::int32_t* labels_T,
                                                           std::int64_t vocab, std::int64_t first_id, float* sums_T3) {
  using Reduce = cub::BlockReduce<Sums, kThreads>;
  __shared__ typename Reduce::TempStorage memory;
  const std::int64_t t = blockIdx.x;
  float* out = sums_T3 + t * 3;
  const std::int32_t label = labels_T[t];
  if (label == kIgnoredLabel) {
    if (threadIdx.x < 3) out[threadIdx.x] = 0.0f;
    return;
  }
  const float* row = logits_TV + t * vocab;
  Sums sums = {-FLT_MAX, 0.0f};
  constexpr std::int64_t kStep = std::int64_t{kThreads} * kCount;
  for (std::int64_t v = threadIdx.x * kCount; v < vocab; v += kInFlight * kStep) {
    float x[kInFlight][kCount];
    load_row(row, v, vocab, x);
    float max = sums.max;
#pragma unroll
    for (const auto& vector : x) {
#pragma unroll
      for (const float number : vector) max = fmaxf(max, number);
    }
    sums.sum *= exp_of_difference(sums.max, max);
    sums.max = max;
#pragma unroll
    for (const auto& vector : x) {
#pragma unroll
      for (const float number : vector) sums.sum += exp_of_difference(number, max);
    }
  }
  sums = Reduce(memory).Reduce(sums, Merge());
  if (threadIdx.x != 0) return;
  const std::int64_t at = label - first_id;
  out[0] = sums.max;
  out[1] = sums.sum;
  out[2] = 0 <= at && at < vocab ? row[at] : 0.0f;
}

/// Of a row, over all ranks.
struct RowSums {
  float max, sum, target;
};
__device__ RowSums row_sums(const float* sums_PT3, std::int64_t num_ranks, std::int64_t num_tokens, std::int64_t t) {
  RowSums row = {sums_PT3[t * 3], 0.0f, 0.0f};
  for (std::int64_t rank = 1; rank < num_ranks; ++rank) row.max = fmaxf(row.max, sums_PT3[(rank * num_tokens + t) * 3]);
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    const float* of_rank = sums_PT3 + (rank * num_tokens + t) * 3;
    row.sum += of_rank[1] * expf(of_rank[0] - row.max);
    row.target += of_rank[2];
  }
  return row;
}

__device__ float loss_of(const RowSums& row, std::int32_t label, std::int64_t all) {
  if (label == kIgnoredLabel) return 0.0f;
  return 0 <= label && label < all ? logf(row.sum) + row.max - row.target : NAN;
}

__global__ void losses_kernel(const float* sums_PT3, const std::int32_t* labels_T, std::int64_t num_ranks,
                              std::int64_t num_tokens, std::int64_t vocab, float* losses_T) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= num_tokens) return;
  losses_T[t] = loss_of(row_sums(sums_PT3, num_ranks, num_tokens, t), labels_T[t], num_ranks * vocab);
}

// d_logits may be the logits: a thread writes what it has read.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 4)
    gradient_kernel(const float* sums_PT3, const float* logits_TV, const std::int32_t* labels_T, std::int64_t num_ranks,
                    std::int64_t num_tokens, std::int64_t vocab, std::int64_t first_id, float scale, float* losses_T,
                    T* d_logits_TV) {
  const std::int64_t t = blockIdx.x;
  const std::int32_t label = labels_T[t];
  const RowSums sums = row_sums(sums_PT3, num_ranks, num_tokens, t);
  const bool counts = label != kIgnoredLabel;
  if (threadIdx.x == 0) losses_T[t] = loss_of(sums, label, num_ranks * vocab);
  const float factor = counts ? scale / sums.sum : 0.0f;
  const auto at_label = counts ? static_cast<std::int64_t>(label) - first_id : -1;
  const float* row = logits_TV + t * vocab;
  T* d_row = d_logits_TV + t * vocab;
  constexpr std::int64_t kStep = std::int64_t{kThreads} * kCount;
  for (std::int64_t v = threadIdx.x * kCount; v < vocab; v += kInFlight * kStep) {
    float x[kInFlight][kCount];
    if (counts) load_row(row, v, vocab, x);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t first = v + i * kStep;
      if (first >= vocab) break;
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) {
        x[i][lane] = counts ? factor * exp_of_difference(x[i][lane], sums.max) : 0.0f;
        if (first + lane == at_label) x[i][lane] -= scale;
      }
      store_lanes(x[i], d_row + first);
    }
  }
}

}  // namespace

void cross_entropy_sums(const Context& op, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  if (op.measuring() || logits_TV.dim(0) == 0) return;
  for_lanes(in_lanes(logits_TV), [&](auto lanes) {
    sums_kernel<decltype(lanes)::value><<<static_cast<unsigned>(logits_TV.dim(0)), kThreads, 0, stream_of(op)>>>(
        numbers<const float>(logits_TV), numbers<const std::int32_t>(labels_T), logits_TV.dim(1), first_id,
        numbers<float>(sums_T3));
  });
}

void cross_entropy(const Context& op, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const Tensor& d_logits_TV) {
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  if (op.measuring() || num_tokens == 0) return;
  const auto* sums = numbers<const float>(sums_PT3);
  const auto* labels = numbers<const std::int32_t>(labels_T);
  if (!d_logits_TV.defined()) {
    losses_kernel<<<static_cast<unsigned>((num_tokens + kThreads - 1) / kThreads), kThreads, 0, stream_of(op)>>>(
        sums, labels, num_ranks, num_tokens, vocab, numbers<float>(losses_T));
    return;
  }
  for_float_type(d_logits_TV.dtype(), [&]<typename T>(T) {
    for_lanes(in_lanes(logits_TV, d_logits_TV), [&](auto lanes) {
      // 16 bytes are written at a time.
      constexpr int kCount = std::min<int>(decltype(lanes)::value, 16 / sizeof(T));
      gradient_kernel<T, kCount><<<static_cast<unsigned>(num_tokens), kThreads, 0, stream_of(op)>>>(
          sums, numbers<const float>(logits_TV), labels, num_ranks, num_tokens, vocab, first_id, scale,
          numbers<float>(losses_T), numbers<T>(d_logits_TV));
    });
  });
}

}  // namespace tessera::cuda
