// Rows to experts and back: the data movement of an MoE layer within one rank.
//
// A slot is a (token, choice) pair, slot = t·K + k. Rows are the slots sorted by expert, within an expert by slot.
#pragma once

#include "ops/context.h"

namespace tessera {

/// From expert_ids_TK (int32) and counts_E (int32): offsets_E1 (int32, [E + 1]): expert e computes rows
/// [offsets[e], offsets[e + 1]); slot_of_row_R and row_of_slot_TK (int32), inverse to each other. R = T·K.
void sort_by_expert(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK);

/// y_RD[r] = x_TD[slot_of_row[r] / top_k]. One float type.
void gather_rows(const Context& context, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& y_RD);

/// y_TD[t] (= or +=) sum over k of weights_TK[t][k] · x_RD[row_of_slot[t][k]], in the order of k, summed in float32.
/// weights float32; undefined: all 1. x and y have one float type.
void combine_rows(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write);

}  // namespace tessera
