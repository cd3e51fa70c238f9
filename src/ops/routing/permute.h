// Moves rows to their experts and back. This is the data movement of an MoE layer within one rank.
//
// A slot is a (token, choice) pair: slot = t·K + k. Rows are the slots that have an expert, sorted by expert and then
// by slot. An expert's rows begin at a multiple of `alignment`. The rows between an expert's last one and the next
// expert's first one are padding and belong to no slot.

#pragma once

#include "ops/kit/gemm_operand.h"

namespace tessera {

/// The expert id of a slot that has no expert.
inline constexpr std::int32_t kNoExpert = -1;

/// Returns the number of rows that suffice for any T·K slots of E experts at this alignment.
inline std::int64_t max_rows(std::int64_t num_slots, std::int64_t num_experts, std::int64_t alignment) {
  const std::int64_t rows = num_slots + num_experts * (alignment - 1);
  return rows / alignment * alignment;
}

/// Sorts the slots by expert. R is max_rows(T·K, E, alignment).
/// - expert_ids_TK (int32) has the expert of each slot, or kNoExpert.
/// - counts_E (int32) has the number of slots of each expert.
/// - Assigns to offsets_E1 (int32, [E + 1]): expert e computes rows [offsets[e], offsets[e + 1]). All offsets are
///   multiples of `alignment`.
/// - Assigns to slot_of_row_R (int32): the slot of a row, or -1 for a row without a slot.
/// - Assigns to row_of_slot_TK (int32), the inverse: the row of a slot, or -1 for a slot without an expert.
/// A CPU throws InternalError if counts and ids differ. A GPU does not check this. It takes up to 1024 experts, and
/// otherwise throws InternalError.
void sort_by_expert(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, std::int64_t alignment,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK);

/// Assigns x_TD[slot_of_row[r] / top_k] to y_RD[r], and 0 if the slot is -1. x and y have one float type. The quantized
/// forms of y are undefined for rows from num_rows_1[0] (int32, [1]) on.
void gather_rows(const Context& context, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& num_rows_1, const GemmOperand& y_RD);

/// Assigns x[source[i] / divisor] to y[i], and 0 if the source is -1. It copies rows byte by byte. source (int32) has
/// an entry per row of y. x and y have one type.
void gather_row_bytes(const Context& context, const Tensor& x, const Tensor& source, std::int64_t divisor,
                      const Tensor& y);

/// Assigns x[index[i]] to y[i], and 0 if the index is -1. x and y are float32. index is int32 and has y's shape. With
/// slot_of_row_R as the index, it brings routing weights to rows. With row_of_slot_TK, it brings numbers of rows back
/// to slots.
void gather_numbers(const Context& context, const Tensor& x, const Tensor& index, const Tensor& y);

/// Assigns or adds to y_TD[t] the sum over k of weights_TK[t][k] · x_RD[row_of_slot[t][k]]. It sums in the order of k,
/// in float32. weights_TK is float32. If it is undefined, all weights are 1. x and y have one float type.
/// Every slot has a row: an index of -1 is not allowed. x_RD has at least T·K rows.
void combine_rows(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write);

/// Computes the same sums rank by rank. Each rank has `experts_per_rank` experts. First, the rows of one rank's experts
/// are summed as combine_rows does, and the sum is rounded to y's type. Then these sums are added in float32, in the
/// order of the ranks. expert_ids_TK is int32. A slot whose row is -1 adds nothing. x_RD has at least T·K rows, too.
void combine_rows_by_rank(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK,
                          const Tensor& weights_TK, const Tensor& expert_ids_TK, std::int64_t experts_per_rank,
                          const Tensor& y_TD, Write write);

}  // namespace tessera
