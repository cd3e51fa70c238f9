// A block of threads has a tile of kTile queries (forward, d_q) or keys (d_k, d_v) of one head. It walks over the tiles
// of keys or queries that its tile meets. The forward has a running softmax. The backward recomputes the weights from
// the logsumexps (FlashAttention-2, arXiv 2307.08691). Sums have a fixed order.
#include "ops/attention/attention_kernels.h"
#include "ops/kit/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kTile = 32;                                  // queries or keys
constexpr int kThreads = 256, kPerRow = kThreads / kTile;  // threads per row of a tile
constexpr int kMaxDim = 256, kPerThread = kMaxDim / kPerRow;
constexpr int kScores = kTile / kPerRow;
constexpr float kMasked = -1e30f;

/// Holds shapes and pointers as kernels need them.
template <typename T>
struct Args {
  const T *q, *k, *kv, *o;
  const std::int32_t *doc_start, *enabled;
  float* lse;
  T* out;
  std::int64_t seq_len, per_seq, heads, key_heads, first_head, qk, nope, v;  // k and d_k have key_heads
  std::int64_t begin[2], length;  // begin: of the two ranges of queries; length: of the first one
  float scale;
  // Only the backward uses these.
  const T* d_o = nullptr;
  float* delta = nullptr;
  T *d_q = nullptr, *d_k = nullptr, *d_kv = nullptr;

  /// Returns the position in its sequence of the i-th query of a sequence.
  __device__ std::int64_t position(std::int64_t i) const { return i < length ? begin[0] + i : begin[1] + i - length; }
};

/// Loads rows [first, first + kTile) of a head's matrix as float32 into shared memory. Rows from `end` on become 0.
template <typename T>
__device__ void load_tile(const T* from, std::int64_t stride, std::int64_t first, std::int64_t end, int dim,
                          float* to) {
  for (int i = threadIdx.x; i < kTile * dim; i += kThreads) {
    const int row = i / dim, column = i % dim;
    to[row * (dim + 1) + column] = first + row < end ? to_float(from[(first + row) * stride + column]) : 0.0f;
  }
}

/// Computes products[j] = a[row] · b[column + j · kPerRow] of tiles in shared memory.
__device__ void multiply(const float* a, const float* b, int row, int column, int dim, float (&products)[kScores]) {
#pragma unroll
  for (float& product : products) product = 0.0f;
  for (int i = 0; i < dim; ++i) {
    const float x = a[row * (dim + 1) + i];
#pragma unroll
    for (int j = 0; j < kScores; ++j) products[j] += x * b[(column + j * kPerRow) * (dim + 1) + i];
  }
}

/// Adds to sums[j] the sum over i of weights[i] · x[i][column + j · kPerRow].
__device__ void add_weighted(const float* weights, const float* x, int column, int dim, float (&sums)[kPerThread]) {
  for (int i = 0; i < kTile; ++i) {
    const float weight = weights[i];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (column + j * kPerRow < dim) sums[j] += weight * x[i * (dim + 1) + column + j * kPerRow];
    }
  }
}

template <typename T>
__device__ void store_row(const float (&sums)[kPerThread], float factor, int column, int dim, T* to) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (column + j * kPerRow < dim) to[column + j * kPerRow] = from_float<T>(sums[j] * factor);
  }
}

template <typename Op>
__device__ float reduce_row(float x, Op&& op) {
#pragma unroll
  for (int lane = kPerRow / 2; lane > 0; lane /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

/// Describes the query of one row of a tile.
struct Query {
  bool exists;
  std::int64_t position, first_key;
};
template <typename T>
__device__ Query query_at(const Args<T>& args, std::int64_t seq, std::int64_t i) {
  if (i >= args.per_seq) return {false, -1, 0};
  return {true, args.position(i), args.doc_start[seq * args.per_seq + i]};
}

/// Places a block's tiles in its shared memory. `rest` is what lies behind them.
struct Tiles {
  float *q, *k, *v, *rest;
};
template <typename T>
__device__ Tiles tiles_of(const Args<T>& args, float* memory) {
  const int qk_size = kTile * static_cast<int>(args.qk + 1), v_size = kTile * static_cast<int>(args.v + 1);
  return {memory, memory + qk_size, memory + 2 * qk_size, memory + 2 * qk_size + v_size};
}

/// Loads a tile of a head's keys and values. The tile begins at key `first`. Rows from `end` on are 0.
template <typename T>
__device__ void load_keys(const Args<T>& args, std::int64_t seq, std::int64_t head, std::int64_t first,
                          std::int64_t end, const Tiles& tiles) {
  const std::int64_t of_keys = seq * args.seq_len * args.key_heads + head - args.first_head,
                     of_head = seq * args.seq_len * args.heads + head, v_stride = args.nope + args.v;
  load_tile(args.k + of_keys * args.qk, args.key_heads * args.qk, first, end, static_cast<int>(args.qk), tiles.k);
  load_tile(args.kv + of_head * v_stride + args.nope, args.heads * v_stride, first, end, static_cast<int>(args.v),
            tiles.v);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Args<T> args) {
  if (args.enabled != nullptr && *args.enabled == 0) return;
  extern __shared__ float memory[];
  const int qk = static_cast<int>(args.qk), v_dim = static_cast<int>(args.v);
  const Tiles tiles = tiles_of(args, memory);
  float* weights = tiles.rest;
  const std::int64_t head = args.first_head + blockIdx.y, seq = blockIdx.z, first = std::int64_t{blockIdx.x} * kTile;
  const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow;
  const Query query = query_at(args, seq, first + row);
  load_tile(args.q + (seq * args.per_seq * args.heads + head) * qk, args.heads * qk, first, args.per_seq, qk, tiles.q);
  const std::int64_t last = min(first + kTile, args.per_seq) - 1;
  const std::int64_t end = args.position(last) + 1;
  float sums[kPerThread] = {}, max = kMasked, total = 0.0f;
  for (std::int64_t key = args.doc_start[seq * args.per_seq + first] / kTile * kTile; key < end; key += kTile) {
    __syncthreads();
    load_keys(args, seq, head, key, end, tiles);
    __syncthreads();
    float scores[kScores], largest = max;
    multiply(tiles.q, tiles.k, row, column, qk, scores);
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      const std::int64_t at = key + column + j * kPerRow;
      scores[j] = query.exists && query.first_key <= at && at <= query.position ? scores[j] * args.scale : kMasked;
      largest = fmaxf(largest, scores[j]);
    }
    largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
    const float shrink = expf(max - largest);
    max = largest;
    total *= shrink;
#pragma unroll
    for (float& sum : sums) sum *= shrink;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      const float weight = scores[j] == kMasked ? 0.0f : expf(scores[j] - max);
      total += weight;
      weights[row * (kTile + 1) + column + j * kPerRow] = weight;
    }
    __syncwarp();
    add_weighted(weights + row * (kTile + 1), tiles.v, column, v_dim, sums);
    __syncwarp();
  }
  total = reduce_row(total, [](float a, float b) { return a + b; });
  if (!query.exists) return;
  const std::int64_t at = (seq * args.per_seq + first + row) * args.heads + head;
  store_row(sums, 1.0f / total, column, v_dim, args.out + at * v_dim);
  if (column == 0) args.lse[at] = max + logf(total);
}

/// Computes delta = o · d_o per query and head. One warp computes each.
template <typename T>
__global__ void delta_kernel(const Args<T> args, std::int64_t count) {
  if (args.enabled != nullptr && *args.enabled == 0) return;
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (at >= count) return;
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x % kWarp; i < args.v; i += kWarp) {
    sum += to_float(args.o[at * args.v + i]) * to_float(args.d_o[at * args.v + i]);
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % kWarp == 0) args.delta[at] = sum;
}

/// Computes the weights p and the gradients d_s / scale of the scores of one query and keys column + j · kPerRow.
template <typename T>
__device__ void weights_of(const Args<T>& args, const Query& query, float lse, float delta, std::int64_t key,
                           int column, const float (&scores)[kScores], const float (&d_p)[kScores], float (&p)[kScores],
                           float (&d_s)[kScores]) {
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    const std::int64_t at = key + column + j * kPerRow;
    const bool seen = query.exists && query.first_key <= at && at <= query.position;
    p[j] = seen ? expf(scores[j] * args.scale - lse) : 0.0f;
    d_s[j] = p[j] * (d_p[j] - delta);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) d_q_kernel(const Args<T> args) {
  if (args.enabled != nullptr && *args.enabled == 0) return;
  extern __shared__ float memory[];
  const int qk = static_cast<int>(args.qk), v_dim = static_cast<int>(args.v);
  const Tiles tiles = tiles_of(args, memory);
  float* d_o = tiles.rest;
  float* d_scores = d_o + kTile * (v_dim + 1);
  const std::int64_t head = args.first_head + blockIdx.y, seq = blockIdx.z, first = std::int64_t{blockIdx.x} * kTile;
  const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow;
  const Query query = query_at(args, seq, first + row);
  const std::int64_t row_of_head = seq * args.per_seq * args.heads + head,
                     at = row_of_head + (first + row) * args.heads;
  load_tile(args.q + row_of_head * qk, args.heads * qk, first, args.per_seq, qk, tiles.q);
  load_tile(args.d_o + row_of_head * v_dim, args.heads * v_dim, first, args.per_seq, v_dim, d_o);
  const float lse = query.exists ? args.lse[at] : 0.0f, delta = query.exists ? args.delta[at] : 0.0f;
  const std::int64_t end = args.position(min(first + kTile, args.per_seq) - 1) + 1;
  float sums[kPerThread] = {};
  for (std::int64_t key = args.doc_start[seq * args.per_seq + first] / kTile * kTile; key < end; key += kTile) {
    __syncthreads();
    load_keys(args, seq, head, key, end, tiles);
    __syncthreads();
    float scores[kScores], d_p[kScores], p[kScores], d_s[kScores];
    multiply(tiles.q, tiles.k, row, column, qk, scores);
    multiply(d_o, tiles.v, row, column, v_dim, d_p);
    weights_of(args, query, lse, delta, key, column, scores, d_p, p, d_s);
#pragma unroll
    for (int j = 0; j < kScores; ++j) d_scores[row * (kTile + 1) + column + j * kPerRow] = d_s[j];
    __syncwarp();
    add_weighted(d_scores + row * (kTile + 1), tiles.k, column, qk, sums);
    __syncwarp();
  }
  if (query.exists) store_row(sums, args.scale, column, qk, args.d_q + at * qk);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) d_kv_kernel(const Args<T> args) {
  if (args.enabled != nullptr && *args.enabled == 0) return;
  extern __shared__ float memory[];
  const int qk = static_cast<int>(args.qk), v_dim = static_cast<int>(args.v);
  const Tiles tiles = tiles_of(args, memory);
  float* d_o = tiles.rest;
  float* weights = d_o + kTile * (v_dim + 1);  // [key][query]
  float* d_scores = weights + kTile * (kTile + 1);
  const std::int64_t head = args.first_head + blockIdx.y, seq = blockIdx.z,
                     first_key = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t end_key = min(first_key + kTile, args.seq_len);
  const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow;
  const std::int64_t row_of_head = seq * args.per_seq * args.heads + head;
  load_keys(args, seq, head, first_key, end_key, tiles);
  float d_k[kPerThread] = {}, d_v[kPerThread] = {};
  for (std::int64_t first = 0; first < args.per_seq; first += kTile) {
    const std::int64_t last = min(first + kTile, args.per_seq) - 1;
    // These queries come before the keys.
    if (args.position(last) < first_key) continue;
    // Documents of later queries do not start earlier.
    if (args.doc_start[seq * args.per_seq + first] >= end_key) break;
    __syncthreads();
    load_tile(args.q + row_of_head * qk, args.heads * qk, first, args.per_seq, qk, tiles.q);
    load_tile(args.d_o + row_of_head * v_dim, args.heads * v_dim, first, args.per_seq, v_dim, d_o);
    __syncthreads();
    const Query query = query_at(args, seq, first + row);
    const std::int64_t at = row_of_head + (first + row) * args.heads;
    float scores[kScores], d_p[kScores], p[kScores], d_s[kScores];
    multiply(tiles.q, tiles.k, row, column, qk, scores);
    multiply(d_o, tiles.v, row, column, v_dim, d_p);
    weights_of(args, query, query.exists ? args.lse[at] : 0.0f, query.exists ? args.delta[at] : 0.0f, first_key, column,
               scores, d_p, p, d_s);
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      weights[(column + j * kPerRow) * (kTile + 1) + row] = p[j];
      d_scores[(column + j * kPerRow) * (kTile + 1) + row] = d_s[j];
    }
    __syncthreads();
    add_weighted(weights + row * (kTile + 1), d_o, column, v_dim, d_v);
    add_weighted(d_scores + row * (kTile + 1), tiles.q, column, qk, d_k);
  }
  if (first_key + row >= end_key) return;
  const std::int64_t key = seq * args.seq_len + first_key + row;
  store_row(d_k, args.scale, column, qk, args.d_k + (key * args.key_heads + head - args.first_head) * qk);
  store_row(d_v, 1.0f, column, v_dim, args.d_kv + (key * args.heads + head) * (args.nope + v_dim) + args.nope);
}

template <typename T>
Args<T> args_of(const PlainAttention& x) {
  const MlaDims& dims = x.dims;
  Args<T> args = {.q = numbers<const T>(x.q),
                  .k = numbers<const T>(x.k_KGN),
                  .kv = numbers<const T>(x.kv),
                  .o = numbers<const T>(x.o),
                  .doc_start = numbers<const std::int32_t>(x.doc_start_T),
                  .enabled = x.enabled,
                  .lse = numbers<float>(x.lse_TH),
                  .out = numbers<T>(x.o),
                  .seq_len = dims.seq_len,
                  .per_seq = dims.queries_per_seq(),
                  .heads = dims.num_heads,
                  .key_heads = x.k_KGN.dim(1),
                  .first_head = x.first_head,
                  .qk = dims.dim_nope + dims.dim_rope,
                  .nope = dims.dim_nope,
                  .v = dims.dim_v,
                  .begin = {0, 0},
                  .length = dims.seq_len,
                  .scale = dims.scale};
  if (!dims.queries.empty()) {
    args.begin[0] = dims.queries[0].begin;
    args.length = dims.queries[0].end - dims.queries[0].begin;
    if (dims.queries.size() > 1) args.begin[1] = dims.queries[1].begin;
  }
  return args;
}

dim3 grid_of(const PlainAttention& x, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kTile - 1) / kTile), static_cast<unsigned>(x.k_KGN.dim(1)),
              static_cast<unsigned>(x.dims.num_seqs));
}

/// Returns the bytes of shared memory for two tiles of q's dim, `num_v` tiles of v's dim and `num_scores` tiles of
/// scores.
int shared_bytes(const MlaDims& dims, int num_v, int num_scores) {
  const std::int64_t qk = dims.dim_nope + dims.dim_rope;
  return static_cast<int>(sizeof(float)) * kTile *
         static_cast<int>(2 * (qk + 1) + num_v * (dims.dim_v + 1) + num_scores * (kTile + 1));
}

template <typename T>
void launch(const Context& op, void (*kernel)(Args<T>), dim3 grid, int bytes, const Args<T>& args) {
  TESSERA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, kThreads, static_cast<std::size_t>(bytes), stream_of(op)>>>(args);
}

}  // namespace

bool plain_attention_fits(const MlaDims& dims) {
  return dims.dim_nope + dims.dim_rope <= kMaxDim && dims.dim_v <= kMaxDim;
}

void plain_attention_forward(const Context& op, const PlainAttention& x) {
  for_float_type(x.q.dtype(), [&]<typename T>(T) {
    launch<T>(op, forward_kernel<T>, grid_of(x, x.dims.queries_per_seq()), shared_bytes(x.dims, 1, 1), args_of<T>(x));
  });
}

void plain_attention_delta(const Context& op, const PlainAttention& x, const Tensor& d_o, const Tensor& delta_TH) {
  for_float_type(x.q.dtype(), [&]<typename T>(T) {
    Args<T> args = args_of<T>(x);
    args.d_o = numbers<const T>(d_o);
    args.delta = numbers<float>(delta_TH);
    const std::int64_t count = delta_TH.num_elements(), per_block = kThreads / kWarp;
    delta_kernel<T>
        <<<static_cast<unsigned>((count + per_block - 1) / per_block), kThreads, 0, stream_of(op)>>>(args, count);
  });
}

void plain_attention_backward(const Context& op, const PlainAttention& x, const Tensor& d_o, const Tensor& d_q,
                              const Tensor& d_k_KGN, const Tensor& d_kv, const Tensor& delta_TH) {
  for_float_type(x.q.dtype(), [&]<typename T>(T) {
    Args<T> args = args_of<T>(x);
    args.d_o = numbers<const T>(d_o);
    args.delta = numbers<float>(delta_TH);
    args.d_q = numbers<T>(d_q);
    args.d_k = numbers<T>(d_k_KGN);
    args.d_kv = numbers<T>(d_kv);
    launch<T>(op, d_q_kernel<T>, grid_of(x, x.dims.queries_per_seq()), shared_bytes(x.dims, 2, 1), args);
    launch<T>(op, d_kv_kernel<T>, grid_of(x, x.dims.seq_len), shared_bytes(x.dims, 2, 2), args);
  });
}

}  // namespace tessera::cuda
