// Each warp computes one token at a time. Lane l has experts l, l + 32, ..., and its numbers stay in registers.
#include "ops/kit/launch.cuh"
#include "ops/kit/reduce.cuh"
#include "ops/routing/router.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kMaxExperts = 512;

__device__ float excluded() { return -INFINITY; }

/// Returns an integer above 0 that grows with x. It is the same for 0 and -0.
__device__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Returns the index of the highest of all lanes' keys, the lowest index of equal keys, and removes that key. Lane l
/// has the keys of indices l, l + 32, ... Removed keys are 0.
template <int kPerLane>
__device__ int take_highest(unsigned (&keys)[kPerLane]) {
  const int lane = threadIdx.x % kWarp;
  unsigned highest = 0;
#pragma unroll
  for (const unsigned key : keys) highest = max(highest, key);
  highest = __reduce_max_sync(kAllLanes, highest);
  unsigned index = kMaxExperts;
#pragma unroll
  for (int i = kPerLane - 1; i >= 0; --i) {
    if (keys[i] == highest) index = static_cast<unsigned>(lane + i * kWarp);
  }
  index = __reduce_min_sync(kAllLanes, index);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + i * kWarp == static_cast<int>(index)) keys[i] = 0;
  }
  return static_cast<int>(index);
}

/// Excludes the biased scores of all but the best groups. `shared` is this warp's [kMaxExperts], padded against bank
/// conflicts.
template <int kPerLane>
__device__ void limit_groups(const RouterOptions& options, int experts, float* shared, float (&biased)[kPerLane]) {
  const int lane = threadIdx.x % kWarp;
  const int groups = static_cast<int>(options.num_groups), size = experts / groups;
  const auto place = [](int e) { return e + e / kWarp; };
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + i * kWarp < experts) shared[place(lane + i * kWarp)] = biased[i];
  }
  __syncwarp();
  unsigned keys[1] = {0};
  if (lane < groups) {
    float first = excluded(), second = excluded();
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      const float value = shared[place(e)];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    keys[0] = order_of(size > 1 ? first + second : first);
  }
  __syncwarp();
  unsigned kept = 0;
  for (int i = 0; i < options.num_limited_groups; ++i) kept |= 1u << take_highest(keys);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + i * kWarp;
    if (e < experts && (kept >> (e / size) & 1u) == 0) biased[i] = excluded();
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const RouterOptions options, const float* logits_TE, const float* bias_E, std::int64_t num_tokens,
                   int experts, float* scores_TE, std::int32_t* ids_TK, float* weights_TK, std::int32_t* counts_E) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ int counts[kMaxExperts];
  __shared__ float shared[kWarps][kMaxExperts + kMaxExperts / kWarp];
  for (int e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, top_k = static_cast<int>(options.top_k);
  float bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) bias[i] = lane + i * kWarp < experts ? bias_E[lane + i * kWarp] : 0.0f;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kWarps + warp; t < num_tokens;
       t += std::int64_t{gridDim.x} * kWarps) {
    float scores[kPerLane], biased[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = lane + i * kWarp < experts ? logits_TE[t * experts + lane + i * kWarp] : excluded();
    }
    if (options.score_function == ScoreFunction::kSigmoid) {
#pragma unroll
      for (float& score : scores) score = 1.0f / (1.0f + expf(-score));
    } else {
      float largest = excluded(), sum = 0.0f;
#pragma unroll
      for (const float score : scores) largest = fmaxf(largest, score);
      largest = max_of_warp(largest);
#pragma unroll
      for (float& score : scores) sum += score = expf(score - largest);
      sum = sum_of_warp(sum);
#pragma unroll
      for (float& score : scores) score /= sum;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + i * kWarp < experts) scores_TE[t * experts + lane + i * kWarp] = scores[i];
      const float sum = scores[i] + bias[i];
      biased[i] = isnan(sum) ? 0.0f : sum;
    }
    if (options.num_groups > 0 && !options.force_load_balance) limit_groups(options, experts, shared[warp], biased);
    unsigned keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = lane + i * kWarp < experts ? order_of(biased[i]) : 0;
    int id = 0;  // this lane's choice
    float weight = 0.0f, sum = kRouteNormEpsilon;
    for (int k = 0; k < top_k; ++k) {
      const int expert = options.force_load_balance ? static_cast<int>((t * top_k + k) % experts) : take_highest(keys);
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + i * kWarp == expert) score = scores[i];
      }
      score = __shfl_sync(kAllLanes, score, expert % kWarp);
      sum += score;
      if (k == lane) {
        id = expert;
        weight = score;
      }
    }
    if (lane < top_k) {
      const float factor = options.route_norm ? options.route_scale / sum : options.route_scale;
      ids_TK[t * top_k + lane] = id;
      weights_TK[t * top_k + lane] = weight * factor;
      atomicAdd(&counts[id], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    if (gridDim.x == 1) {  // this block has seen all tokens, and nobody has set the counts to 0
      counts_E[e] = counts[e];
    } else if (counts[e] > 0) {
      atomicAdd(&counts_E[e], counts[e]);
    }
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const RouterOptions options, const float* scores_TE, const std::int32_t* ids_TK,
                    const float* weights_TK, const float* d_weights_TK, const float* f_BE, float balance_scale,
                    std::int64_t num_tokens, int experts, float* d_logits_TE) {
  const int lane = threadIdx.x % kWarp, top_k = static_cast<int>(options.top_k);
  for (std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; t < num_tokens;
       t += std::int64_t{gridDim.x} * kWarps) {
    float scores[kPerLane], d[kPerLane] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = lane + i * kWarp < experts ? scores_TE[t * experts + lane + i * kWarp] : 0.0f;
    }
    // This is the gradient of the chosen scores. The weights are s_k · c, where c = route_scale (/ the sum of the s_k).
    const int id = lane < top_k ? ids_TK[t * top_k + lane] : 0;
    const float d_weight = lane < top_k ? d_weights_TK[t * top_k + lane] : 0.0f;
    float d_score = options.route_scale * d_weight;
    if (options.route_norm) {
      const float dot = sum_of_warp(lane < top_k ? d_weight * weights_TK[t * top_k + lane] : 0.0f);
      const float score = lane < top_k ? scores_TE[t * experts + id] : 0.0f;
      d_score = (d_score - dot) / (kRouteNormEpsilon + sum_of_warp(score));
    }
    for (int k = 0; k < top_k; ++k) {
      const int expert = __shfl_sync(kAllLanes, id, k);
      const float of_expert = __shfl_sync(kAllLanes, d_score, k);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + i * kWarp == expert) d[i] += of_expert;
      }
    }
    if (options.balance_coefficient != 0.0f) {
      // Per token, the loss contains c · f_i · (s_i / sum), where c = coefficient / S.
      const float* f = f_BE + (options.first_token + t) / options.tokens_per_seq * experts;
      const float c = balance_scale * options.balance_coefficient / static_cast<float>(options.seq_len);
      float of_lane[kPerLane], sum = 0.0f, dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        of_lane[i] = lane + i * kWarp < experts ? f[lane + i * kWarp] : 0.0f;
        sum += scores[i];
        dot += of_lane[i] * scores[i];
      }
      sum = sum_of_warp(sum);
      dot = sum_of_warp(dot);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) d[i] += c * (of_lane[i] - dot / sum) / sum;
    }
    float dot = 0.0f;
    if (options.score_function == ScoreFunction::kSoftmax) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) dot += d[i] * scores[i];
      dot = sum_of_warp(dot);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float slope = options.score_function == ScoreFunction::kSigmoid ? 1.0f - scores[i] : 1.0f;
      if (lane + i * kWarp < experts) d_logits_TE[t * experts + lane + i * kWarp] = scores[i] * slope * (d[i] - dot);
    }
  }
}

constexpr int kTokensPerPart = 64;

/// Writes to parts_BN2E the sums over kTokensPerPart tokens of a sequence. A sequence has N parts.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    balance_parts_kernel(const RouterOptions options, const float* scores_TE, std::int64_t num_tokens, int experts,
                         float* parts_BN2E) {
  extern __shared__ float of_warp[];  // [kWarps][2][experts]
  const std::int64_t seq = blockIdx.y, first = options.first_token, per_seq = options.tokens_per_seq;
  const std::int64_t begin = max(std::int64_t{0}, seq * per_seq - first),
                     end = min(num_tokens, (seq + 1) * per_seq - first);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, top_k = static_cast<int>(options.top_k);
  const std::int64_t part = begin + std::int64_t{blockIdx.x} * kTokensPerPart;
  float shares[kPerLane] = {}, counts[kPerLane] = {};
  for (std::int64_t t = part + warp; t < min(end, part + kTokensPerPart); t += kWarps) {
    float scores[kPerLane], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = lane + i * kWarp < experts ? scores_TE[t * experts + lane + i * kWarp] : 0.0f;
      sum += scores[i];
    }
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) shares[i] += scores[i] / sum;
    unsigned keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = lane + i * kWarp < experts ? order_of(scores[i]) : 0;
    for (int k = 0; k < top_k; ++k) {
      const int expert = take_highest(keys);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) counts[i] += lane + i * kWarp == expert ? 1.0f : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + i * kWarp;
    if (e >= experts) break;
    of_warp[(warp * 2) * experts + e] = counts[i];
    of_warp[(warp * 2 + 1) * experts + e] = shares[i];
  }
  __syncthreads();
  float* to = parts_BN2E + (seq * gridDim.x + blockIdx.x) * 2 * experts;
  for (int i = threadIdx.x; i < 2 * experts; i += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w * 2 * experts + i];
    to[i] = sum;
  }
}

__global__ void balance_sums_kernel(const float* parts_BN2E, int num_parts, int length, float* sums_B2E) {
  const std::int64_t seq = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= length) return;
  float sum = 0.0f;
  for (int part = 0; part < num_parts; ++part) sum += parts_BN2E[(seq * num_parts + part) * length + i];
  sums_B2E[seq * length + i] = sum;
}

__global__ void __launch_bounds__(kThreads)
    balance_loss_kernel(const float* sums_B2E, std::int64_t num_seqs, int experts, float to_f, float length,
                        float coefficient, float* f_BE, double* loss) {
  __shared__ double slots[kThreads / kWarp];
  double all = 0.0;
  for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
    const float* counts = sums_B2E + seq * 2 * experts;
    double of_seq = 0.0;
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      const float f = counts[e] * to_f;
      f_BE[seq * experts + e] = f;
      of_seq += static_cast<double>(f) * counts[experts + e] / length;
    }
    of_seq = sum_of_block(of_seq, slots);
    __syncthreads();
    all += static_cast<double>(static_cast<float>(coefficient * of_seq));
  }
  if (threadIdx.x == 0 && loss != nullptr) *loss += all;
}

/// Calls body(std::integral_constant<int, N>), where N numbers per lane hold all experts.
template <typename Body>
void for_experts(std::int64_t experts, const RouterOptions& options, Body&& body) {
  require(
      experts <= kMaxExperts && options.top_k <= kWarp && options.num_groups <= kWarp,
      "a GPU's router takes up to {} experts (model.args.num_experts), {} of them for a token (top_k) and {} groups "
      "(n_expert_groups); these are {}, {} and {}",
      kMaxExperts, kWarp, kWarp, experts, options.top_k, options.num_groups);
  if (experts <= 2 * kWarp) {
    body(std::integral_constant<int, 2>{});
  } else if (experts <= 8 * kWarp) {
    body(std::integral_constant<int, 8>{});
  } else {
    body(std::integral_constant<int, kMaxExperts / kWarp>{});
  }
}

}  // namespace

void router_forward(const Context& op, const RouterOptions& options, const Tensor& logits_TE,
                    const Tensor& expert_bias_E, const RouterOutputs& outputs) {
  const std::int64_t num_tokens = logits_TE.dim(0), experts = logits_TE.dim(1);
  for_experts(experts, options, [&](auto per_lane) {
    if (op.measuring()) return;
    const int num_blocks = grid_for(op, num_tokens * kWarp, kThreads);
    if (num_blocks > 1) {
      TESSERA_CUDA(cudaMemsetAsync(outputs.counts_E.raw(), 0, outputs.counts_E.num_bytes(), stream_of(op)));
    }
    launch_early(op, forward_kernel<decltype(per_lane)::value>, static_cast<unsigned>(num_blocks), kThreads, 0, options,
                 numbers<const float>(logits_TE), numbers<const float>(expert_bias_E), num_tokens,
                 static_cast<int>(experts), numbers<float>(outputs.scores_TE),
                 numbers<std::int32_t>(outputs.expert_ids_TK), numbers<float>(outputs.weights_TK),
                 numbers<std::int32_t>(outputs.counts_E));
  });
}

void balance_sums(const Context& op, const RouterOptions& options, const Tensor& scores_TE, const Tensor& sums_B2E) {
  const std::int64_t num_seqs = sums_B2E.dim(0), experts = scores_TE.dim(1);
  const std::int64_t num_parts = (options.tokens_per_seq + kTokensPerPart - 1) / kTokensPerPart;
  const ArenaScope scope(*op.arena);
  const Tensor parts_BN2E = op.arena->allocate({num_seqs, num_parts, 2, experts}, DType::kFloat32);
  for_experts(experts, options, [&](auto per_lane) {
    if (op.measuring()) return;
    const auto length = static_cast<int>(2 * experts);
    const auto seqs = static_cast<unsigned>(num_seqs);
    balance_parts_kernel<decltype(per_lane)::value>
        <<<dim3(static_cast<unsigned>(num_parts), seqs), kThreads,
           static_cast<std::size_t>(kWarps * length) * sizeof(float), stream_of(op)>>>(
            options, numbers<const float>(scores_TE), scores_TE.dim(0), static_cast<int>(experts),
            numbers<float>(parts_BN2E));
    balance_sums_kernel<<<dim3(static_cast<unsigned>((length + kThreads - 1) / kThreads), seqs), kThreads, 0,
                          stream_of(op)>>>(numbers<const float>(parts_BN2E), static_cast<int>(num_parts), length,
                                           numbers<float>(sums_B2E));
  });
}

void balance_loss(const Context& op, const RouterOptions& options, const Tensor& sums_B2E, const Tensor& f_BE,
                  const Tensor& loss_1) {
  if (op.measuring()) return;
  const std::int64_t experts = f_BE.dim(1);
  const float length = static_cast<float>(options.seq_len);
  const float to_f = static_cast<float>(experts) / (static_cast<float>(options.top_k) * length);
  balance_loss_kernel<<<1, kThreads, 0, stream_of(op)>>>(
      numbers<const float>(sums_B2E), f_BE.dim(0), static_cast<int>(experts), to_f, length, options.balance_coefficient,
      numbers<float>(f_BE), numbers<double>(loss_1));
}

void router_backward(const Context& op, const RouterOptions& options, const RouterOutputs& outputs,
                     const Tensor& d_weights_TK, float balance_scale, const Tensor& d_logits_TE) {
  const std::int64_t num_tokens = d_logits_TE.dim(0), experts = d_logits_TE.dim(1);
  for_experts(experts, options, [&](auto per_lane) {
    if (op.measuring()) return;
    backward_kernel<decltype(per_lane)::value>
        <<<grid_for(op, num_tokens * kWarp, kThreads), kThreads, 0, stream_of(op)>>>(
            options, numbers<const float>(outputs.scores_TE), numbers<const std::int32_t>(outputs.expert_ids_TK),
            numbers<const float>(outputs.weights_TK), numbers<const float>(d_weights_TK),
            numbers<const float>(outputs.balance_f_BE), balance_scale, num_tokens, static_cast<int>(experts),
            numbers<float>(d_logits_TE));
  });
}

}  // namespace tessera::cuda
