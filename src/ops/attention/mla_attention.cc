#include "ops/attention/mla_attention.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"

namespace tessera {

TESSERA_BACKENDS(mla_attention_forward)
TESSERA_BACKENDS(mla_attention_backward)

namespace {

void check_operands(const MlaDims& dims, const MlaOperands& operands, const Tensor& o, const Tensor& lse_TH) {
  const std::int64_t num_queries = dims.num_seqs * dims.queries_per_seq(), num_keys = dims.num_seqs * dims.seq_len;
  const std::int64_t heads = dims.num_heads;
  const DType dtype = operands.q.dtype();
  TESSERA_CHECK_TENSOR(operands.q, dtype, {num_queries, heads * (dims.dim_nope + dims.dim_rope)});
  TESSERA_CHECK_TENSOR(operands.kv, dtype, {num_keys, heads * (dims.dim_nope + dims.dim_v)});
  TESSERA_CHECK_TENSOR(operands.k_rope, dtype, {num_keys, dims.dim_rope});
  TESSERA_CHECK_TENSOR(operands.doc_start_T, DType::kInt32, {num_queries});
  TESSERA_CHECK_TENSOR(o, dtype, {num_queries, heads * dims.dim_v});
  TESSERA_CHECK_TENSOR(lse_TH, DType::kFloat32, {num_queries, heads});
  TESSERA_CHECK(dims.queries.size() <= 2, "{} ranges of queries", dims.queries.size());
  std::int64_t end = 0;
  for (const TokenRange& range : dims.queries) {
    TESSERA_CHECK(end <= range.begin && range.begin < range.end && range.end <= dims.seq_len, "queries [{}, {}) of {}",
                  range.begin, range.end, dims.seq_len);
    end = range.end;
  }
}

}  // namespace

std::int64_t MlaDims::queries_per_seq() const {
  if (queries.empty()) return seq_len;
  std::int64_t count = 0;
  for (const TokenRange& range : queries) count += range.end - range.begin;
  return count;
}

void mla_attention_forward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH) {
  const TraceScope trace(context.trace, "mla_attention.forward");
  check_operands(dims, operands, o, lse_TH);
  TESSERA_RUN(mla_attention_forward, context, dims, operands, o, lse_TH);
}

void mla_attention_backward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope) {
  const TraceScope trace(context.trace, "mla_attention.backward");
  check_operands(dims, operands, o, lse_TH);
  check_operands(dims, {.q = d_q, .kv = d_kv, .k_rope = d_k_rope, .doc_start_T = operands.doc_start_T}, d_o, lse_TH);
  TESSERA_RUN(mla_attention_backward, context, dims, operands, o, lse_TH, d_o, d_q, d_kv, d_k_rope);
}

}  // namespace tessera
