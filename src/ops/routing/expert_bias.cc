#include "ops/routing/expert_bias.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(update_expert_bias)

void update_expert_bias(const Context& context, const Tensor& counts_E, float coeff, const Tensor& finite_1,
                        const Tensor& bias_E) {
  const TraceScope trace(context.trace, "expert_bias");
  TESSERA_DIMS(counts_E, finite_1, bias_E);
  TESSERA_CHECK_TENSOR(counts_E, DType::kFloat64, {bias_E.dim(0)});
  TESSERA_CHECK_TENSOR(bias_E, DType::kFloat32, {bias_E.dim(0)});
  TESSERA_CHECK_TENSOR(finite_1, DType::kFloat32, {1});
  TESSERA_RUN(update_expert_bias, context, counts_E, coeff, finite_1, bias_E);
}

}  // namespace tessera
