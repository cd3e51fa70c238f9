#include "ops/loss/cross_entropy.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(cross_entropy_sums)
TESSERA_BACKENDS(cross_entropy)

namespace {

void check_logits(const Tensor& logits_TV, const Tensor& labels_T) {
  const DType dtype = logits_TV.dtype();
  TESSERA_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16, "{}", name_of(dtype));
  TESSERA_CHECK(logits_TV.is_contiguous(), "logits have stride {}", logits_TV.stride());
  TESSERA_CHECK_TENSOR(labels_T, DType::kInt32, {logits_TV.dim(0)});
}

}  // namespace

void cross_entropy_sums(const Context& context, const Tensor& logits_TV, const Tensor& labels_T, std::int64_t first_id,
                        const Tensor& sums_T3) {
  const TraceScope trace(context.trace, "cross_entropy.sums");
  TESSERA_DIMS(logits_TV, labels_T, sums_T3);
  check_logits(logits_TV, labels_T);
  TESSERA_CHECK_TENSOR(sums_T3, DType::kFloat32, {logits_TV.dim(0), 3});
  TESSERA_RUN(cross_entropy_sums, context, logits_TV, labels_T, first_id, sums_T3);
}

void cross_entropy(const Context& context, const Tensor& sums_PT3, const Tensor& logits_TV, const Tensor& labels_T,
                   std::int64_t first_id, float scale, const Tensor& losses_T, const GemmOperand& d_logits_TV) {
  const TraceScope trace(context.trace, "cross_entropy");
  TESSERA_DIMS(sums_PT3, logits_TV, labels_T, losses_T);
  const std::int64_t num_ranks = sums_PT3.dim(0), num_tokens = logits_TV.dim(0), vocab = logits_TV.dim(1);
  TESSERA_CHECK_TENSOR(sums_PT3, DType::kFloat32, {num_ranks, num_tokens, 3});
  check_logits(logits_TV, labels_T);
  TESSERA_CHECK_TENSOR(losses_T, DType::kFloat32, {num_tokens});
  if (d_logits_TV.quantized()) {
    check_operand(d_logits_TV, num_tokens, vocab, logits_TV.dtype());
  } else if (d_logits_TV.plain.defined()) {
    check_operand(d_logits_TV, num_tokens, vocab, d_logits_TV.plain.dtype());
  }
  TESSERA_CHECK(first_id % vocab == 0 && first_id / vocab < num_ranks, "{} of {} x {}", first_id, num_ranks, vocab);
  TESSERA_RUN(cross_entropy, context, sums_PT3, logits_TV, labels_T, first_id, scale, losses_T, d_logits_TV);
}

}  // namespace tessera
