// Token embedding: rows of a table.
#pragma once

#include "ops/context.h"

namespace tessera {

/// x_TD[t] = table_VD[tokens_T[t]]. tokens int32, each in [0, V) (the loader has checked them).
void embedding_forward(const Context& context, const Tensor& tokens_T, const Tensor& table_VD, const Tensor& x_TD);

/// d_table_VD[tokens_T[t]] += d_x_TD[t], in the order of t; d_table is float32.
void embedding_backward(const Context& context, const Tensor& tokens_T, const Tensor& d_x_TD, const Tensor& d_table_VD);

}  // namespace tessera
