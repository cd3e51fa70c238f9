#include "ops/attention/mla_attention.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

AttentionShape shape_of(const MlaDims& dims) {
  AttentionShape shape{.seq_len = dims.seq_len,
                       .num_heads = dims.num_heads,
                       .dim_nope = dims.dim_nope,
                       .dim_rope = dims.dim_rope,
                       .dim_v = dims.dim_v,
                       .scale = dims.scale,
                       .num_ranges = 1,
                       .ranges = {{0, dims.seq_len}, {}}};
  if (dims.queries.empty()) return shape;
  shape.num_ranges = 0;
  for (const TokenRange& range : dims.queries) {
    shape.ranges[shape.num_ranges++] = {range.begin, range.end};
  }
  return shape;
}

}  // namespace

void mla_attention_forward(const Context& context, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH) {
  const AttentionShape shape = shape_of(dims);
  const KernelTable& kernels = cpu::kernels();
  const Element element = element_of(o.dtype());
  const ThreadScratch scratch(context, kernels.attention_forward_scratch(shape, element));
  if (context.measuring()) return;
  const AttentionForward args{.shape = shape,
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
  const AttentionShape shape = shape_of(dims);
  const KernelTable& kernels = cpu::kernels();
  const Element element = element_of(o.dtype());
  const ArenaScope scope(*context.arena);
  const std::int64_t heads = dims.num_heads, per_seq = dims.seq_len * dims.dim_rope;
  const Tensor d_k_rope_per_head = context.arena->allocate({dims.num_seqs * heads, per_seq}, DType::kFloat32);
  const ThreadScratch scratch(context, kernels.attention_backward_scratch(shape, element));
  if (context.measuring()) return;
  const AttentionBackward args{.shape = shape,
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
  for_float_type(d_k_rope.dtype(), [&]<typename T>(T) {
    constexpr std::int64_t kBlock = 256;
    const std::int64_t blocks = (per_seq + kBlock - 1) / kBlock;
    parallel_for(dims.num_seqs * blocks, [&](std::int64_t task) {
      const std::int64_t seq = task / blocks, begin = task % blocks * kBlock, end = std::min(per_seq, begin + kBlock);
      float sums[kBlock] = {};
      for (std::int64_t head = 0; head < heads; ++head) {
        const float* row = row_of<float>(d_k_rope_per_head, seq * heads + head);
        for (std::int64_t i = begin; i < end; ++i) sums[i - begin] += row[i];
      }
      T* out = d_k_rope.data<T>() + seq * per_seq;
      for (std::int64_t i = begin; i < end; ++i) store(out[i], sums[i - begin]);
    });
  });
}

}  // namespace tessera::cpu
