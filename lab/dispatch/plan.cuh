// Where rows go. The host and the GPU run the same functions, so `dispatch plan` checks them without a GPU.
//
// A token t of rank p has top_k choices. Each is an expert, or -1 for none; they differ. A slot is a pair (t, k). An
// expert's rows are sorted by source rank, then by token. A rank's rows are those of its experts, one after the other.
#pragma once

#include <cstdint>

namespace lab {

struct Sizes {
  int ranks = 0, tokens = 0, experts = 0, top_k = 0;  // tokens: of one rank
  int row_units = 0;                                  // 16-byte units of a row
  int max_rows = 0;                                   // a rank has room for them

  __host__ __device__ int experts_per_rank() const { return experts / ranks; }
  __host__ __device__ int rank_of(int expert) const { return expert / experts_per_rank(); }
  __host__ __device__ int slots() const { return tokens * top_k; }
};

/// Returns the first of the rows, on the expert's rank, that rank `source` sends to `expert`. counts_PE has the number
/// of slots that each rank sends to each expert. The slot's index among them is added to it.
__host__ __device__ inline int first_row(const std::int32_t* counts_PE, const Sizes& sizes, int source, int expert) {
  const int first_expert = sizes.rank_of(expert) * sizes.experts_per_rank();
  int row = 0;
  for (int p = 0; p < sizes.ranks; ++p) {
    const std::int32_t* counts_E = counts_PE + p * sizes.experts;
    for (int x = first_expert; x < expert; ++x) row += counts_E[x];
    if (p < source) row += counts_E[expert];
  }
  return row;
}

/// Returns the first row of a rank's expert `local`. The rows of the rank end at that of expert experts_per_rank().
__host__ __device__ inline int offset_of(const std::int32_t* counts_PE, const Sizes& sizes, int rank, int local) {
  const int first_expert = rank * sizes.experts_per_rank();
  int row = 0;
  for (int p = 0; p < sizes.ranks; ++p) {
    for (int x = first_expert; x < first_expert + local; ++x) row += counts_PE[p * sizes.experts + x];
  }
  return row;
}

/// Returns whether choice k is the first of its token on its rank. The token's row crosses to the rank for this choice.
__host__ __device__ inline bool crosses(const std::int32_t* expert_ids_K, const Sizes& sizes, int k) {
  if (expert_ids_K[k] < 0) return false;
  for (int earlier = 0; earlier < k; ++earlier) {
    const int expert = expert_ids_K[earlier];
    if (expert >= 0 && sizes.rank_of(expert) == sizes.rank_of(expert_ids_K[k])) return false;
  }
  return true;
}

}  // namespace lab
