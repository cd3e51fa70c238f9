#include "ops/checks.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "ops/mla_attention.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

cpu::AttentionShape check(const MlaDims& dims, const MlaOperands& operands, const Tensor& o, const Tensor& lse_TH) {
  const std::int64_t num_queries = dims.num_seqs * dims.queries_per_seq(), num_keys = dims.num_seqs * dims.seq_len;
  const std::int64_t heads = dims.num_heads;
  const DType dtype = operands.q.dtype();
  TESSERA_CHECK_TENSOR(operands.q, dtype, {num_queries, heads * (dims.dim_nope + dims.dim_rope)});
  TESSERA_CHECK_TENSOR(operands.kv, dtype, {num_keys, heads * (dims.dim_nope + dims.dim_v)});
  TESSERA_CHECK_TENSOR(operands.k_rope, dtype, {num_keys, dims.dim_rope});
  TESSERA_CHECK_TENSOR(operands.doc_start_T, DType::kInt32, {num_queries});
  TESSERA_CHECK_TENSOR(o, dtype, {num_queries, heads * dims.dim_v});
  TESSERA_CHECK_TENSOR(lse_TH, DType::kFloat32, {num_queries, heads});
  cpu::AttentionShape shape{.seq_len = dims.seq_len,
                            .num_heads = heads,
                            .dim_nope = dims.dim_nope,
                            .dim_rope = dims.dim_rope,
                            .dim_v = dims.dim_v,
                            .scale = dims.scale,
                            .num_ranges = 1,
                            .ranges = {{0, dims.seq_len}, {}}};
  if (dims.queries.empty()) return shape;
  TESSERA_CHECK(dims.queries.size() <= 2, "{} ranges of queries", dims.queries.size());
  shape.num_ranges = 0;
  std::int64_t end = 0;
  for (const TokenRange& range : dims.queries) {
    TESSERA_CHECK(end <= range.begin && range.begin < range.end && range.end <= dims.seq_len, "queries [{}, {}) of {}",
                  range.begin, range.end, dims.seq_len);
    end = range.end;
    shape.ranges[shape.num_ranges++] = {range.begin, range.end};
  }
  return shape;
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
  const cpu::AttentionShape shape = check(dims, operands, o, lse_TH);
  const cpu::KernelTable& kernels = cpu::kernels();
  const cpu::Element element = cpu::element_of(o.dtype());
  const cpu::ThreadScratch scratch(context, kernels.attention_forward_scratch(shape, element));
  if (context.measuring()) return;
  const cpu::AttentionForward args{.shape = shape,
                                   .q = operands.q.raw(),
                                   .kv = operands.kv.raw(),
                                   .k_rope = operands.k_rope.raw(),
                                   .doc_start = operands.doc_start_T.data<std::int32_t>(),
                                   .o = o.raw(),
                                   .lse = lse_TH.data<float>()};
  parallel_for(dims.num_seqs * dims.num_heads, [&](std::int64_t task) {
    kernels.attention_forward(args, element, task / dims.num_heads, task % dims.num_heads, scratch.mine());
  });
}

void mla_attention_backward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope) {
  const TraceScope trace(context.trace, "mla_attention.backward");
  const cpu::AttentionShape shape = check(dims, operands, o, lse_TH);
  check(dims, {.q = d_q, .kv = d_kv, .k_rope = d_k_rope, .doc_start_T = operands.doc_start_T}, d_o, lse_TH);
  const cpu::KernelTable& kernels = cpu::kernels();
  const cpu::Element element = cpu::element_of(o.dtype());
  const ArenaScope scope(*context.arena);
  const std::int64_t heads = dims.num_heads, per_seq = dims.seq_len * dims.dim_rope;
  const Tensor d_k_rope_per_head = context.arena->allocate({dims.num_seqs * heads, per_seq}, DType::kFloat32);
  const cpu::ThreadScratch scratch(context, kernels.attention_backward_scratch(shape, element));
  if (context.measuring()) return;
  const cpu::AttentionBackward args{.shape = shape,
                                    .q = operands.q.raw(),
                                    .kv = operands.kv.raw(),
                                    .k_rope = operands.k_rope.raw(),
                                    .doc_start = operands.doc_start_T.data<std::int32_t>(),
                                    .o = o.raw(),
                                    .lse = lse_TH.data<float>(),
                                    .d_o = d_o.raw(),
                                    .d_q = d_q.raw(),
                                    .d_kv = d_kv.raw(),
                                    .d_k_rope_per_head = d_k_rope_per_head.data<float>()};
  parallel_for(dims.num_seqs * heads, [&](std::int64_t task) {
    kernels.attention_backward(args, element, task / heads, task % heads, scratch.mine());
  });
  cpu::for_float_type(d_k_rope.dtype(), [&]<typename T>(T) {
    constexpr std::int64_t kBlock = 256;
    const std::int64_t blocks = (per_seq + kBlock - 1) / kBlock;
    parallel_for(dims.num_seqs * blocks, [&](std::int64_t task) {
      const std::int64_t seq = task / blocks, begin = task % blocks * kBlock, end = std::min(per_seq, begin + kBlock);
      float sums[kBlock] = {};
      for (std::int64_t head = 0; head < heads; ++head) {
        const float* row = cpu::row_of<float>(d_k_rope_per_head, seq * heads + head);
        for (std::int64_t i = begin; i < end; ++i) sums[i - begin] += row[i];
      }
      T* out = d_k_rope.data<T>() + seq * per_seq;
      for (std::int64_t i = begin; i < end; ++i) cpu::store(out[i], sums[i - begin]);
    });
  });
}

}  // namespace tessera
