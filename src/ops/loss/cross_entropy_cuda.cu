// A row of logits is read twice: by one block of threads for the sums, and then for the gradient. For the gradient one
// block reads the row, or, if the gradient is quantized, blocks read it tile by tile.
#include <cfloat>
#include <cub/block/block_reduce.cuh>

#include "ops/kit/ptx.cuh"
#include "ops/loss/cross_entropy.h"
#include "ops/quantize/tile_quantizer.cuh"

namespace tessera::cuda {
namespace {

/// With these sizes four blocks fit on an SM, and each thread has kInFlight vectors in flight.
constexpr int kThreads = 256, kInFlight = 4;
constexpr float kLog2E = 1.4426950408889634f;

/// Holds the maximum of some numbers, and the sum of exp(number - maximum).
struct Sums {
  float max, sum;
};
/// Returns exp(a - b). It is exactly 1 for a = b, and within 2^-22 relative for small differences. Below 2^-126 it is
/// 0.
__device__ float exp_of_difference(float a, float b) { return ptx::exp2_approx((a - b) * kLog2E); }

struct Merge {
  __device__ Sums operator()(const Sums& a, const Sums& b) const {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp_of_difference(a.max, max) + b.sum * exp_of_difference(b.max, max)};
  }
};

/// Loads the vectors at v, v + kThreads · kCount, ... of a row. Numbers beyond its end become -inf.
template <typename L, int kCount>
__device__ void load_row(const L* row, std::int64_t v, std::int64_t vocab, float (&x)[kInFlight][kCount]) {
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

template <typename L, int kCount>
__global__ void __launch_bounds__(kThreads, 4) sums_kernel(const L* logits_TV, const std::int32_t* labels_T,
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
  const L* row = logits_TV + t * vocab;
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
  out[2] = 0 <= at && at < vocab ? to_float(row[at]) : 0.0f;
}

/// Holds the sums of a row over all ranks.
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

/// Turns logits of a row into scale · softmax. A row that does not count has the factor 0, and may hold any numbers.
template <int kCount>
__device__ void to_softmax(float (&x)[kCount], float max, float factor) {
#pragma unroll
  for (float& number : x) number = factor == 0.0f ? 0.0f : __fmul_rn(factor, exp_of_difference(number, max));
}
/// Subtracts scale · onehot(label). The label is number `at_label`, if it is one of these.
template <int kCount>
__device__ void subtract_label(float (&x)[kCount], std::int32_t at_label, float scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = i == at_label ? x[i] - scale : x[i];
}

// d_logits may be the logits, because a thread writes only what it has read.
template <typename L, typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 4)
    gradient_kernel(const float* sums_PT3, const L* logits_TV, const std::int32_t* labels_T, std::int64_t num_ranks,
                    std::int64_t num_tokens, std::int64_t vocab, std::int64_t first_id, float scale, float* losses_T,
                    T* d_logits_TV) {
  const std::int64_t t = blockIdx.x;
  const std::int32_t label = labels_T[t];
  const RowSums sums = row_sums(sums_PT3, num_ranks, num_tokens, t);
  const bool counts = label != kIgnoredLabel;
  if (threadIdx.x == 0) losses_T[t] = loss_of(sums, label, num_ranks * vocab);
  const float factor = counts ? scale / sums.sum : 0.0f;
  const std::int64_t at_label = counts ? label - first_id : -1;
  const L* row = logits_TV + t * vocab;
  T* d_row = d_logits_TV + t * vocab;
  constexpr std::int64_t kStep = std::int64_t{kThreads} * kCount;
  for (std::int64_t v = threadIdx.x * kCount; v < vocab; v += kInFlight * kStep) {
    float x[kInFlight][kCount];
    if (counts) load_row(row, v, vocab, x);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t first = v + i * kStep;
      if (first >= vocab) break;
      to_softmax(x[i], sums.max, factor);
      subtract_label(x[i], static_cast<std::int32_t>(at_label - first), scale);
      store_lanes(x[i], d_row + first);
    }
  }
}

/// Holds what the gradient of a row needs. A thread reads it in one access.
struct alignas(16) RowGradient {
  float max, factor;
  std::int32_t at_label;  // index of the label in this rank's row, or -1 if another rank has it
};

__global__ void rows_kernel(const float* sums_PT3, const std::int32_t* labels_T, std::int64_t num_ranks,
                            std::int64_t num_tokens, std::int64_t vocab, std::int64_t first_id, float scale,
                            float* losses_T, RowGradient* rows_T) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= num_tokens) return;
  const std::int32_t label = labels_T[t];
  const RowSums sums = row_sums(sums_PT3, num_ranks, num_tokens, t);
  losses_T[t] = loss_of(sums, label, num_ranks * vocab);
  const bool counts = label != kIgnoredLabel;
  const std::int64_t at = counts ? label - first_id : -1;
  rows_T[t] = {.max = sums.max,
               .factor = counts ? scale / sums.sum : 0.0f,
               .at_label = 0 <= at && at < vocab ? static_cast<std::int32_t>(at) : -1};
}

/// Produces the gradient for the tile quantizer.
template <typename T>
struct Gradient {
  using Number = T;
  static constexpr int kInFlight = 4, kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
  template <int kCount>
  struct Input {
    Lanes<T, kCount> logits;
    float max, factor;
    std::int32_t at_label;  // relative to the first of the logits
  };

  const T* logits_TV;
  const RowGradient* rows_T;
  std::int64_t vocab;
  float scale;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t, std::int64_t row, std::int64_t column) const {
    const RowGradient of_row = rows_T[row];
    return {get_lanes<kCount>(logits_TV + row * vocab + column), of_row.max, of_row.factor,
            of_row.at_label - static_cast<std::int32_t>(column)};
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const auto&, Lanes<T, kCount> (&out)[1], float&) const {
    float x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = to_float(input.logits.x[i]);
    to_softmax(x, input.max, input.factor);
    if (static_cast<std::uint32_t>(input.at_label) < kCount) subtract_label(x, input.at_label, scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[0].x[i] = from_float<T>(x[i]);
  }
};

unsigned blocks_for(std::int64_t num_tokens) { return static_cast<unsigned>((num_tokens + kThreads - 1) / kThreads); }

}  // namespace

void cross_entropy_sums(const Context& op, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  if (op.measuring() || logits_TV.dim(0) == 0) return;
  for_float_type(logits_TV.dtype(), [&]<typename L>(L) {
    for_lanes(in_lanes(logits_TV), [&](auto lanes) {
      sums_kernel<L, decltype(lanes)::value><<<static_cast<unsigned>(logits_TV.dim(0)), kThreads, 0, stream_of(op)>>>(
          numbers<const L>(logits_TV), numbers<const std::int32_t>(labels_T), logits_TV.dim(1), first_id,
          numbers<float>(sums_T3));
    });
  });
}

void cross_entropy(const Context& op, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV) {
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  const Tensor& plain = d_logits_TV.plain;
  const ArenaScope scope(*op.arena);
  Tensor rows;
  if (d_logits_TV.quantized()) {
    constexpr std::int64_t kNumbers = sizeof(RowGradient) / sizeof(float);
    rows = op.arena->allocate({num_tokens, kNumbers}, DType::kFloat32);
  }
  if (op.measuring() || num_tokens == 0) return;
  const auto* sums = numbers<const float>(sums_PT3);
  const auto* labels = numbers<const std::int32_t>(labels_T);
  if (d_logits_TV.quantized()) {
    auto* rows_T = static_cast<RowGradient*>(rows.raw());
    rows_kernel<<<blocks_for(num_tokens), kThreads, 0, stream_of(op)>>>(
        sums, labels, num_ranks, num_tokens, vocab, first_id, scale, numbers<float>(losses_T), rows_T);
    for_float_type(logits_TV.dtype(), [&]<typename T>(T) {
      const TileArgs<Gradient<T>> args{
          .producer = {.logits_TV = numbers<const T>(logits_TV), .rows_T = rows_T, .vocab = vocab, .scale = scale},
          .outputs = {tile_outputs<T>(d_logits_TV)},
          .num_rows = num_tokens,
          .length = vocab};
      run_tiles(op, args, in_lanes(logits_TV, plain));
    });
    return;
  }
  if (!plain.defined()) {
    losses_kernel<<<blocks_for(num_tokens), kThreads, 0, stream_of(op)>>>(sums, labels, num_ranks, num_tokens, vocab,
                                                                          numbers<float>(losses_T));
    return;
  }
  for_float_type(logits_TV.dtype(), [&]<typename L>(L) {
    for_float_type(plain.dtype(), [&]<typename T>(T) {
      for_lanes(in_lanes(logits_TV, plain), [&](auto lanes) {
        // Accesses move 16 bytes of the narrower type at a time.
        constexpr int kCount = std::min<int>(decltype(lanes)::value, 16 / std::min(sizeof(L), sizeof(T)));
        gradient_kernel<L, T, kCount><<<static_cast<unsigned>(num_tokens), kThreads, 0, stream_of(op)>>>(
            sums, numbers<const L>(logits_TV), labels, num_ranks, num_tokens, vocab, first_id, scale,
            numbers<float>(losses_T), numbers<T>(plain));
      });
    });
  });
}

}  // namespace tessera::cuda
