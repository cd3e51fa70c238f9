// The backward sorts the tokens by id, stably, and adds up each id's run of rows in its order.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/cuda/launch.cuh"
#include "ops/embedding.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

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

/// A block per place in sorted order; that of a run's first adds up the run.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 4)
    backward_kernel(const std::uint32_t* rows, const std::int32_t* order, std::int64_t num_tokens,
                    std::uint32_t num_ids, const T* d_x, std::int64_t dim, float* d_table) {
  const std::uint32_t row = rows[blockIdx.x];
  if (row == num_ids || (blockIdx.x > 0 && rows[blockIdx.x - 1] == row)) return;
  __shared__ std::int32_t tokens[kThreads];
  for (std::int64_t first = blockIdx.x;; first += kThreads) {
    const std::int64_t place = first + threadIdx.x;
    const bool in_run = place < num_tokens && rows[place] == row;
    if (in_run) tokens[threadIdx.x] = order[place];
    const int count = __syncthreads_count(in_run);
    for (std::int64_t j = threadIdx.x * kCount; j < dim; j += kThreads * kCount) {
      float* d_row = d_table + row * dim + j;
      float sum[kCount];
      load_lanes(d_row, sum);
      constexpr int kInFlight = 4;
      for (int i = 0; i < count; i += kInFlight) {
        Lanes<T, kCount> numbers[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (i + k < count) numbers[k] = *reinterpret_cast<const Lanes<T, kCount>*>(d_x + tokens[i + k] * dim + j);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (i + k >= count) continue;
#pragma unroll
          for (int lane = 0; lane < kCount; ++lane) sum[lane] += to_float(numbers[k].x[lane]);
        }
      }
      store_lanes(sum, d_row);
    }
    if (count < kThreads) return;
    __syncthreads();
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
  for_float_type(d_x_TD.dtype(), [&]<typename T>(T) {
    for_lanes(in_lanes(d_x_TD, d_table_VD), [&](auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      backward_kernel<T, kCount><<<static_cast<unsigned>(num_tokens), kThreads, 0, stream_of(op)>>>(
          rows.Current(), order.Current(), num_tokens, static_cast<std::uint32_t>(num_ids), numbers<T>(d_x_TD), dim,
          numbers<float>(d_table_VD));
    });
  });
}

}  // namespace tessera::cuda
