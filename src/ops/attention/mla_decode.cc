#include "ops/attention/mla_decode.h"

#include "ops/gemm/gemm.h"
#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(store_latents)
TESSERA_BACKENDS(prepare_mla_decode)
TESSERA_BACKENDS(mla_decode)

void store_latents(const Context& context, const Tensor& latent_TC, const Tensor& k_rope_TR, const Tensor& slot_T,
                   const Tensor& position_T, const Tensor& cache_SPN) {
  const TraceScope trace(context.trace, "store_latents");
  TESSERA_DIMS(latent_TC, k_rope_TR, slot_T, position_T, cache_SPN);
  const std::int64_t num_tokens = latent_TC.dim(0), latent = latent_TC.dim(1), rope = k_rope_TR.dim(1);
  TESSERA_CHECK_STRIDED(k_rope_TR, latent_TC.dtype(), {num_tokens, rope});
  TESSERA_CHECK_TENSOR(slot_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(position_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(cache_SPN, latent_TC.dtype(), {cache_SPN.dim(0), cache_SPN.dim(1), latent + rope});
  TESSERA_RUN(store_latents, context, latent_TC, k_rope_TR, slot_T, position_T, cache_SPN);
}

void prepare_mla_decode(const Context& context, const MlaNewTokens& tokens, const Tensor& slot_T,
                        const Tensor& position_T, const Tensor& cache_SPN) {
  const TraceScope trace(context.trace, "prepare_mla_decode");
  TESSERA_DIMS(slot_T, position_T, cache_SPN);
  const DType dtype = tokens.kv_a.dtype();
  const std::int64_t num_tokens = tokens.kv_a.dim(0), row = tokens.kv_a.dim(1), latent = tokens.norm_weight_C.dim(0);
  TESSERA_CHECK_TENSOR(tokens.norm_weight_C, dtype, {latent});
  TESSERA_CHECK_STRIDED(tokens.q, dtype, {num_tokens, tokens.q.dim(1)});
  TESSERA_CHECK_TENSOR(tokens.q_latent, dtype, {num_tokens, tokens.num_heads * latent});
  TESSERA_CHECK_TENSOR(tokens.wkv_b, dtype, {tokens.wkv_b.dim(0), latent});
  TESSERA_CHECK(tokens.rope_dim == 0 || (tokens.rope_dim == row - latent && tokens.rope_dim % 2 == 0), "{} of {}",
                tokens.rope_dim, row - latent);
  TESSERA_CHECK(tokens.q.dim(1) % tokens.num_heads == 0 && tokens.wkv_b.dim(0) % tokens.num_heads == 0 &&
                    0 < tokens.nope() && tokens.nope() <= tokens.wkv_b.dim(0) / tokens.num_heads,
                "{} and {} for {} heads", tokens.q.dim(1), tokens.wkv_b.dim(0), tokens.num_heads);
  if (tokens.rope_dim > 0) {
    TESSERA_CHECK_TENSOR(tokens.cos_PM, DType::kFloat32, {tokens.cos_PM.dim(0), tokens.rope_dim / 2});
    TESSERA_CHECK_TENSOR(tokens.sin_PM, DType::kFloat32, {tokens.cos_PM.dim(0), tokens.rope_dim / 2});
    TESSERA_CHECK(tokens.cos_PM.dim(0) >= cache_SPN.dim(1), "{} angles for {} positions", tokens.cos_PM.dim(0),
                  cache_SPN.dim(1));
  }
  TESSERA_CHECK_TENSOR(slot_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(position_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(cache_SPN, dtype, {cache_SPN.dim(0), cache_SPN.dim(1), row});
  TESSERA_RUN(prepare_mla_decode, context, tokens, slot_T, position_T, cache_SPN);
}

void mla_decode(const Context& context, const MlaDecodeDims& dims, const MlaDecodeOperands& operands, const Tensor& o) {
  const TraceScope trace(context.trace, "mla_decode");
  const std::int64_t num_tokens = operands.q.dim(0), heads = dims.num_heads;
  const DType dtype = operands.q.dtype();
  const Tensor& cache = operands.cache_SPN;
  TESSERA_CHECK_TENSOR(operands.q, dtype, {num_tokens, heads * (dims.dim_nope + dims.dim_rope)});
  TESSERA_CHECK_TENSOR(operands.q_latent, dtype, {num_tokens, heads * dims.dim_latent});
  TESSERA_CHECK_TENSOR(cache, dtype, {cache.dim(0), cache.dim(1), dims.dim_latent + dims.dim_rope});
  TESSERA_CHECK_TENSOR(operands.slot_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(operands.position_T, DType::kInt32, {num_tokens});
  TESSERA_CHECK_TENSOR(operands.wkv_b, dtype, {heads * (dims.dim_nope + dims.dim_v), dims.dim_latent});
  TESSERA_CHECK_TENSOR(o, dtype, {num_tokens, heads * dims.dim_v});
  TESSERA_RUN(mla_decode, context, dims, operands, o);
}

void multiply_values(const Context& context, const MlaDecodeDims& dims, const Tensor& o_latent, const Tensor& wkv_b,
                     const Tensor& o) {
  batched_gemm(context, o_latent.columns(0, dims.dim_latent), wkv_b.rows(dims.dim_nope, dims.dim_nope + dims.dim_v),
               /*transpose_b=*/true, o.columns(0, dims.dim_v),
               {.count = dims.num_heads,
                .step_a = dims.dim_latent,
                .step_b = (dims.dim_nope + dims.dim_v) * dims.dim_latent,
                .step_c = dims.dim_v});
}

}  // namespace tessera
