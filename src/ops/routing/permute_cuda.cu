#include <cub/block/block_scan.cuh>

#include "ops/kit/launch.cuh"
#include "ops/quantize/tile_quantizer.cuh"
#include "ops/routing/permute.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// Sorting is a stable counting sort. A block of threads has kSlotsPerBlock slots, and each warp has a run of them.
// First the slots are counted per expert and block. Then the counts are summed up over blocks. Then every slot takes
// its row.
constexpr int kSlotsPerWarp = 256, kSlotsPerBlock = kWarps * kSlotsPerWarp;
constexpr int kMaxExperts = 1024, kExpertsPerThread = kMaxExperts / kThreads;

/// Counts this block's slots into counts[warp][expert].
__device__ void count_slots(const std::int32_t* ids, std::int64_t num_slots, int num_experts, int* counts) {
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t first = std::int64_t{blockIdx.x} * kSlotsPerBlock + warp * kSlotsPerWarp;
  for (int i = lane; i < kSlotsPerWarp && first + i < num_slots; i += kWarp) {
    const int expert = ids[first + i];
    if (expert != kNoExpert) atomicAdd(&counts[warp * num_experts + expert], 1);
  }
  __syncthreads();
}

/// Writes counts_EN[e][block] for N blocks.
__global__ void __launch_bounds__(kThreads) count_kernel(const std::int32_t* ids, std::int64_t num_slots,
                                                         int num_experts, int num_blocks, std::int32_t* counts_EN) {
  extern __shared__ int counts[];
  count_slots(ids, num_slots, num_experts, counts);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp * num_experts + e];
    counts_EN[std::int64_t{e} * num_blocks + blockIdx.x] = sum;
  }
}

/// Writes offsets_E1. It replaces each count by the first row of that block's slots of the expert. Each warp has one
/// expert, and all blocks compute the offsets.
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(const std::int32_t* counts_E, int num_experts, int alignment, int num_blocks,
                   std::int32_t* offsets_E1, std::int32_t* rows_EN) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage memory;
  __shared__ int offsets[kMaxExperts];
  int sizes[kExpertsPerThread], all = 0;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = static_cast<int>(threadIdx.x) * kExpertsPerThread + i;
    sizes[i] = e < num_experts ? (counts_E[e] + alignment - 1) / alignment * alignment : 0;
  }
  Scan(memory).ExclusiveSum(sizes, sizes, all);
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) offsets[threadIdx.x * kExpertsPerThread + i] = sizes[i];
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < num_experts; e += kThreads) offsets_E1[e] = offsets[e];
    if (threadIdx.x == 0) offsets_E1[num_experts] = all;
  }
  const int e = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (e >= num_experts) return;
  int before = offsets[e];
  std::int32_t* rows = rows_EN + std::int64_t{e} * num_blocks;
  for (int begin = 0; begin < num_blocks; begin += kWarp) {
    const int count = begin + lane < num_blocks ? rows[begin + lane] : 0;
    int sum = count;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (begin + lane < num_blocks) rows[begin + lane] = before + sum - count;
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(const std::int32_t* ids, std::int64_t num_slots, int num_experts, int num_blocks,
                 const std::int32_t* rows_EN, std::int32_t* slot_of_row, std::int32_t* row_of_slot) {
  extern __shared__ int next_row[];  // [warp][expert]
  count_slots(ids, num_slots, num_experts, next_row);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int row = rows_EN[std::int64_t{e} * num_blocks + blockIdx.x];
    for (int warp = 0; warp < kWarps; ++warp) {
      const int count = next_row[warp * num_experts + e];
      next_row[warp * num_experts + e] = row;
      row += count;
    }
  }
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int* next = next_row + warp * num_experts;
  const std::int64_t first = std::int64_t{blockIdx.x} * kSlotsPerBlock + warp * kSlotsPerWarp;
  for (int i = lane; i < kSlotsPerWarp; i += kWarp) {
    const std::int64_t slot = first + i;
    const int expert = slot < num_slots ? ids[slot] : kNoExpert;
    // Lanes with the same expert take its rows in the order of the lanes.
    const unsigned same = __match_any_sync(kAllLanes, expert);
    if (expert >= 0) {
      const int row = next[expert] + __popc(same & ((1u << lane) - 1));
      row_of_slot[slot] = row;
      slot_of_row[row] = static_cast<std::int32_t>(slot);
    } else if (slot < num_slots) {
      row_of_slot[slot] = -1;
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) next[expert] += __popc(same);
    __syncwarp();
  }
}

/// Gathers rows of `length` units. A warp has one row, and several of its units in flight.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const Unit* x, const std::int32_t* slot_of_row,
                                                               int top_k, std::int64_t num_rows, int length, Unit* y) {
  constexpr int kInFlight = 8;
  const int lane = threadIdx.x % kWarp;
  const std::int64_t row = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (row >= num_rows) return;
  const std::int32_t slot = slot_of_row[row];
  const Unit* from = x + std::int64_t{slot < 0 ? 0 : slot / top_k} * length;
  Unit* to = y + row * length;
  for (int begin = 0; begin < length; begin += kWarp * kInFlight) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = begin + i * kWarp + lane;
      units[i] = Unit{};
      if (slot >= 0 && at < length) units[i] = from[at];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = begin + i * kWarp + lane;
      if (at < length) to[at] = units[i];
    }
  }
}

/// Produces gathered rows for the quantizer (ops/quantize/tile_quantizer.cuh).
template <typename T>
struct Gather {
  using Number = T;
  static constexpr int kInFlight = 8, kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
  // It consists of whole words. From single numbers, the compiler would make an instruction for each, because a row
  // without a token is 0.
  template <int kCount>
  struct Input {
    using Word = std::conditional_t<kCount == 1, T, uint4>;
    static constexpr int kWords = kCount * sizeof(T) / sizeof(Word);
    Word words[kWords];
  };

  const T* x;
  const std::int32_t* slot_of_row;
  std::uint32_t inverse;  // 2^32 / top_k, rounded up; 0 if top_k is 1
  std::uint32_t length;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t, std::int64_t row, std::int64_t column) const {
    const std::int32_t slot = slot_of_row[row];
    const std::uint32_t token = inverse == 0 ? slot : __umulhi(slot, inverse);
    const auto* from = reinterpret_cast<const Input<kCount>::Word*>(x + column + std::uint64_t{token} * length);
    Input<kCount> input = {};
#pragma unroll
    for (int i = 0; i < Input<kCount>::kWords; ++i) {
      if (slot >= 0) input.words[i] = from[i];
    }
    return input;
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const auto&, Lanes<T, kCount> (&out)[1], float&) const {
    memcpy(&out[0], &input, sizeof input);
  }
};

__global__ void gather_numbers_kernel(const float* x, const std::int32_t* index, float* y, std::int64_t size) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    y[i] = index[i] < 0 ? 0.0f : x[index[i]];
  }
}

/// Adds up the rows of tokens. A thread has kCount neighbouring numbers of a token. It has the numbers of kRows of the
/// token's rows in flight.
template <typename T, int kCount, int kRows>
__global__ void __launch_bounds__(kThreads)
    combine_rows_kernel(const T* __restrict__ x, const std::int32_t* __restrict__ row_of_slot,
                        const float* __restrict__ weights, int top_k, std::int64_t num_tokens, int length,
                        bool accumulate, T* __restrict__ y) {
  const int column = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kCount;
  if (column >= length) return;
  // Indices of rows are loaded before they are needed. Beyond the last row, the last one is loaded again. Without a
  // branch, all loads are issued first.
  int indices[kRows];
  const auto find = [&](std::int64_t t, int begin) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) indices[i] = row_of_slot[t * top_k + min(begin + i, top_k - 1)];
  };
  find(blockIdx.y, 0);
  for (std::int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    float sums[kCount] = {};
    if (accumulate) load_lanes(y + t * length + column, sums);
    for (int begin = 0; begin < top_k; begin += kRows) {
      Lanes<T, kCount> rows[kRows];
      float factors[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        rows[i] = get_lanes<kCount>(x + std::int64_t{indices[i]} * length + column);
        factors[i] = weights != nullptr ? weights[t * top_k + min(begin + i, top_k - 1)] : 1.0f;
      }
      const bool is_last = begin + kRows >= top_k;
      find(is_last ? min(t + gridDim.y, num_tokens - 1) : t, is_last ? 0 : begin + kRows);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (begin + i >= top_k) break;
#pragma unroll
        for (int lane = 0; lane < kCount; ++lane) sums[lane] = fmaf(factors[i], to_float(rows[i].x[lane]), sums[lane]);
      }
    }
    store_lanes(sums, y + t * length + column);
  }
}

/// Adds up the rows of tokens rank by rank. A thread has kCount neighbouring numbers of a token.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    combine_rows_by_rank_kernel(const T* __restrict__ x, const std::int32_t* __restrict__ row_of_slot,
                                const float* __restrict__ weights, const std::int32_t* __restrict__ expert_ids,
                                int experts_per_rank, int top_k, std::int64_t num_tokens, int length, bool accumulate,
                                T* __restrict__ y) {
  const int column = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kCount;
  if (column >= length) return;
  for (std::int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    const auto rank_of = [&](int k) { return expert_ids[t * top_k + k] / experts_per_rank; };
    float sums[kCount] = {};
    if (accumulate) load_lanes(y + t * length + column, sums);
    for (int before = -1;;) {
      constexpr int kNone = 0x7fffffff;
      int rank = kNone;
      for (int k = 0; k < top_k; ++k) {
        if (rank_of(k) > before) rank = min(rank, rank_of(k));
      }
      if (rank == kNone) break;
      float part[kCount] = {};
      for (int k = 0; k < top_k; ++k) {
        const int idx = row_of_slot[t * top_k + k];
        if (rank_of(k) != rank || idx < 0) continue;
        const Lanes<T, kCount> row = get_lanes<kCount>(x + std::int64_t{idx} * length + column);
        const float factor = weights != nullptr ? weights[t * top_k + k] : 1.0f;
#pragma unroll
        for (int lane = 0; lane < kCount; ++lane) part[lane] = fmaf(factor, to_float(row.x[lane]), part[lane]);
      }
#pragma unroll
      for (int lane = 0; lane < kCount; ++lane) sums[lane] += rounded<T>(part[lane]);
      before = rank;
    }
    store_lanes(sums, y + t * length + column);
  }
}

/// The number of these blocks that run on an SM at the same time.
constexpr int kCombineBlocksPerSm = 4;

/// Calls body(T{}, std::integral_constant<int, kCount>, grid) for sums of rows of x. A block computes kThreads * kCount
/// columns of a token of y at a time.
template <typename Body>
void for_combine(const Context& op, const Tensor& x_RD, const Tensor& y_TD, Body&& body) {
  for_float_type(x_RD.dtype(), [&](auto zero) {
    for_lanes(in_lanes(x_RD, y_TD), [&](auto lanes) {
      constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * decltype(lanes)::value;
      const std::int64_t across = (y_TD.dim(1) + kPerBlock - 1) / kPerBlock;
      const std::int64_t down = std::max<std::int64_t>(1, op.cuda->num_sms() * kCombineBlocksPerSm / across);
      body(zero, lanes, dim3(static_cast<unsigned>(across), static_cast<unsigned>(std::min(y_TD.dim(0), down))));
    });
  });
}

/// Calls body(std::integral_constant<int, N>), where N is the number of rows in flight for the sum of top_k.
template <typename Body>
void for_rows(std::int64_t top_k, Body&& body) {
  if (top_k <= 2) {
    body(std::integral_constant<int, 2>{});
  } else if (top_k <= 6) {
    body(std::integral_constant<int, 6>{});
  } else {
    body(std::integral_constant<int, 8>{});
  }
}

}  // namespace

void sort_by_expert(const Context& op, const Tensor& expert_ids_TK, const Tensor& counts_E, std::int64_t alignment,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK) {
  const std::int64_t num_slots = expert_ids_TK.num_elements();
  const auto num_experts = static_cast<int>(counts_E.dim(0));
  TESSERA_CHECK(num_experts <= kMaxExperts, "{} experts", num_experts);
  const auto num_blocks =
      static_cast<int>(std::max<std::int64_t>(1, (num_slots + kSlotsPerBlock - 1) / kSlotsPerBlock));
  const ArenaScope scope(*op.arena);
  const Tensor rows_EN = op.arena->allocate({num_experts, num_blocks}, DType::kInt32);
  if (op.measuring()) return;
  const auto shared_bytes = static_cast<std::size_t>(kWarps * num_experts) * sizeof(int);
  const auto* ids = numbers<const std::int32_t>(expert_ids_TK);
  constexpr int kNoSlot = 0xff;  // every byte of -1
  TESSERA_CUDA(cudaMemsetAsync(slot_of_row_R.raw(), kNoSlot, slot_of_row_R.num_bytes(), stream_of(op)));
  count_kernel<<<num_blocks, kThreads, shared_bytes, stream_of(op)>>>(ids, num_slots, num_experts, num_blocks,
                                                                      numbers<std::int32_t>(rows_EN));
  offsets_kernel<<<(num_experts + kWarps - 1) / kWarps, kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(counts_E), num_experts, static_cast<int>(alignment), num_blocks,
      numbers<std::int32_t>(offsets_E1), numbers<std::int32_t>(rows_EN));
  place_kernel<<<num_blocks, kThreads, shared_bytes, stream_of(op)>>>(
      ids, num_slots, num_experts, num_blocks, numbers<const std::int32_t>(rows_EN),
      numbers<std::int32_t>(slot_of_row_R), numbers<std::int32_t>(row_of_slot_TK));
}

void gather_row_bytes(const Context& op, const Tensor& x, const Tensor& source, std::int64_t divisor, const Tensor& y) {
  if (op.measuring() || y.num_bytes() == 0) return;
  const std::int64_t num_rows = y.dim(0);
  const std::size_t row_bytes = y.num_bytes() / static_cast<std::size_t>(num_rows);
  const auto launch = [&]<typename Unit>(Unit) {
    gather_rows_kernel<<<static_cast<unsigned>((num_rows + kWarps - 1) / kWarps), kThreads, 0, stream_of(op)>>>(
        static_cast<const Unit*>(x.raw()), numbers<const std::int32_t>(source), static_cast<int>(divisor), num_rows,
        static_cast<int>(row_bytes / sizeof(Unit)), static_cast<Unit*>(y.raw()));
  };
  const auto all = reinterpret_cast<std::uintptr_t>(x.raw()) | reinterpret_cast<std::uintptr_t>(y.raw()) | row_bytes;
  if (all % sizeof(uint4) == 0) {
    launch(uint4{});
  } else if (all % sizeof(std::uint16_t) == 0) {
    launch(std::uint16_t{});
  } else {
    launch(std::uint8_t{});
  }
}

void gather_rows(const Context& op, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& num_rows_1, const GemmOperand& y_RD) {
  const Tensor& y = y_RD.plain;
  const std::int64_t num_rows = slot_of_row_R.dim(0), length = x_TD.dim(1);
  if (op.measuring() || num_rows * length == 0) return;
  const auto* slots = numbers<const std::int32_t>(slot_of_row_R);
  if (y_RD.quantized()) {
    constexpr std::int64_t kOne = std::int64_t{1} << 32;
    // Below this bound, the product with `inverse` gives the exact quotient of every slot.
    TESSERA_CHECK(x_TD.dim(0) * top_k * top_k < kOne, "{} tokens, {} each", x_TD.dim(0), top_k);
    for_float_type(x_TD.dtype(), [&]<typename T>(T) {
      run_tiles<Gather<T>>(op,
                           {.producer = {.x = numbers<const T>(x_TD),
                                         .slot_of_row = slots,
                                         .inverse = static_cast<std::uint32_t>((kOne + top_k - 1) / top_k),
                                         .length = static_cast<std::uint32_t>(length)},
                            .outputs = {tile_outputs<T>(y_RD)},
                            .num_rows = num_rows,
                            .length = length,
                            .num_rows_1 = y.defined() ? nullptr : numbers<const std::int32_t>(num_rows_1)},
                           in_lanes(x_TD, y));
    });
    return;
  }
  cuda::gather_row_bytes(op, x_TD, slot_of_row_R, top_k, y);
}

void gather_numbers(const Context& op, const Tensor& x, const Tensor& index, const Tensor& y) {
  if (op.measuring() || y.num_elements() == 0) return;
  gather_numbers_kernel<<<grid_for(op, y.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
      numbers<const float>(x), numbers<const std::int32_t>(index), numbers<float>(y), y.num_elements());
}

void combine_rows(const Context& op, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write) {
  if (op.measuring() || y_TD.num_elements() == 0) return;
  const std::int64_t top_k = row_of_slot_TK.dim(1);
  for_combine(op, x_RD, y_TD, [&]<typename T>(T, auto lanes, dim3 grid) {
    for_rows(top_k, [&](auto rows) {
      combine_rows_kernel<T, decltype(lanes)::value, decltype(rows)::value><<<grid, kThreads, 0, stream_of(op)>>>(
          numbers<const T>(x_RD), numbers<const std::int32_t>(row_of_slot_TK), numbers<const float>(weights_TK),
          static_cast<int>(top_k), y_TD.dim(0), static_cast<int>(y_TD.dim(1)), write == Write::kAccumulate,
          numbers<T>(y_TD));
    });
  });
}

void combine_rows_by_rank(const Context& op, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                          const Tensor& expert_ids_TK, std::int64_t experts_per_rank, const Tensor& y_TD, Write write) {
  if (op.measuring() || y_TD.num_elements() == 0) return;
  for_combine(op, x_RD, y_TD, [&]<typename T>(T, auto lanes, dim3 grid) {
    combine_rows_by_rank_kernel<T, decltype(lanes)::value><<<grid, kThreads, 0, stream_of(op)>>>(
        numbers<const T>(x_RD), numbers<const std::int32_t>(row_of_slot_TK), numbers<const float>(weights_TK),
        numbers<const std::int32_t>(expert_ids_TK), static_cast<int>(experts_per_rank),
        static_cast<int>(row_of_slot_TK.dim(1)), y_TD.dim(0), static_cast<int>(y_TD.dim(1)),
        write == Write::kAccumulate, numbers<T>(y_TD));
  });
}

}  // namespace tessera::cuda
