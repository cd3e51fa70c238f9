// Rows to experts and back: the data movement of an MoE layer within one rank.
//
// A slot is a (token, choice) pair, slot = t·K + k. Rows are the slots sorted by expert, within an expert by slot. An
// expert's rows begin at a multiple of `alignment`; the rows before the next expert's first belong to no slot.

#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// The expert id of a slot that has no expert.
inline constexpr std::int32_t kNoExpert = -1;

/// Rows that hold any T·K slots of E experts at this alignment.
inline std::int64_t max_rows(std::int64_t num_slots, std::int64_t num_experts, std::int64_t alignment) {
  const std::int64_t rows = num_slots + num_experts * (alignment - 1);
  return rows / alignment * alignment;
}

/// From expert_ids_TK (int32, or kNoExpert) and counts_E (int32): offsets_E1 (int32, [E + 1]): expert e computes rows
/// [offsets[e], offsets[e + 1]), multiples of `alignment`; slot_of_row_R (int32), -1 for rows without a slot, and its
/// inverse row_of_slot_TK (int32), -1 for slots without an expert. R = max_rows(T·K, E, alignment). A CPU throws
/// InternalError if counts and ids differ; a GPU, which takes up to 1024 experts, does not look.
void sort_by_expert(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, std::int64_t alignment,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK);

/// y_RD[r] = x_TD[slot_of_row[r] / top_k], 0 for slot -1. One float type. What y holds in quantized form is undefined
/// for rows beyond num_rows_1[0] (int32, [1]).
void gather_rows(const Context& context, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& num_rows_1, const GemmOperand& y_RD);

/// y[i] = x[source[i] / divisor], rows of bytes, 0 for source -1; source (int32) has y's rows. x and y of one type.
void gather_row_bytes(const Context& context, const Tensor& x, const Tensor& source, std::int64_t divisor,
                      const Tensor& y);

/// y[i] = x[index[i]], 0 for index -1. x and y float32, index int32 of y's shape: routing weights to rows by
/// slot_of_row_R, and rows' numbers back to slots by row_of_slot_TK.
void gather_numbers(const Context& context, const Tensor& x, const Tensor& index, const Tensor& y);

/// y_TD[t] (= or +=) sum over k of weights_TK[t][k] · x_RD[row_of_slot[t][k]], in the order of k, summed in float32.
/// weights float32; undefined: all 1. x and y have one float type.
void combine_rows(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write);

/// The same, rank by rank: what belongs to the experts of one rank, which are `experts_per_rank` of them, is summed as
/// above, to y's type; then these sums, in the order of the ranks, in float32. expert_ids_TK: int32.
void combine_rows_by_rank(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK,
                          const Tensor& weights_TK, const Tensor& expert_ids_TK, std::int64_t experts_per_rank,
                          const Tensor& y_TD, Write write);

}  // namespace tessera
