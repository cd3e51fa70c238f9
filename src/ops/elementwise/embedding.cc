#include "ops/elementwise/embedding.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(embedding_forward)
TESSERA_BACKENDS(embedding_backward)

void embedding_forward(const Context& context, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD) {
  const TraceScope trace(context.trace, "embedding.forward");
  TESSERA_DIMS(tokens_T, table_VD, x_TD);
  const std::int64_t num_tokens = tokens_T.dim(0);
  TESSERA_CHECK_TENSOR(tokens_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(x_TD, table_VD.dtype(), {num_tokens, table_VD.dim(1)});
  TESSERA_RUN(embedding_forward, context, tokens_T, table_VD, first_id, x_TD);
}

void embedding_backward(const Context& context, const Tensor& tokens_T, const Tensor& d_x_TD, std::int64_t first_id,
                        const Tensor& d_table_VD) {
  const TraceScope trace(context.trace, "embedding.backward");
  TESSERA_DIMS(tokens_T, d_x_TD, d_table_VD);
  const std::int64_t num_tokens = tokens_T.dim(0), dim = d_table_VD.dim(1);
  TESSERA_CHECK_TENSOR(tokens_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(d_x_TD, d_x_TD.dtype(), {num_tokens, dim});
  TESSERA_CHECK_TENSOR(d_table_VD, DType::kFloat32, {d_table_VD.dim(0), dim});
  TESSERA_RUN(embedding_backward, context, tokens_T, d_x_TD, first_id, d_table_VD);
}

}  // namespace tessera
