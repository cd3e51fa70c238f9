// Token embedding: rows of a table.
#pragma once

#include "ops/runtime/context.h"

namespace tessera {

/// x_TD[t] = table_VD[tokens_T[t] - first_id]; 0 where the table, which has the ids [first_id, first_id + V), has no
/// such row. tokens int32 (the loader has checked them); table and x float32 or bfloat16, both the same.
void embedding_forward(const Context& context, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD);

/// d_table_VD[tokens_T[t] - first_id] += d_x_TD[t], in the order of t; d_x is float32 or bfloat16, d_table float32.
void embedding_backward(const Context& context, const Tensor& tokens_T, const Tensor& d_x_TD, std::int64_t first_id,
                        const Tensor& d_table_VD);

}  // namespace tessera
