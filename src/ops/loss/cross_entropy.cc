#include "ops/loss/cross_entropy.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(cross_entropy_sums)
TESSERA_BACKENDS(cross_entropy)

void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  const TraceScope trace(context.trace, "cross_entropy.sums");
  TESSERA_DIMS(logits_TV, labels_T, sums_T3);
  const std::int64_t num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  TESSERA_CHECK_TENSOR(logits_TV, DType::kFloat32, {num_tokens, vocab});
  TESSERA_CHECK_TENSOR(labels_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(sums_T3, DType::kFloat32, {num_tokens, 3});
  TESSERA_RUN(cross_entropy_sums, context, logits_TV, labels_T, first_id, sums_T3);
}

void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const Tensor& d_logits_TV) {
  const TraceScope trace(context.trace, "cross_entropy");
  TESSERA_DIMS(sums_PT3, logits_TV, labels_T, losses_T, d_logits_TV);
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  TESSERA_CHECK_TENSOR(sums_PT3, DType::kFloat32, {num_ranks, num_tokens, 3});
  TESSERA_CHECK_TENSOR(logits_TV, DType::kFloat32, {num_tokens, vocab});
  TESSERA_CHECK_TENSOR(labels_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(losses_T, DType::kFloat32, {num_tokens});
  if (d_logits_TV.defined()) TESSERA_CHECK_TENSOR(d_logits_TV, d_logits_TV.dtype(), {num_tokens, vocab});
  TESSERA_CHECK(first_id % vocab == 0 && first_id / vocab < num_ranks, "{} of {} x {}", first_id, num_ranks, vocab);
  TESSERA_RUN(cross_entropy, context, sums_PT3, logits_TV, labels_T, first_id, scale, losses_T, d_logits_TV);
}

}  // namespace tessera
