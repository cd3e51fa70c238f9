// Operators that plan a round of a dispatch on the device of the tensors, from the counts of all ranks. The host reads
// only how many rows go between ranks.
//
// All tensors are int32. counts_PE has the number of slots that source rank p has for expert x. Rank r holds experts
// [r·e, (r+1)·e), with e = E/P. It has room for R rows per round, which is a multiple of the alignment. On a
// GPU, place_round and plan_exchange take up to 1024 experts, and otherwise throw InternalError.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Computes where the rows of a round go (ep/placement.h).
/// - Assigns to first_row_PE the first of the rows that source p sends to expert x, on x's rank. Row 0 is the round's
///   first one. So a row is of the round if it is in [0, room).
/// - Assigns to num_rounds_1 the number of rounds in which the rows of all ranks fit.
void place_round(const Context& context, const Tensor& counts_PE, std::int64_t alignment, std::int64_t round,
                 std::int64_t room, const Tensor& first_row_PE, const Tensor& num_rounds_1);

/// Finds the choices of a source rank whose rows are of the round. counts_E and first_row_E are the source's rows of
/// counts_PE and first_row_PE.
/// - Assigns to round_ids_TK the ids of expert_ids_TK, and kNoExpert for choices of other rounds.
/// - Assigns to kept_E the number of choices that stay.
/// A CPU throws InternalError if counts and ids differ. A GPU does not check this.
void keep_round(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& first_row_E,
                std::int64_t room, const Tensor& round_ids_TK, const Tensor& kept_E);

/// Computes what `rank` receives in a round, from all ranks and itself, and how much it sends. Received rows are
/// ordered by source rank, then expert, then token. first_row_PE is that of place_round.
/// - Assigns to offsets_e1 where the rows of rank's experts begin, as in DispatchSaved.
/// - Assigns to source_of_row_R the index of a row among the received ones, or -1 for padding and beyond.
/// - Assigns to row_of_received_R the inverse, with -1 for indices that are not received.
/// - Assigns to num_sent_P and num_received_P the numbers of rows to and from each rank.
void plan_exchange(const Context& context, const Tensor& counts_PE, const Tensor& first_row_PE, std::int64_t rank,
                   std::int64_t alignment, const Tensor& offsets_e1, const Tensor& source_of_row_R,
                   const Tensor& row_of_received_R, const Tensor& num_sent_P, const Tensor& num_received_P);

}  // namespace tessera
