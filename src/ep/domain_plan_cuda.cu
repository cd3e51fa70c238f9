#include <cub/block/block_scan.cuh>

#include "ep/domain_plan.h"
#include "ops/kit/launch.cuh"
#include "ops/routing/permute.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPlanThreads = 1024;
constexpr int kMaxExperts = 1024;  // per domain

/// Returns whether a token has an expert of the domain.
__device__ bool is_sent(const std::int32_t* ids, int top_k, int experts_per_domain, int domain) {
  bool has_expert = false;
  for (int k = 0; k < top_k; ++k) has_expert |= ids[k] >= 0 && ids[k] / experts_per_domain == domain;
  return has_expert;
}

/// Each block handles one domain, and each thread handles consecutive tokens. The first block also handles the choices
/// without an expert.
__global__ void __launch_bounds__(kPlanThreads)
    plan_crossing_kernel(const std::int32_t* __restrict__ ids_TK, int num_tokens, int top_k, int experts_per_domain,
                         std::int32_t* __restrict__ token_of_sent_M, std::int32_t* __restrict__ sent_of_token_TN,
                         std::int32_t* __restrict__ number_of_slot_TK, std::int32_t* num_sent_N) {
  using Scan = cub::BlockScan<int, kPlanThreads>;
  __shared__ typename Scan::TempStorage memory;
  const auto domain = static_cast<int>(blockIdx.x), num_domains = static_cast<int>(gridDim.x);
  const int per_thread = (num_tokens + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(num_tokens, static_cast<int>(threadIdx.x) * per_thread);
  const int end = min(num_tokens, begin + per_thread);
  int own = 0, place = 0, num_sent = 0;
  for (int t = begin; t < end; ++t) own += is_sent(ids_TK + std::int64_t{t} * top_k, top_k, experts_per_domain, domain);
  Scan(memory).ExclusiveSum(own, place, num_sent);
  if (threadIdx.x == 0) num_sent_N[domain] = num_sent;
  const int part = domain * num_tokens;
  for (int t = begin; t < end; ++t) {
    const std::int32_t* ids = ids_TK + std::int64_t{t} * top_k;
    const bool is_token_sent = is_sent(ids, top_k, experts_per_domain, domain);
    for (int k = 0; k < top_k; ++k) {
      std::int32_t& number = number_of_slot_TK[std::int64_t{t} * top_k + k];
      if (domain == 0 && (ids[k] < 0 || ids[k] / experts_per_domain >= num_domains)) number = -1;
      if (ids[k] >= 0 && ids[k] / experts_per_domain == domain) number = (part + place) * top_k + k;
    }
    sent_of_token_TN[std::int64_t{t} * num_domains + domain] = is_token_sent ? part + place : num_domains * num_tokens;
    if (is_token_sent) token_of_sent_M[part + place++] = t;
  }
  for (int i = num_sent + static_cast<int>(threadIdx.x); i < num_tokens; i += kPlanThreads) {
    token_of_sent_M[part + i] = -1;
  }
}

__global__ void __launch_bounds__(kThreads)
    localize_experts_kernel(int first_expert, int num_experts, const std::int32_t* num_received_N, int part, int top_k,
                            std::int64_t num_slots, std::int32_t* __restrict__ ids_MK,
                            std::int32_t* __restrict__ counts_E) {
  __shared__ int counts[kMaxExperts];
  for (int x = static_cast<int>(threadIdx.x); x < num_experts; x += kThreads) counts[x] = 0;
  __syncthreads();
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_slots;
       i += std::int64_t{gridDim.x} * kThreads) {
    const auto token = static_cast<int>(i / top_k);
    const bool is_received = token % part < num_received_N[token / part];
    const int local = is_received ? ids_MK[i] - first_expert : -1;  // below 0 for kNoExpert
    const bool is_here = 0 <= local && local < num_experts;
    ids_MK[i] = is_here ? local : kNoExpert;
    if (is_here) atomicAdd(&counts[local], 1);
  }
  __syncthreads();
  for (int x = static_cast<int>(threadIdx.x); x < num_experts; x += kThreads) {
    if (counts[x] > 0) atomicAdd(&counts_E[x], counts[x]);
  }
}

}  // namespace

void plan_crossing(const Context& op, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Crossing& crossing) {
  if (op.measuring()) return;
  const auto num_domains = static_cast<unsigned>(crossing.num_sent_N.dim(0));
  plan_crossing_kernel<<<num_domains, kPlanThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(expert_ids_TK), static_cast<int>(expert_ids_TK.dim(0)),
      static_cast<int>(expert_ids_TK.dim(1)), static_cast<int>(experts_per_domain),
      numbers<std::int32_t>(crossing.token_of_sent_M), numbers<std::int32_t>(crossing.sent_of_token_TN),
      numbers<std::int32_t>(crossing.number_of_slot_TK), numbers<std::int32_t>(crossing.num_sent_N));
}

void localize_experts(const Context& op, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  if (op.measuring()) return;
  const auto num_experts = static_cast<int>(counts_E.dim(0));
  TESSERA_CHECK(num_experts <= kMaxExperts, "{} experts per domain", num_experts);
  TESSERA_CUDA(cudaMemsetAsync(counts_E.raw(), 0, counts_E.num_bytes(), stream_of(op)));
  localize_experts_kernel<<<grid_for(op, expert_ids_MK.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
      static_cast<int>(first_expert), num_experts, numbers<const std::int32_t>(num_received_N),
      static_cast<int>(expert_ids_MK.dim(0) / num_received_N.dim(0)), static_cast<int>(expert_ids_MK.dim(1)),
      expert_ids_MK.num_elements(), numbers<std::int32_t>(expert_ids_MK), numbers<std::int32_t>(counts_E));
}

}  // namespace tessera::cuda
