// cuDNN computes attention for bfloat16 and whole sequences of queries. Plain kernels compute the rest. Both read keys
// as one matrix per head, [k_nope | k_rope], which is assembled here. They write its gradient in the same form. Many
// heads are computed group by group, so that these copies and cuDNN's scratch memory stay small.
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

/// Returns how many heads are computed at a time. A group has at least kMinHeads, and enough tokens to keep a GPU busy.
/// The 128 heads of the 671B model with 8192 tokens take 1.2 GiB less in four groups, and 3.5 % more time. cuDNN takes
/// lse to be aligned to 16 bytes, so every group begins at a multiple of kHeadStep heads.
std::int64_t heads_of_group(const MlaDims& dims) {
  constexpr std::int64_t kHeadStep = 16 / sizeof(float), kMinHeads = 32, kMinHeadTokens = std::int64_t{1} << 18;
  static_assert(kMinHeads % kHeadStep == 0);
  for (std::int64_t heads = kMinHeads; heads < dims.num_heads; heads += kHeadStep) {
    if (dims.num_heads % heads == 0 && heads * dims.num_seqs * dims.seq_len >= kMinHeadTokens) return heads;
  }
  return dims.num_heads;
}

/// Returns the shape of a group of heads.
AttentionShape library_shape(const Context& op, const MlaDims& dims) {
  AttentionShape shape{.num_seqs = dims.num_seqs,
                       .seq_len = dims.seq_len,
                       .num_heads = heads_of_group(dims),
                       .token_heads = dims.num_heads,
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

/// Returns the number of units of kCount numbers. It must fit 32 bits, because kernels divide such numbers four times
/// as fast.
template <int kCount>
unsigned groups_of(std::int64_t num_elements) {
  TESSERA_CHECK(num_elements / kCount < std::int64_t{1} << 31, "{}", num_elements);
  return static_cast<unsigned>(num_elements / kCount);
}

/// Counts the heads of a group and of a token, and names the group's first head.
struct Heads {
  unsigned of_group, of_token, first;
};

/// Holds the sizes of a head's parts, in units of kCount numbers.
struct HeadSizes {
  unsigned nope, rope, v;
};

/// Writes k [K, of_group, nope + rope] from kv and k_rope. `size` counts units of kCount numbers.
template <typename T, int kCount>
__global__ void join_keys_kernel(const T* kv, const T* k_rope, T* k, unsigned size, Heads heads, HeadSizes sizes) {
  const unsigned qk = sizes.nope + sizes.rope;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const unsigned key_head = i / qk, at = i % qk, key = key_head / heads.of_group;
    const std::int64_t token_head = std::int64_t{key} * heads.of_token + heads.first + key_head % heads.of_group;
    const T* from = at < sizes.nope ? kv + (token_head * (sizes.nope + sizes.v) + at) * kCount
                                    : k_rope + (std::int64_t{key} * sizes.rope + at - sizes.nope) * kCount;
    put_lanes(get_lanes<kCount>(from), k + std::int64_t{i} * kCount);
  }
}

/// Copies the nope part of d_k into d_kv.
template <typename T, int kCount>
__global__ void split_keys_kernel(const T* d_k, T* d_kv, unsigned size, Heads heads, HeadSizes sizes) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const unsigned key_head = i / sizes.nope, at = i % sizes.nope;
    const std::int64_t token_head =
        std::int64_t{key_head / heads.of_group} * heads.of_token + heads.first + key_head % heads.of_group;
    put_lanes(get_lanes<kCount>(d_k + (std::int64_t{key_head} * (sizes.nope + sizes.rope) + at) * kCount),
              d_kv + (token_head * (sizes.nope + sizes.v) + at) * kCount);
  }
}

/// Adds up the rope part of d_k over the heads, in the order of heads. The sums go on from those of the groups before,
/// `sums_before`, or begin if it is null. They go to `sums_after` or, if it is null, to d_k_rope.
template <typename T, int kCount>
__global__ void sum_heads_kernel(const T* d_k, const float* sums_before, float* sums_after, T* d_k_rope, unsigned size,
                                 unsigned heads, HeadSizes sizes) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads) {
    const std::int64_t key = i / sizes.rope, at_sums = std::int64_t{i} * kCount;
    const unsigned at = i % sizes.rope;
    float sums[kCount] = {};
    if (sums_before != nullptr) {
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) sums[lane] = sums_before[at_sums + lane];
    }
#pragma unroll 4
    for (unsigned head = 0; head < heads; ++head) {
      float x[kCount];
      load_lanes(d_k + ((key * heads + head) * (sizes.nope + sizes.rope) + sizes.nope + at) * kCount, x);
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) sums[lane] += x[lane];
    }
    if (sums_after == nullptr) {
      store_lanes(sums, d_k_rope + at_sums);
      continue;
    }
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) sums_after[at_sums + lane] = sums[lane];
  }
}

/// Writes a group's heads of [B, S, H] as [B, heads, S].
__global__ void by_head_kernel(const float* x_BSH, float* y_BGS, std::int64_t size, unsigned tokens, Heads heads) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / tokens, seq = row / heads.of_group;
    y_BGS[i] = x_BSH[(seq * tokens + i - row * tokens) * heads.of_token + heads.first + row - seq * heads.of_group];
  }
}

constexpr int kTableThreads = 1024;

struct TableSizes {
  std::int64_t num_tokens, seq_len, max_documents;
  std::int64_t token_q, token_k, token_v, token_o, token_lse;  // numbers per token in the operands
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
    table.of_q[document] = token * sizes.token_q;
    table.of_k[document] = token * sizes.token_k;
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

/// Holds what both passes need in the arena, for one group of heads.
struct Scratch {
  Tensor k_KGN;
  Tensor lengths, offsets, crowded_1;  // undefined for whole sequences
  std::byte* workspace = nullptr;
  DocumentTable table;

  const std::int32_t* crowded() const { return numbers<const std::int32_t>(crowded_1); }
};

Scratch allocate(const Context& op, const MlaDims& dims, const MlaOperands& operands, bool is_library, bool backward) {
  const AttentionShape shape = library_shape(op, dims);
  Scratch scratch;
  scratch.k_KGN = op.arena->allocate({shape.num_tokens(), shape.num_heads, shape.dim_qk}, operands.q.dtype());
  if (!is_library) return scratch;
  // cuDNN is asked while the step is measured, too. Its graphs are built then.
  scratch.workspace =
      op.arena->allocate_bytes(op.cuda == nullptr ? AttentionLibrary::estimated_workspace_bytes(shape, backward)
                                                  : op.cuda->libraries().attention().workspace_bytes(shape, backward));
  if (shape.max_documents == 0) return scratch;
  const std::int64_t documents = shape.max_documents;
  scratch.lengths = op.arena->allocate({documents}, DType::kInt32);
  // These are five columns of int64, for which there is no dtype.
  scratch.offsets = op.arena->allocate({5 * (documents + 1)}, DType::kFloat64);
  scratch.crowded_1 = op.arena->allocate({1}, DType::kInt32);
  auto* offsets = static_cast<std::int64_t*>(scratch.offsets.raw());
  scratch.table = {.lengths = static_cast<std::int32_t*>(scratch.lengths.raw()),
                   .of_q = offsets,
                   .of_k = offsets + (documents + 1),
                   .of_v = offsets + 2 * (documents + 1),
                   .of_o = offsets + 3 * (documents + 1),
                   .of_lse = offsets + 4 * (documents + 1)};
  return scratch;
}

Heads heads_of(const AttentionShape& shape, std::int64_t first_head) {
  return {.of_group = static_cast<unsigned>(shape.num_heads),
          .of_token = static_cast<unsigned>(shape.token_heads),
          .first = static_cast<unsigned>(first_head)};
}

template <int kCount>
HeadSizes sizes_of(const MlaDims& dims) {
  return {.nope = static_cast<unsigned>(dims.dim_nope / kCount),
          .rope = static_cast<unsigned>(dims.dim_rope / kCount),
          .v = static_cast<unsigned>(dims.dim_v / kCount)};
}

bool dims_fit_lanes(const MlaDims& dims) {
  return dims.dim_nope % kLanes == 0 && dims.dim_rope % kLanes == 0 && dims.dim_v % kLanes == 0;
}

void join_keys(const Context& op, const MlaDims& dims, const MlaOperands& operands, Heads heads, const Tensor& k_KGN) {
  const bool fits = in_lanes(operands.kv, operands.k_rope, k_KGN) && dims_fit_lanes(dims);
  for_float_type(k_KGN.dtype(), [&]<typename T>(T) {
    for_lanes(fits, [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      const unsigned size = groups_of<kCount>(k_KGN.num_elements());
      join_keys_kernel<T, kCount><<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(operands.kv), numbers<const T>(operands.k_rope), numbers<T>(k_KGN), size, heads,
          sizes_of<kCount>(dims));
    });
  });
}

/// Writes a group's part of d_kv, and adds up that of d_k_rope. The sums of groups before the last stay in sums_KN,
/// which is undefined if there is one group.
void split_key_gradients(const Context& op, const MlaDims& dims, const Tensor& d_k_KGN, Heads heads,
                         const Tensor& sums_KN, const Tensor& d_kv, const Tensor& d_k_rope) {
  const bool fits = in_lanes(d_kv, d_k_rope, d_k_KGN) && dims_fit_lanes(dims);
  float* const sums = sums_KN.defined() ? numbers<float>(sums_KN) : nullptr;
  for_float_type(d_k_KGN.dtype(), [&]<typename T>(T) {
    for_lanes(fits, [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      const HeadSizes sizes = sizes_of<kCount>(dims);
      const std::int64_t keys = d_k_KGN.dim(0);
      const unsigned size = groups_of<kCount>(keys * heads.of_group * dims.dim_nope),
                     rope_size = groups_of<kCount>(keys * dims.dim_rope);
      split_keys_kernel<T, kCount><<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(d_k_KGN), numbers<T>(d_kv), size, heads, sizes);
      sum_heads_kernel<T, kCount><<<grid_for(op, rope_size, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const T>(d_k_KGN), heads.first == 0 ? nullptr : sums,
          heads.first + heads.of_group == heads.of_token ? nullptr : sums, numbers<T>(d_k_rope), rope_size,
          heads.of_group, sizes);
    });
  });
}

void find_documents(const Context& op, const AttentionShape& shape, const Tensor& doc_start_T, const Scratch& scratch) {
  const std::int64_t heads = shape.token_heads;
  document_table_kernel<<<1, kTableThreads, 0, stream_of(op)>>>(numbers<const std::int32_t>(doc_start_T),
                                                                {.num_tokens = shape.num_tokens(),
                                                                 .seq_len = shape.seq_len,
                                                                 .max_documents = shape.max_documents,
                                                                 .token_q = heads * shape.dim_qk,
                                                                 .token_k = shape.num_heads * shape.dim_qk,
                                                                 .token_v = heads * shape.v_stride,
                                                                 .token_o = heads * shape.dim_v,
                                                                 .token_lse = heads},
                                                                scratch.table,
                                                                numbers<std::int32_t>(scratch.crowded_1));
}

/// Returns the address of a head in [T, H · dim].
void* head_of(const Tensor& x, std::int64_t head, std::int64_t dim) { return x.columns(head * dim, x.dim(1)).raw(); }

/// Returns the address of a head's v within kv.
void* values_of(const MlaDims& dims, const Tensor& kv, std::int64_t head) {
  return kv.columns(head * (dims.dim_nope + dims.dim_v) + dims.dim_nope, kv.dim(1)).raw();
}

/// Returns the operands of the plain kernels for a group of heads.
PlainAttention plain_operands(const MlaDims& dims, std::int64_t first_head, const MlaOperands& operands,
                              const Scratch& scratch, const Tensor& o, const Tensor& lse_TH) {
  return {.dims = dims,
          .first_head = first_head,
          .q = operands.q,
          .k_KGN = scratch.k_KGN,
          .kv = operands.kv,
          .doc_start_T = operands.doc_start_T,
          .o = o,
          .lse_TH = lse_TH,
          .enabled = scratch.crowded()};
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
  if (is_library && shape.max_documents > 0) find_documents(op, shape, operands.doc_start_T, scratch);
  for (std::int64_t head = 0; head < dims.num_heads; head += shape.num_heads) {
    join_keys(op, dims, operands, heads_of(shape, head), scratch.k_KGN);
    if (is_library) {
      op.cuda->libraries().attention().forward(shape,
                                               {.q = head_of(operands.q, head, shape.dim_qk),
                                                .k = scratch.k_KGN.raw(),
                                                .v = values_of(dims, operands.kv, head),
                                                .o = head_of(o, head, dims.dim_v),
                                                .lse = numbers<float>(lse_TH) + head},
                                               scratch.table, scratch.workspace);
    }
    if (is_library && shape.max_documents == 0) continue;
    plain_attention_forward(op, plain_operands(dims, head, operands, scratch, o, lse_TH));
  }
}

void mla_attention_backward(const Context& op, const MlaDims& dims, const MlaOperands& operands, const Tensor& o,
                            const Tensor& lse_TH, const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                            const Tensor& d_k_rope) {
  check_fits(dims);
  const bool is_library = is_for_library(dims, operands);
  const AttentionShape shape = library_shape(op, dims);
  const bool is_plain = !is_library || shape.max_documents > 0;
  const ArenaScope scope(*op.arena);
  const Scratch scratch = allocate(op, dims, operands, is_library, /*backward=*/true);
  const Tensor d_k_KGN = op.arena->allocate(scratch.k_KGN.shape(), scratch.k_KGN.dtype());
  // Holds the plain kernels' o · d_o, or a group's logsumexps by head for cuDNN.
  const Tensor per_query = op.arena->allocate(lse_TH.shape(), DType::kFloat32);
  const Tensor sums_KN =
      shape.num_heads < dims.num_heads ? op.arena->allocate(d_k_rope.shape(), DType::kFloat32) : Tensor();
  if (op.measuring() || operands.q.num_elements() == 0) return;
  if (is_library && shape.max_documents > 0) find_documents(op, shape, operands.doc_start_T, scratch);
  if (is_plain) plain_attention_delta(op, plain_operands(dims, 0, operands, scratch, o, lse_TH), d_o, per_query);
  for (std::int64_t head = 0; head < dims.num_heads; head += shape.num_heads) {
    const Heads heads = heads_of(shape, head);
    join_keys(op, dims, operands, heads, scratch.k_KGN);
    if (is_library) {
      float* lse = numbers<float>(lse_TH) + head;
      if (!is_plain) {
        lse = numbers<float>(per_query);
        const std::int64_t size = shape.num_tokens() * shape.num_heads;
        by_head_kernel<<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(
            numbers<const float>(lse_TH), lse, size, static_cast<unsigned>(dims.seq_len), heads);
      }
      op.cuda->libraries().attention().backward(shape,
                                                {.q = head_of(operands.q, head, shape.dim_qk),
                                                 .k = scratch.k_KGN.raw(),
                                                 .v = values_of(dims, operands.kv, head),
                                                 .o = head_of(o, head, dims.dim_v),
                                                 .lse = lse,
                                                 .d_o = head_of(d_o, head, dims.dim_v),
                                                 .d_q = head_of(d_q, head, shape.dim_qk),
                                                 .d_k = d_k_KGN.raw(),
                                                 .d_v = values_of(dims, d_kv, head)},
                                                scratch.table, scratch.workspace);
    }
    if (is_plain) {
      plain_attention_backward(op, plain_operands(dims, head, operands, scratch, o, lse_TH), d_o, d_q, d_k_KGN, d_kv,
                               per_query);
    }
    split_key_gradients(op, dims, d_k_KGN, heads, sums_KN, d_kv, d_k_rope);
  }
}

}  // namespace tessera::cuda
