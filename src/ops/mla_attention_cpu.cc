#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/cpu/types.h"
#include "ops/mla_attention.h"
#include "tensor/parallel.h"

namespace tessera {
using cpu::load;
using cpu::store;

void mla_attention_forward(const Context& context, const MlaDims& d, const MlaOperands& in, const Tensor& o,
                           const Tensor& lse_TH) {
  if (context.measuring()) return;
  const std::int64_t S = d.seq_len, H = d.num_heads, dq = d.dim_nope + d.dim_rope, dk = d.dim_nope + d.dim_v;
  cpu::for_float_type(o.dtype(), [&]<typename T>(T) {
    parallel_for(d.num_seqs * H, [&](std::int64_t task) {
      const std::int64_t b = task / H, h = task % H;
      std::vector<float> p(S), acc(d.dim_v);
      for (std::int64_t i = 0; i < S; ++i) {
        const std::int64_t t = b * S + i, start = in.doc_start_T.data<std::int32_t>()[t];
        const T* q = in.q.data<T>() + (t * H + h) * dq;
        float mx = -1e30f;
        for (std::int64_t j = start; j <= i; ++j) {
          const T* k = in.kv.data<T>() + ((b * S + j) * H + h) * dk;
          const T* kr = in.k_rope.data<T>() + (b * S + j) * d.dim_rope;
          float s = 0;
          for (std::int64_t c = 0; c < d.dim_nope; ++c) s += load(q[c]) * load(k[c]);
          for (std::int64_t c = 0; c < d.dim_rope; ++c) s += load(q[d.dim_nope + c]) * load(kr[c]);
          p[j] = s * d.scale;
          mx = std::max(mx, p[j]);
        }
        float sum = 0;
        std::fill(acc.begin(), acc.end(), 0.f);
        for (std::int64_t j = start; j <= i; ++j) {
          const float e = std::exp(p[j] - mx);
          sum += e;
          const T* v = in.kv.data<T>() + ((b * S + j) * H + h) * dk + d.dim_nope;
          for (std::int64_t c = 0; c < d.dim_v; ++c) acc[c] += e * load(v[c]);
        }
        for (std::int64_t c = 0; c < d.dim_v; ++c) store(o.data<T>()[(t * H + h) * d.dim_v + c], acc[c] / sum);
        lse_TH.data<float>()[t * H + h] = mx + std::log(sum);
      }
    });
  });
}

void mla_attention_backward(const Context& context, const MlaDims& d, const MlaOperands& in, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope) {
  if (context.measuring()) return;
  const std::int64_t S = d.seq_len, H = d.num_heads, dq = d.dim_nope + d.dim_rope, dk = d.dim_nope + d.dim_v;
  cpu::for_float_type(o.dtype(), [&]<typename T>(T) {
    parallel_for(d.num_seqs, [&](std::int64_t b) {
      std::vector<float> gkv(S * dk), gkr(S * d.dim_rope, 0.f), gq(dq);
      for (std::int64_t h = 0; h < H; ++h) {
        std::fill(gkv.begin(), gkv.end(), 0.f);
        for (std::int64_t i = 0; i < S; ++i) {
          const std::int64_t t = b * S + i, start = in.doc_start_T.data<std::int32_t>()[t];
          const T* q = in.q.data<T>() + (t * H + h) * dq;
          const T* go = d_o.data<T>() + (t * H + h) * d.dim_v;
          const T* oo = o.data<T>() + (t * H + h) * d.dim_v;
          float delta = 0;
          for (std::int64_t c = 0; c < d.dim_v; ++c) delta += load(go[c]) * load(oo[c]);
          std::fill(gq.begin(), gq.end(), 0.f);
          for (std::int64_t j = start; j <= i; ++j) {
            const T* k = in.kv.data<T>() + ((b * S + j) * H + h) * dk;
            const T* v = k + d.dim_nope;
            const T* kr = in.k_rope.data<T>() + (b * S + j) * d.dim_rope;
            float s = 0, dp = 0;
            for (std::int64_t c = 0; c < d.dim_nope; ++c) s += load(q[c]) * load(k[c]);
            for (std::int64_t c = 0; c < d.dim_rope; ++c) s += load(q[d.dim_nope + c]) * load(kr[c]);
            const float p = std::exp(s * d.scale - lse_TH.data<float>()[t * H + h]);
            for (std::int64_t c = 0; c < d.dim_v; ++c) dp += load(go[c]) * load(v[c]);
            const float ds = p * (dp - delta) * d.scale;
            for (std::int64_t c = 0; c < d.dim_nope; ++c) {
              gq[c] += ds * load(k[c]);
              gkv[j * dk + c] += ds * load(q[c]);
            }
            for (std::int64_t c = 0; c < d.dim_rope; ++c) {
              gq[d.dim_nope + c] += ds * load(kr[c]);
              gkr[j * d.dim_rope + c] += ds * load(q[d.dim_nope + c]);
            }
            for (std::int64_t c = 0; c < d.dim_v; ++c) gkv[j * dk + d.dim_nope + c] += p * load(go[c]);
          }
          for (std::int64_t c = 0; c < dq; ++c) store(d_q.data<T>()[(t * H + h) * dq + c], gq[c]);
        }
        for (std::int64_t j = 0; j < S; ++j)
          for (std::int64_t c = 0; c < dk; ++c) store(d_kv.data<T>()[((b * S + j) * H + h) * dk + c], gkv[j * dk + c]);
      }
      for (std::int64_t j = 0; j < S; ++j)
        for (std::int64_t c = 0; c < d.dim_rope; ++c) store(d_k_rope.data<T>()[(b * S + j) * d.dim_rope + c], gkr[j * d.dim_rope + c]);
    });
  });
}

}  // namespace tessera
