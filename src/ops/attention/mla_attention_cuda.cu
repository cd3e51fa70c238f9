// cuDNN computes attention for bfloat16 and whole sequences of queries. Plain kernels compute the rest. Both read keys
// as one matrix per head, [k_nope | k_rope], which is assembled here. They write its gradient in the same form.
//
// The GPU finds the documents, and cuDNN reads them from a table of fixed size. The table cannot hold too many
// documents, nor a doc_start_T whose values are not starts of documents. Then it stays empty, and the plain kernels do
// the work, more slowly but with the same result. Otherwise the plain kernels return at once.
#include <cub/block/block_scan.cuh>

#include "ops/attention/attention_kernels.h"
#include "ops/attention/mla_attention.h"
#include "ops/elementwise/elementwise.h"
#include "ops/kit/launch.cuh"
#include "ops/runtime/attention_library.h"
#include "ops/runtime/libraries.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// The table has room for the first document of each sequence and one more per kTokensPerDocument tokens. Room costs
/// time, because cuDNN starts blocks for all of it.
constexpr std::int64_t kTokensPerDocument = 128;

AttentionShape library_shape(const Context& op, const MlaDims& dims) {
  AttentionShape shape{.num_seqs = dims.num_seqs,
                       .seq_len = dims.seq_len,
                       .num_heads = dims.num_heads,
                       .dim_qk = dims.dim_nope + dims.dim_rope,
                       .dim_v = dims.dim_v,
                       .v_stride = dims.dim_nope + dims.dim_v,
                       .scale = dims.scale,
                       .deterministic = op.cuda != nullptr && op.cuda->deterministic()};
  if (!dims.whole_sequences) shape.max_documents = dims.num_seqs + shape.num_tokens() / kTokensPerDocument;
  return shape;
}

bool is_for_library(const MlaDims& dims, const MlaOperands& operands) {
  return operands.q.dtype() == DType::kBFloat16 && dims.all_are_queries() && dims.dim_nope % kLanes == 0 &&
         AttentionLibrary::supports(library_shape({}, dims));
}

/// Returns the number of groups of kCount numbers. It must fit 32 bits, because kernels divide such numbers four times
/// as fast.
template <int kCount>
unsigned groups_of(std::int64_t num_elements) {
  TESSERA_CHECK(num_elements / kCount < std::int64_t{1} << 31, "{}", num_elements);
  return static_cast<unsigned>(num_elements / kCount);
}

/// Writes k [K, H, nope + rope] from kv and k_rope. Sizes count groups of kCount numbers.
template <typename T, int kCount>
__global__ void join_keys_kernel(const T* kv, const T* k_rope, T* k, unsigned size, unsigned heads, unsigned nope,
                                 unsigned rope, unsigned v) {
  const unsigned qk = nope + rope;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const std::int64_t key_head = i / qk;
    const unsigned at = i % qk;
    const T* from = at < nope ? kv + (key_head * (nope + v) + at) * kCount
                              : k_rope + (key_head / heads * rope + at - nope) * kCount;
    put_lanes(get_lanes<kCount>(from), k + std::int64_t{i} * kCount);
  }
}

/// Copies the nope part of d_k into d_kv.
template <typename T, int kCount>
__global__ void split_keys_kernel(const T* d_k, T* d_kv, unsigned size, unsigned nope, unsigned rope, unsigned v) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const std::int64_t key_head = i / nope;
    const unsigned at = i % nope;
    put_lanes(get_lanes<kCount>(d_k + (key_head * (nope + rope) + at) * kCount),
              d_kv + (key_head * (nope + v) + at) * kCount);
  }
}

/// Computes d_k_rope, the sum over heads of the rope part of d_k, in the order of heads.
template <typename T, int kCount>
__global__ void sum_heads_kernel(const T* d_k, T* d_k_rope, unsigned size, unsigned heads, unsigned nope,
                                 unsigned rope) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const std::int64_t key = i / rope;
    const unsigned at = i % rope;
    float sums[kCount] = {};
#pragma unroll 4
    for (unsigned head = 0; head < heads; ++head) {
      float x[kCount];
      load_lanes(d_k + ((key * heads + head) * (nope + rope) + nope + at) * kCount, x);
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) sums[lane] += x[lane];
    }
    store_lanes(sums, d_k_rope + std::int64_t{i} * kCount);
  }
}

/// Transposes [B, S, H] to [B, H, S].
__global__ void by_head_kernel(const float* x_BSH, float* y_BHS, std::int64_t size, unsigned tokens, unsigned heads) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / tokens, seq = row / heads;
    y_BHS[i] = x_BSH[(seq * tokens + i - row * tokens) * heads + row - seq * heads];
  }
}

constexpr int kTableThreads = 1024;

struct TableSizes {
  std::int64_t num_tokens, seq_len, max_documents;
  std::int64_t token_qk, token_v, token_o, token_lse;  // numbers per token in the operands
};

/// Finds the documents. `crowded` becomes 1 if the table cannot hold them, or else 0.
__global__ void __launch_bounds__(kTableThreads)
    document_table_kernel(const std::int32_t* doc_start, TableSizes sizes, DocumentTable table, std::int32_t* crowded) {
  using Scan = cub::BlockScan<int, kTableThreads>;
  __shared__ typename Scan::TempStorage memory;
  __shared__ bool irregular;
  if (threadIdx.x == 0) irregular = false;
  __syncthreads();
  const auto set = [&](std::int64_t document, std::int64_t token) {
    table.of_qk[document] = token * sizes.token_qk;
    table.of_v[document] = token * sizes.token_v;
    table.of_o[document] = token * sizes.token_o;
    table.of_lse[document] = token * sizes.token_lse;
  };
  // A thread has neighbouring tokens. It first counts the documents that start at them, and then writes these.
  const std::int64_t per_thread = (sizes.num_tokens + kTableThreads - 1) / kTableThreads;
  const std::int64_t begin = threadIdx.x * per_thread, end = min(begin + per_thread, sizes.num_tokens);
  int starts = 0, before = 0, found = 0;
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t position = token % sizes.seq_len;
    if (doc_start[token] == position) {
      ++starts;
    } else if (position == 0 || doc_start[token] != doc_start[token - 1]) {
      irregular = true;
    }
  }
  Scan(memory).ExclusiveSum(starts, before, found);
  for (std::int64_t token = begin; token < end; ++token) {
    if (doc_start[token] == token % sizes.seq_len && before < sizes.max_documents) set(before++, token);
  }
  __syncthreads();
  const bool holds = found <= sizes.max_documents && !irregular;
  if (!holds) found = 0;
  for (int document = found + static_cast<int>(threadIdx.x); document <= sizes.max_documents;
       document += kTableThreads) {
    set(document, holds ? sizes.num_tokens : 0);
  }
  __syncthreads();
  for (std::int64_t document = threadIdx.x; document < sizes.max_documents; document += kTableThreads) {
    table.lengths[document] =
        static_cast<std::int32_t>((table.of_lse[document + 1] - table.of_lse[document]) / sizes.token_lse);
  }
  if (threadIdx.x == 0) *crowded = holds ? 0 : 1;
}

/// Holds what both passes need in the arena.
struct Scratch {
  Tensor k_KHN;
  Tensor lengths, offsets, crowded_1;  // undefined for whole sequences
  std::byte* workspace = nullptr;
  DocumentTable table;

  const std::int32_t* crowded() const { return numbers<const std::int32_t>(crowded_1); }
};

Scratch allocate(const Context& op, const MlaDims& dims, const MlaOperands& operands, bool is_library, bool backward) {
  const AttentionShape shape = library_shape(op, dims);
  Scratch scratch;
  scratch.k_KHN = op.arena->allocate({shape.num_tokens(), shape.num_heads, shape.dim_qk}, operands.q.dtype());
  if (!is_library) return scratch;
  // cuDNN is asked while the step is measured, too. Its graphs are built then.
  scratch.workspace =
      op.arena->allocate_bytes(op.cuda == nullptr ? AttentionLibrary::estimated_workspace_bytes(shape, backward)
                                                  : op.cuda->libraries().attention().workspace_bytes(shape, backward));
  if (shape.max_documents == 0) return scratch;
  const std::int64_t documents = shape.max_documents;
  scratch.lengths = op.arena->allocate({documents}, DType::kInt32);
  // These are four columns of int64, for which there is no dtype.
  scratch.offsets = op.arena->allocate({4 * (documents + 1)}, DType::kFloat64);
  scratch.crowded_1 = op.arena->allocate({1}, DType::kInt32);
  auto* offsets = static_cast<std::int64_t*>(scratch.offsets.raw());
  scratch.table = {.lengths = static_cast<std::int32_t*>(scratch.lengths.raw()),
                   .of_qk = offsets,
                   .of_v = offsets + (documents + 1),
                   .of_o = offsets + 2 * (documents + 1),
                   .of_lse = offsets + 3 * (documents + 1)};
  return scratch;
}

void join_keys(const Context& op, const MlaDims& dims, const MlaOperands& operands, const Tensor& k_KHN) {
  const bool fits = in_lanes(operands.kv, operands.k_rope, k_KHN) && dims.dim_nope % kLanes == 0 &&
                    dims.dim_rope % kLanes == 0 && dims.dim_v % kLanes == 0;
  for_float_type(k_KHN.dtype(), [&]<typename T>(T) {
    for_lanes(fits, [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      const unsigned size = groups_of<kCount>(k_KHN.num_elements());
      join_keys_kernel<T, kCount><<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(operands.kv), numbers<const T>(operands.k_rope), numbers<T>(k_KHN), size,
          static_cast<unsigned>(dims.num_heads), static_cast<unsigned>(dims.dim_nope / kCount),
          static_cast<unsigned>(dims.dim_rope / kCount), static_cast<unsigned>(dims.dim_v / kCount));
    });
  });
}

void split_key_gradients(const Context& op, const MlaDims& dims, const Tensor& d_k_KHN, const Tensor& d_kv,
                         const Tensor& d_k_rope) {
  const bool fits = in_lanes(d_kv, d_k_rope, d_k_KHN) && dims.dim_nope % kLanes == 0 && dims.dim_rope % kLanes == 0 &&
                    dims.dim_v % kLanes == 0;
  for_float_type(d_k_KHN.dtype(), [&]<typename T>(T) {
    for_lanes(fits, [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      const auto heads = static_cast<unsigned>(dims.num_heads), nope = static_cast<unsigned>(dims.dim_nope / kCount),
                 rope = static_cast<unsigned>(dims.dim_rope / kCount), v = static_cast<unsigned>(dims.dim_v / kCount);
      const std::int64_t keys = d_k_KHN.dim(0);
      const unsigned size = groups_of<kCount>(keys * dims.num_heads * dims.dim_nope),
                     rope_size = groups_of<kCount>(keys * dims.dim_rope);
      split_keys_kernel<T, kCount><<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(d_k_KHN), numbers<T>(d_kv), size, nope, rope, v);
      sum_heads_kernel<T, kCount><<<grid_for(op, rope_size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(d_k_KHN), numbers<T>(d_k_rope), rope_size, heads, nope, rope);
    });
  });
}

void find_documents(const Context& op, const AttentionShape& shape, const Tensor& doc_start_T, const Scratch& scratch) {
  const std::int64_t heads = shape.num_heads;
  document_table_kernel<<<1, kTableThreads, 0, stream_of(op)>>>(numbers<const std::int32_t>(doc_start_T),
                                                                {.num_tokens = shape.num_tokens(),
                                                                 .seq_len = shape.seq_len,
                                                                 .max_documents = shape.max_documents,
                                                                 .token_qk = heads * shape.dim_qk,
                                                                 .token_v = heads * shape.v_stride,
                                                                 .token_o = heads * shape.dim_v,
                                                                 .token_lse = heads},
                                                                scratch.table,
                                                                numbers<std::int32_t>(scratch.crowded_1));
}

/// Returns the address of v within kv.
void* values_of(const MlaDims& dims, const Tensor& kv) {
  return static_cast<std::byte*>(kv.raw()) + static_cast<std::size_t>(dims.dim_nope) * size_of(kv.dtype());
}

void check_fits(const MlaDims& dims) {
  require(plain_attention_fits(dims),
          "attention on a GPU takes heads of up to 256 numbers, not queries of {} + {} (model.args.qk_nope_head_dim, "
          "qk_rope_head_dim) and values of {} (v_head_dim)",
          dims.dim_nope, dims.dim_rope, dims.dim_v);
}

}  // namespace

void mla_attention_forward(const Context& op, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                           const Tensor& lse_TH) {
  check_fits(dims);
  const bool is_library = is_for_library(dims, operands);
  if (op.measuring() && !is_library && operands.q.dtype() == DType::kBFloat16 && op.cuda != nullptr) {
    op.cuda->add_slow_operator(
        fmt::format("attention of heads of {} + {} and {} runs without tensor cores: cuDNN takes 128 + 64 and 128, or "
                    "multiples of 8 "
                    "up to 128 in all, of whole sequences (without context parallelism)",
                    dims.dim_nope, dims.dim_rope, dims.dim_v));
  }
  const AttentionShape shape = library_shape(op, dims);
  const ArenaScope scope(*op.arena);
  const Scratch scratch = allocate(op, dims, operands, is_library, /*backward=*/false);
  if (op.measuring() || operands.q.num_elements() == 0) return;
  join_keys(op, dims, operands, scratch.k_KHN);
  if (is_library) {
    if (shape.max_documents > 0) find_documents(op, shape, operands.doc_start_T, scratch);
    op.cuda->libraries().attention().forward(shape,
                                             {.q = operands.q.raw(),
                                              .k = scratch.k_KHN.raw(),
                                              .v = values_of(dims, operands.kv),
                                              .o = o.raw(),
                                              .lse = numbers<float>(lse_TH)},
                                             scratch.table, scratch.workspace);
    if (shape.max_documents == 0) return;
  }
  plain_attention_forward(op, {.dims = dims,
                               .q = operands.q,
                               .k_KHN = scratch.k_KHN,
                               .kv = operands.kv,
                               .doc_start_T = operands.doc_start_T,
                               .o = o,
                               .lse_TH = lse_TH,
                               .enabled = scratch.crowded()});
}

void mla_attention_backward(const Context& op, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope) {
  check_fits(dims);
  const bool is_library = is_for_library(dims, operands);
  const AttentionShape shape = library_shape(op, dims);
  const ArenaScope scope(*op.arena);
  const Scratch scratch = allocate(op, dims, operands, is_library, /*backward=*/true);
  const Tensor d_k_KHN = op.arena->allocate(scratch.k_KHN.shape(), scratch.k_KHN.dtype());
  // Holds the plain kernels' o · d_o, or the logsumexps by head for cuDNN.
  const Tensor per_query = op.arena->allocate(lse_TH.shape(), DType::kFloat32);
  if (op.measuring() || operands.q.num_elements() == 0) return;
  join_keys(op, dims, operands, scratch.k_KHN);
  if (is_library) {
    Tensor lse = lse_TH;
    if (shape.max_documents > 0) {
      find_documents(op, shape, operands.doc_start_T, scratch);
    } else {
      lse = per_query;
      by_head_kernel<<<grid_for(op, lse.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const float>(lse_TH), numbers<float>(lse), lse.num_elements(), static_cast<unsigned>(dims.seq_len),
          static_cast<unsigned>(dims.num_heads));
    }
    op.cuda->libraries().attention().backward(shape,
                                              {.q = operands.q.raw(),
                                               .k = scratch.k_KHN.raw(),
                                               .v = values_of(dims, operands.kv),
                                               .o = o.raw(),
                                               .lse = numbers<float>(lse),
                                               .d_o = d_o.raw(),
                                               .d_q = d_q.raw(),
                                               .d_k = d_k_KHN.raw(),
                                               .d_v = values_of(dims, d_kv)},
                                              scratch.table, scratch.workspace);
  }
  if (!is_library || shape.max_documents > 0) {
    plain_attention_backward(op,
                             {.dims = dims,
                              .q = operands.q,
                              .k_KHN = scratch.k_KHN,
                              .kv = operands.kv,
                              .doc_start_T = operands.doc_start_T,
                              .o = o,
                              .lse_TH = lse_TH,
                              .enabled = scratch.crowded()},
                             d_o, d_q, d_k_KHN, d_kv, per_query);
  }
  split_key_gradients(op, dims, d_k_KHN, d_kv, d_k_rope);
}

}  // namespace tessera::cuda
