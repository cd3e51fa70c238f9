// Token embedding, which looks up rows of a table.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// Assigns table_VD[tokens_T[t] - first_id] to x_TD[t]. The table has the ids [first_id, first_id + V). For other ids,
/// x_TD[t] becomes 0. tokens_T is int32, and the loader has checked its ids. table_VD and x_TD have one type, float32
/// or bfloat16.
void embedding_forward(const Context& context, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD);

/// Adds d_x_TD[t] to d_table_VD[tokens_T[t] - first_id], in the order of t. Ids that the table does not have are
/// skipped. d_x_TD is float32 or bfloat16, and d_table_VD is float32.
void embedding_backward(const Context& context, const Tensor& tokens_T, const Tensor& d_x_TD, std::int64_t first_id,
                        const Tensor& d_table_VD);

}  // namespace tessera
