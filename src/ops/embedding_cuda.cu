// The backward sorts the tokens by id, stably, and adds up each id's run of rows in its order.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/cuda/launch.cuh"
#include "ops/embedding.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// Runs up to this long are added up by one warp.
constexpr int kShort = 16;

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

/// rows_T[t]: row of the table, or num_ids if it has none; order_T[t] = t.
__global__ void rows_kernel(const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t first_id,
                            std::int64_t num_ids, std::uint32_t* rows, std::int32_t* order) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= num_tokens) return;
  const std::int64_t row = tokens[t] - first_id;
  rows[t] = static_cast<std::uint32_t>(0 <= row && row < num_ids ? row : num_ids);
  order[t] = static_cast<std::int32_t>(t);
}

template <typename T>
struct BackwardArgs {
  const std::uint32_t* rows;  // in sorted order; num_ids: of none
  const std::int32_t* order;  // and their tokens
  std::int64_t num_tokens, dim;
  std::uint32_t num_ids;
  const T* d_x;
  float* d_table;

  /// Whether a run of one id starts at this place.
  __device__ bool starts(std::int64_t place) const {
    return place < num_tokens && rows[place] != num_ids && (place == 0 || rows[place - 1] != rows[place]);
  }
  __device__ bool has(std::int64_t place, std::uint32_t row) const { return place < num_tokens && rows[place] == row; }
};

/// kCount neighbouring numbers of T, in one access.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Few {
  T x[kCount];
};

/// sum += column j.. of the rows whose tokens the warp's first `count` lanes have, in their order.
template <int kInFlight, int kCount, typename T>
__device__ void add_rows(const T* d_x, std::int64_t dim, std::int64_t j, std::int32_t token, int count,
                         float (&sum)[kCount]) {
  for (int i = 0; i < count; i += kInFlight) {
    Few<T, kCount> numbers[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const std::int64_t row = __shfl_sync(~0u, token, i + k);
      if (i + k < count && j < dim) numbers[k] = *reinterpret_cast<const Few<T, kCount>*>(d_x + row * dim + j);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k >= count || j >= dim) continue;
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) sum[lane] += to_float(numbers[k].x[lane]);
    }
  }
}

/// Runs of at most kShort: a warp per place, that of a run's first adds it up.
template <typename T, int kCount>
__global__ void short_runs_kernel(const BackwardArgs<T> args) {
  const std::int64_t place = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (!args.starts(place)) return;
  const std::uint32_t row = args.rows[place];
  const bool in_run = lane <= kShort && args.has(place + lane, row);
  const int count = __popc(__ballot_sync(~0u, in_run));
  if (count > kShort) return;
  const std::int32_t token = in_run ? args.order[place + lane] : 0;
  for (std::int64_t first = 0; first < args.dim; first += kWarp * kCount) {
    const std::int64_t j = first + lane * kCount;
    float* d_row = args.d_table + row * args.dim + j;
    float sum[kCount] = {};
    if (j < args.dim) load_lanes(d_row, sum);
    add_rows<4>(args.d_x, args.dim, j, token, count, sum);
    if (j < args.dim) store_lanes(sum, d_row);
  }
}

/// Longer runs: a warp per 32 places and few columns, with many rows in flight.
template <typename T, int kCount>
__global__ void long_runs_kernel(const BackwardArgs<T> args) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t first_place = std::int64_t{blockIdx.x} * kWarp, here = first_place + lane;
  const std::int64_t j = (std::int64_t{blockIdx.y} * (kThreads / kWarp) + warp) * kWarp * kCount + lane * kCount;
  unsigned starts = __ballot_sync(~0u, args.starts(here) && args.has(here + kShort, args.rows[here]));
  for (; starts != 0; starts &= starts - 1) {
    std::int64_t place = first_place + __ffs(static_cast<int>(starts)) - 1;
    const std::uint32_t row = args.rows[place];
    float* d_row = args.d_table + row * args.dim + j;
    float sum[kCount] = {};
    if (j < args.dim) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = d_row[i];
    }
    for (int count = kWarp; count == kWarp; place += kWarp) {
      const bool in_run = args.has(place + lane, row);
      const std::int32_t token = in_run ? args.order[place + lane] : 0;
      count = __popc(__ballot_sync(~0u, in_run));
      add_rows<16>(args.d_x, args.dim, j, token, count, sum);
    }
    if (j < args.dim) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) d_row[i] = sum[i];
    }
  }
}

/// More than the sort asks for, which can be asked on a machine with a GPU only: histograms, and counts per few
/// thousand tokens and digit.
std::size_t sort_bytes(std::int64_t num_tokens) {
  return (std::size_t{2} << 20) + 4 * static_cast<std::size_t>(num_tokens);
}

}  // namespace

void embedding_forward(const Context& op, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD) {
  if (op.measuring() || x_TD.num_elements() == 0) return;
  TESSERA_CHECK(x_TD.num_elements() < std::int64_t{1} << 32, "{}", x_TD.shape().to_string());
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
  const Tensor pairs = op.arena->allocate({4, num_tokens}, DType::kInt32);
  std::size_t num_bytes = sort_bytes(num_tokens);
  std::byte* scratch = op.arena->allocate_bytes(num_bytes);
  if (op.measuring() || num_tokens == 0 || dim == 0) return;
  cub::DoubleBuffer<std::uint32_t> rows(numbers<std::uint32_t>(pairs), numbers<std::uint32_t>(pairs.rows(1, 2)));
  cub::DoubleBuffer<std::int32_t> order(numbers<std::int32_t>(pairs.rows(2, 3)),
                                        numbers<std::int32_t>(pairs.rows(3, 4)));
  rows_kernel<<<static_cast<unsigned>((num_tokens + kThreads - 1) / kThreads), kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(tokens_T), num_tokens, first_id, num_ids, rows.Current(), order.Current());
  const int num_bits = std::bit_width(static_cast<std::uint64_t>(num_ids));
  std::size_t needed = 0;
  TESSERA_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, needed, rows, order, static_cast<int>(num_tokens), 0, num_bits,
                                               stream_of(op)));
  TESSERA_CHECK(needed <= num_bytes, "the sort of {} tokens needs {} bytes, has {}", num_tokens, needed, num_bytes);
  TESSERA_CUDA(cub::DeviceRadixSort::SortPairs(scratch, num_bytes, rows, order, static_cast<int>(num_tokens), 0,
                                               num_bits, stream_of(op)));
  const auto blocks = [](std::int64_t items, std::int64_t per_block) {
    return static_cast<unsigned>((items + per_block - 1) / per_block);
  };
  for_float_type(d_x_TD.dtype(), [&]<typename T>(T) {
    const BackwardArgs<T> args{.rows = rows.Current(),
                               .order = order.Current(),
                               .num_tokens = num_tokens,
                               .dim = dim,
                               .num_ids = static_cast<std::uint32_t>(num_ids),
                               .d_x = numbers<T>(d_x_TD),
                               .d_table = numbers<float>(d_table_VD)};
    for_lanes(in_lanes(d_x_TD, d_table_VD), [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value, kFew = kCount == 1 ? 1 : 2;
      short_runs_kernel<T, kCount><<<blocks(num_tokens, kThreads / kWarp), kThreads, 0, stream_of(op)>>>(args);
      const dim3 grid(blocks(num_tokens, kWarp), blocks(dim, kThreads * kFew));
      long_runs_kernel<T, kFew><<<grid, kThreads, 0, stream_of(op)>>>(args);
    });
  });
}

}  // namespace tessera::cuda
