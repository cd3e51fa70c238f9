#include "ops/attention/rope.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(rope)

void rope(const Context& context, const Tensor& x_TN, std::int64_t num_heads, std::int64_t rope_dim,
          const Tensor& positions_T, const Tensor& cos_PM, const Tensor& sin_PM, RopeDirection direction,
          const Tensor& y_TN) {
  const TraceScope trace(context.trace, "rope");
  TESSERA_DIMS(x_TN, positions_T, cos_PM, sin_PM, y_TN);
  const std::int64_t num_tokens = x_TN.dim(0), head_dim = x_TN.dim(1) / num_heads, half = rope_dim / 2;
  TESSERA_CHECK(x_TN.dim(1) == num_heads * head_dim && rope_dim % 2 == 0 && rope_dim <= head_dim,
                "x {} heads {} rope dim {}", x_TN.shape().to_string(), num_heads, rope_dim);
  TESSERA_CHECK_STRIDED(y_TN, x_TN.dtype(), {num_tokens, num_heads * head_dim});
  TESSERA_CHECK_TENSOR(positions_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(cos_PM, DType::kFloat32, {cos_PM.dim(0), half});
  TESSERA_CHECK_TENSOR(sin_PM, DType::kFloat32, {cos_PM.dim(0), half});
  TESSERA_CHECK(context.measuring() || y_TN.raw() == x_TN.raw() || head_dim == rope_dim,
                "out of place with head dim {} rope dim {}", head_dim, rope_dim);
  TESSERA_RUN(rope, context, x_TN, num_heads, rope_dim, positions_T, cos_PM, sin_PM, direction, y_TN);
}

}  // namespace tessera
