// In the backward, one block sorts a tile of tokens stably by id. Then the rows of each id's run are added up in their
// order. The next tile follows.
#include <bit>
#include <cub/block/block_radix_sort.cuh>

#include "ops/elementwise/embedding.h"
#include "ops/kit/launch.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// If an id has more than kLong tokens in a tile, kLong blocks share its columns.
constexpr int kLong = 32;
/// The number of columns that such a block adds at a time, and the number of rows that it fetches at a time.
constexpr int kSlice = 64, kChunk = 128;
/// Sizes of a tile: threads of a sorting block, and tokens per thread.
constexpr int kSortThreads = 1024, kTokensEach = 16, kTokenBits = 14, kTile = 1 << kTokenBits;
static_assert(kTile == kSortThreads * kTokensEach);

template <typename T, int kCount>
__global__ void forward_kernel(const std::int32_t* tokens, const T* table, std::int64_t num_ids, std::int64_t first_id,
                               T* x, std::uint32_t groups_per_row, std::uint32_t num_groups) {
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < num_groups; i += gridDim.x * kThreads) {
    const std::int64_t token = i / groups_per_row, column = i % groups_per_row, row = tokens[token] - first_id;
    Lanes<T, kCount> numbers{};
    if (0 <= row && row < num_ids) {
      numbers = reinterpret_cast<const Lanes<T, kCount>*>(table)[row * groups_per_row + column];
    }
    reinterpret_cast<Lanes<T, kCount>*>(x)[token * groups_per_row + column] = numbers;
  }
}

template <typename Key>
using Sort = cub::BlockRadixSort<Key, kSortThreads, kTokensEach>;

/// Sorts each tile in one block. rows_T becomes rows of the table in ascending order, or num_ids for a token without a
/// row. order_T becomes their tokens, counted from the tile's first. A Key has the row in its high bits and the token
/// in its low bits.
template <typename Key>
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t first_id, std::int64_t num_ids,
                int num_bits, std::uint32_t* rows, std::uint16_t* order) {
  extern __shared__ __align__(16) std::byte memory[];
  const std::int64_t start = std::int64_t{blockIdx.x} * kTile;
  Key keys[kTokensEach];
#pragma unroll
  for (int i = 0; i < kTokensEach; ++i) {
    const int token = threadIdx.x * kTokensEach + i;
    const std::int64_t id = start + token < num_tokens ? tokens[start + token] - first_id : num_ids;
    keys[i] = static_cast<Key>(0 <= id && id < num_ids ? id : num_ids) << kTokenBits | token;
  }
  Sort<Key>(reinterpret_cast<typename Sort<Key>::TempStorage&>(memory))
      .SortBlockedToStriped(keys, kTokenBits, kTokenBits + num_bits);
#pragma unroll
  for (int i = 0; i < kTokensEach; ++i) {
    const std::int64_t place = start + i * kSortThreads + threadIdx.x;
    if (place >= num_tokens) break;
    rows[place] = static_cast<std::uint32_t>(keys[i] >> kTokenBits);
    order[place] = static_cast<std::uint16_t>(keys[i] & (kTile - 1));
  }
}

template <typename T>
struct BackwardArgs {
  const std::uint32_t* rows;   // rows of a tile in sorted order; num_ids for tokens without a row
  const std::uint16_t* order;  // the tokens of these rows
  std::int64_t num_tokens, dim;
  std::uint32_t num_ids;
  const T* d_x;
  float* d_table;

  __device__ bool has(std::int64_t place, std::uint32_t row) const { return place < num_tokens && rows[place] == row; }
};

/// Adds all rows of a run to d_row. The lanes of each warp hold the tokens of the run.
template <int kInFlight, int kCount, typename T>
__device__ void add_short_run(const BackwardArgs<T>& args, std::int32_t token, int count, float* d_row) {
#pragma unroll 1
  for (std::int64_t first = 0; first < args.dim; first += kThreads * kCount) {
    const std::int64_t j = first + threadIdx.x * kCount;
    const bool there = j < args.dim;
    float sum[kCount] = {};
    if (there) load_lanes(d_row + j, sum);
#pragma unroll 1
    for (int i = 0; i < count; i += kInFlight) {
      Lanes<T, kCount> numbers[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const std::int64_t t = __shfl_sync(~0u, token, i + k);
        if (i + k < count && there) numbers[k] = get_lanes<kCount>(args.d_x + t * args.dim + j);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k >= count) break;
#pragma unroll
        for (int lane = 0; lane < kCount; ++lane) sum[lane] += to_float(numbers[k].x[lane]);
      }
    }
    if (there) store_lanes(sum, d_row + j);
  }
}

/// Adds the rows of the run that starts at place `start` to d_row, in every kLong-th slice of columns. All threads
/// fetch rows, and one thread per column adds them.
template <int kCount, typename T>
__device__ void add_long_run(const BackwardArgs<T>& args, std::uint32_t row, std::int64_t start, int first_slice,
                             float* d_row) {
  constexpr int kGroups = kSlice / kCount;
  __shared__ __align__(16) T chunk[kChunk][kSlice];
#pragma unroll 1
  for (std::int64_t first = first_slice * kSlice; first < args.dim; first += kLong * kSlice) {
    const std::int64_t j = first + threadIdx.x;
    const bool adds = threadIdx.x < kSlice && j < args.dim;
    float sum = adds ? d_row[j] : 0.0f;
#pragma unroll 1
    for (std::int64_t place = start; args.has(place, row); place += kChunk) {
#pragma unroll 4
      for (int i = threadIdx.x; i < kChunk * kGroups; i += kThreads) {
        const int line = i / kGroups, column = i % kGroups * kCount;
        if (!args.has(place + line, row) || first + column >= args.dim) continue;
        *reinterpret_cast<Lanes<T, kCount>*>(&chunk[line][column]) =
            get_lanes<kCount>(args.d_x + args.order[place + line] * args.dim + first + column);
      }
      const int count = __syncthreads_count(threadIdx.x < kChunk && args.has(place + threadIdx.x, row));
      if (adds) {
#pragma unroll 8
        for (int line = 0; line < count; ++line) sum += to_float(chunk[line][threadIdx.x]);
      }
      __syncthreads();
    }
    if (adds) d_row[j] = sum;
  }
}

/// Each place has a block. The block of a run's first place adds up the run. For a long run, the first kLong blocks
/// share it.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 6) add_runs_kernel(const BackwardArgs<T> args) {
  static_assert(kLong == kWarp && kChunk <= kThreads);
  const std::int64_t place = blockIdx.x;
  const int lane = threadIdx.x % kWarp;
  const std::uint32_t row = args.rows[place];
  if (row == args.num_ids) return;
  const bool before = place > lane && args.rows[place - 1 - lane] == row, after = args.has(place + 1 + lane, row);
  const std::int32_t token = args.has(place + lane, row) ? args.order[place + lane] : 0;
  const int num_before = __popc(__ballot_sync(~0u, before)), num_after = __popc(__ballot_sync(~0u, after));
  float* d_row = args.d_table + row * args.dim;
  if (num_before + num_after < kLong) {
    if (num_before == 0) add_short_run<2, kCount>(args, token, num_after + 1, d_row);
  } else if (num_before < kLong) {
    add_long_run<kCount>(args, row, place - num_before, num_before, d_row);
  }
}

}  // namespace

void embedding_forward(const Context& op, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD) {
  if (op.measuring() || x_TD.num_elements() == 0) return;
  TESSERA_CHECK(x_TD.num_elements() <= kMost32BitItems, "{}", x_TD.shape().to_string());
  for_float_type(table_VD.dtype(), [&]<typename T>(T) {
    for_lanes(table_VD.is_contiguous() && in_lanes(table_VD, x_TD), [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      const auto num_groups = static_cast<std::uint32_t>(x_TD.num_elements() / kCount);
      forward_kernel<T, kCount><<<grid_for(op, num_groups, kThreads), kThreads, 0, stream_of(op)>>>(
          numbers<const std::int32_t>(tokens_T), numbers<T>(table_VD), table_VD.dim(0), first_id, numbers<T>(x_TD),
          static_cast<std::uint32_t>(x_TD.dim(1) / kCount), num_groups);
    });
  });
}

void embedding_backward(const Context& op, const Tensor& tokens_T, const Tensor& d_x_TD, std::int64_t first_id,
                        const Tensor& d_table_VD) {
  const std::int64_t num_tokens = tokens_T.dim(0), num_ids = d_table_VD.dim(0), dim = d_table_VD.dim(1);
  const ArenaScope scope(*op.arena);
  const Tensor rows_T = op.arena->allocate({num_tokens}, DType::kInt32);
  auto* order = reinterpret_cast<std::uint16_t*>(op.arena->allocate_bytes(num_tokens * sizeof(std::uint16_t)));
  if (op.measuring() || num_tokens == 0 || dim == 0) return;
  auto* rows = numbers<std::uint32_t>(rows_T);
  const int num_bits = std::bit_width(static_cast<std::uint64_t>(num_ids));
  const auto sort = [&]<typename Key>(Key) {
    constexpr int kBytes = sizeof(typename Sort<Key>::TempStorage);
    TESSERA_CUDA(cudaFuncSetAttribute(sort_kernel<Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    sort_kernel<Key><<<static_cast<unsigned>((num_tokens + kTile - 1) / kTile), kSortThreads, kBytes, stream_of(op)>>>(
        numbers<const std::int32_t>(tokens_T), num_tokens, first_id, num_ids, num_bits, rows, order);
  };
  if (num_bits + kTokenBits <= 32) {
    sort(std::uint32_t{});
  } else {
    sort(std::uint64_t{});
  }
  for_float_type(d_x_TD.dtype(), [&]<typename T>(T) {
    for_lanes(in_lanes(d_x_TD, d_table_VD), [&](auto lanes) {
      for (std::int64_t start = 0; start < num_tokens; start += kTile) {
        const BackwardArgs<T> args{.rows = rows + start,
                                   .order = order + start,
                                   .num_tokens = std::min<std::int64_t>(kTile, num_tokens - start),
                                   .dim = dim,
                                   .num_ids = static_cast<std::uint32_t>(num_ids),
                                   .d_x = numbers<T>(d_x_TD) + start * dim,
                                   .d_table = numbers<float>(d_table_VD)};
        add_runs_kernel<T, decltype(lanes)::value>
            <<<static_cast<unsigned>(args.num_tokens), kThreads, 0, stream_of(op)>>>(args);
      }
    });
  });
}

}  // namespace tessera::cuda
