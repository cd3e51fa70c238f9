#include "ep/domain_plan.h"
#include "ops/kit/launch.cuh"
#include "ops/routing/permute.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCounts = 1024;  // of domains, or of experts per domain

/// Counts in shared memory, for a block. The whole block calls its functions.
class BlockCounts {
 public:
  /// `counts` is shared memory.
  __device__ BlockCounts(int* counts, int size) : counts_(counts), size_(size) {
    for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads) counts_[i] = 0;
    __syncthreads();
  }
  __device__ void add(int i) const { atomicAdd(&counts_[i], 1); }
  /// Adds the block's counts to `sums`.
  __device__ void add_to(std::int32_t* sums) const {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads) {
      if (counts_[i] > 0) atomicAdd(&sums[i], counts_[i]);
    }
  }

 private:
  int* counts_;
  int size_;
};

__global__ void __launch_bounds__(kThreads)
    find_domains_kernel(const std::int32_t* __restrict__ ids_TK, int top_k, int experts_per_domain, int num_domains,
                        std::int64_t num_entries, std::int32_t* __restrict__ domain_TN,
                        std::int32_t* __restrict__ num_tokens_N) {
  __shared__ int memory[kMaxCounts];
  const BlockCounts counts(memory, num_domains);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_entries;
       i += std::int64_t{gridDim.x} * kThreads) {
    const auto domain = static_cast<int>(i % num_domains);
    const std::int32_t* ids = ids_TK + i / num_domains * top_k;
    bool has_expert = false;
    for (int k = 0; k < top_k; ++k) has_expert |= ids[k] >= 0 && ids[k] / experts_per_domain == domain;
    domain_TN[i] = has_expert ? domain : kNoExpert;
    if (has_expert) counts.add(domain);
  }
  counts.add_to(num_tokens_N);
}

__global__ void __launch_bounds__(kThreads)
    take_all_domains_kernel(int num_domains, std::int64_t num_entries, std::int32_t* __restrict__ domain_TN,
                            std::int32_t* __restrict__ num_tokens_N) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_entries;
       i += std::int64_t{gridDim.x} * kThreads) {
    domain_TN[i] = static_cast<std::int32_t>(i % num_domains);
    if (i < num_domains) num_tokens_N[i] = static_cast<std::int32_t>(num_entries / num_domains);
  }
}

/// A thread has a token, so that it reads the token's entries before it changes them.
__global__ void __launch_bounds__(kThreads)
    place_choices_kernel(const std::int32_t* __restrict__ ids_TK, int top_k, int experts_per_domain, int num_domains,
                         std::int64_t num_tokens, std::int32_t* __restrict__ sent_of_token_TN,
                         std::int32_t* __restrict__ number_of_slot_TK) {
  for (std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; t < num_tokens;
       t += std::int64_t{gridDim.x} * kThreads) {
    std::int32_t* sent = sent_of_token_TN + t * num_domains;
    for (int k = 0; k < top_k; ++k) {
      const int expert = ids_TK[t * top_k + k];
      number_of_slot_TK[t * top_k + k] = expert < 0 ? -1 : sent[expert / experts_per_domain] * top_k + k;
    }
    for (int d = 0; d < num_domains; ++d) {
      if (sent[d] < 0) sent[d] = static_cast<std::int32_t>(num_tokens * num_domains);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    localize_experts_kernel(int first_expert, int num_experts, const std::int32_t* num_received_N, int num_domains,
                            int top_k, std::int64_t num_slots, std::int32_t* __restrict__ ids_MK,
                            std::int32_t* __restrict__ counts_E) {
  __shared__ int memory[kMaxCounts];
  const BlockCounts counts(memory, num_experts);
  std::int64_t used = 0;
  for (int n = 0; n < num_domains; ++n) used += std::int64_t{num_received_N[n]} * top_k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_slots;
       i += std::int64_t{gridDim.x} * kThreads) {
    const int local = i < used ? ids_MK[i] - first_expert : -1;  // below 0 for kNoExpert
    const bool is_here = 0 <= local && local < num_experts;
    ids_MK[i] = is_here ? local : kNoExpert;
    if (is_here) counts.add(local);
  }
  counts.add_to(counts_E);
}

/// Sets counts to 0, and returns how many there are.
int clear(const Context& op, const Tensor& counts) {
  TESSERA_CHECK(counts.dim(0) <= kMaxCounts, "{} counts", counts.dim(0));
  TESSERA_CUDA(cudaMemsetAsync(counts.raw(), 0, counts.num_bytes(), stream_of(op)));
  return static_cast<int>(counts.dim(0));
}

}  // namespace

void find_domains(const Context& op, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                  const Tensor& domain_TN, const Tensor& num_tokens_N) {
  if (op.measuring()) return;
  const int num_domains = clear(op, num_tokens_N);
  find_domains_kernel<<<grid_for(op, domain_TN.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(expert_ids_TK), static_cast<int>(expert_ids_TK.dim(1)),
      static_cast<int>(experts_per_domain), num_domains, domain_TN.num_elements(), numbers<std::int32_t>(domain_TN),
      numbers<std::int32_t>(num_tokens_N));
}

void take_all_domains(const Context& op, const Tensor& domain_TN, const Tensor& num_tokens_N) {
  if (op.measuring()) return;
  take_all_domains_kernel<<<grid_for(op, domain_TN.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
      static_cast<int>(num_tokens_N.dim(0)), domain_TN.num_elements(), numbers<std::int32_t>(domain_TN),
      numbers<std::int32_t>(num_tokens_N));
}

void place_choices(const Context& op, const Tensor& expert_ids_TK, std::int64_t experts_per_domain,
                   const Tensor& sent_of_token_TN, const Tensor& number_of_slot_TK) {
  if (op.measuring()) return;
  place_choices_kernel<<<grid_for(op, expert_ids_TK.dim(0), kThreads), kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(expert_ids_TK), static_cast<int>(expert_ids_TK.dim(1)),
      static_cast<int>(experts_per_domain), static_cast<int>(sent_of_token_TN.dim(1)), expert_ids_TK.dim(0),
      numbers<std::int32_t>(sent_of_token_TN), numbers<std::int32_t>(number_of_slot_TK));
}

void localize_experts(const Context& op, std::int64_t first_expert, const Tensor& num_received_N,
                      const Tensor& expert_ids_MK, const Tensor& counts_E) {
  if (op.measuring()) return;
  const int num_experts = clear(op, counts_E);
  localize_experts_kernel<<<grid_for(op, expert_ids_MK.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
      static_cast<int>(first_expert), num_experts, numbers<const std::int32_t>(num_received_N),
      static_cast<int>(num_received_N.dim(0)), static_cast<int>(expert_ids_MK.dim(1)), expert_ids_MK.num_elements(),
      numbers<std::int32_t>(expert_ids_MK), numbers<std::int32_t>(counts_E));
}

}  // namespace tessera::cuda
