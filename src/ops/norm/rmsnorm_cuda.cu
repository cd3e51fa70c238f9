#include <cuda_pipeline.h>

#include "ops/kit/dots.cuh"
#include "ops/kit/formulas.cuh"
#include "ops/norm/rmsnorm.h"
#include "ops/quantize/tile_quantizer.cuh"

namespace tessera::cuda {
namespace {

constexpr int kRowsPerBlock = 4;
/// The longest rows that fit into the kernels' registers.
constexpr std::int64_t kMaxLength = 32 * kWarp * kLanes;
constexpr int kFewRowsThreads = 256;  // of each of up to kFewRows rows
/// The number of blocks of the backward, two for each of Hopper's SMs. Each has a separate sum of d_w.
constexpr std::int64_t kBackwardBlocks = 2 * 132;
/// Limits for the threads of a backward block. A row gets as many threads as it needs. A block works on as many rows at
/// a time as fit into kBackwardThreads threads.
constexpr int kMaxRowThreads = 512, kBackwardThreads = 256;

template <typename T>
struct ForwardArgs {
  const T *x, *delta, *w;  // delta: null if there is no residual
  std::int64_t x_stride;
  T *sum, *y;  // y: null if only rstd is wanted
  float* rstd;
  float eps;
  std::int64_t num_rows, length;
};

/// Normalises one row per warp. The row is in registers, kParts times 8 numbers per lane.
template <typename T, int kParts>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) forward_kernel(const ForwardArgs<T> args) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= args.num_rows) return;
  const int first = threadIdx.x % kWarp * kLanes;
  Lanes<T, kLanes> x[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kWarp * kLanes;
    if (j < args.length) x[part] = get_lanes<kLanes>(args.x + row * args.x_stride + j);
  }
  if (args.delta != nullptr) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int j = first + part * kWarp * kLanes;
      if (j >= args.length) continue;
      const auto delta = get_lanes<kLanes>(args.delta + row * args.length + j);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) x[part].x[i] = from_float<T>(to_float(x[part].x[i]) + to_float(delta.x[i]));
      put_lanes(x[part], args.sum + row * args.length + j);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (first + part * kWarp * kLanes >= args.length) continue;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) squares += to_float(x[part].x[i]) * to_float(x[part].x[i]);
  }
  const float rstd = rstd_of(sum_of_warp(squares), args.length, args.eps);
  if (first == 0) args.rstd[row] = rstd;
  if (args.y == nullptr) return;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kWarp * kLanes;
    if (j >= args.length) continue;
    float w[kLanes];
    load_lanes(args.w + j, w);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) w[i] = to_float(x[part].x[i]) * rstd * w[i];
    store_lanes(w, args.y + row * args.length + j);
  }
}

/// Normalises one row per block. With few rows, as in decoding, what counts is how long one takes.
template <typename T>
__global__ void __launch_bounds__(kFewRowsThreads) few_rows_forward_kernel(const ForwardArgs<T> args) {
  constexpr int kStep = kFewRowsThreads * kLanes, kParts = (kMaxLength + kStep - 1) / kStep;
  __shared__ float sums[kFewRowsThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const int first = static_cast<int>(threadIdx.x) * kLanes;
  Lanes<T, kLanes> x[kParts], delta[kParts], w[kParts];
  let_next_kernel_begin();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kStep;
    if (j < args.length && args.y != nullptr) w[part] = get_lanes<kLanes>(args.w + j);
  }
  wait_for_kernel_before();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kStep;
    if (j >= args.length) continue;
    x[part] = get_lanes<kLanes>(args.x + row * args.x_stride + j);
    if (args.delta != nullptr) delta[part] = get_lanes<kLanes>(args.delta + row * args.length + j);
  }
  float squares = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kStep;
    if (j >= args.length) continue;
    if (args.delta != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        x[part].x[i] = from_float<T>(to_float(x[part].x[i]) + to_float(delta[part].x[i]));
      put_lanes(x[part], args.sum + row * args.length + j);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) squares += to_float(x[part].x[i]) * to_float(x[part].x[i]);
  }
  const float rstd = rstd_of(sum_of_block(squares, sums), args.length, args.eps);
  if (threadIdx.x == 0) args.rstd[row] = rstd;
  if (args.y == nullptr) return;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int j = first + part * kStep;
    if (j >= args.length) continue;
    float y[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) y[i] = to_float(x[part].x[i]) * rstd * to_float(w[part].x[i]);
    store_lanes(y, args.y + row * args.length + j);
  }
}

/// Does the same number by number, for rows of any length. It reads rows twice.
template <typename T>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) forward_scalar_kernel(const ForwardArgs<T> args) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= args.num_rows) return;
  const T* x = args.x + row * args.x_stride;
  const auto number = [&](std::int64_t j) {
    return args.delta == nullptr ? to_float(x[j])
                                 : rounded<T>(to_float(x[j]) + to_float(args.delta[row * args.length + j]));
  };
  float squares = 0.0f;
  for (std::int64_t j = threadIdx.x % kWarp; j < args.length; j += kWarp) squares += number(j) * number(j);
  const float rstd = rstd_of(sum_of_warp(squares), args.length, args.eps);
  if (threadIdx.x % kWarp == 0) args.rstd[row] = rstd;
  for (std::int64_t j = threadIdx.x % kWarp; j < args.length; j += kWarp) {
    const float value = number(j);
    if (args.delta != nullptr) args.sum[row * args.length + j] = from_float<T>(value);
    if (args.y != nullptr) args.y[row * args.length + j] = from_float<T>(value * rstd * to_float(args.w[j]));
  }
}

template <typename T>
struct BackwardArgs {
  const T *d_y, *x, *w;
  const float* rstd;
  T* d_x;
  std::int64_t x_stride, d_x_stride;
  bool accumulate;
  float* parts;  // [blocks, length]: parts of d_w
  std::int64_t num_rows, length;
  float inverse_length;
};

/// The operands are d_y, x and the old d_x.
constexpr int kOperands = 3;

/// Starts to copy a thread's numbers of a row to shared memory, where only that thread reads them.
template <typename T, int kCount>
__device__ void copy_lanes_async(const T* from, Lanes<T, kCount>& to) {
  if constexpr (kCount == 1) {
    to.x[0] = *from;
  } else {
    constexpr int kPiece = 16;
#pragma unroll
    for (std::size_t i = 0; i < sizeof to; i += kPiece) {
      __pipeline_memcpy_async(reinterpret_cast<char*>(&to) + i, reinterpret_cast<const char*>(from) + i, kPiece);
    }
  }
}

/// Returns the sum of x over a team, a row of the block's threads. `slots` is shared memory with a number per warp.
__device__ inline float team_sum(float x, float* slots) {
  x = sum_of_warp(x);
  if (blockDim.x <= kWarp) return x;
  const int num_warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) slots[(threadIdx.y * blockDim.x + threadIdx.x) / kWarp] = x;
  __syncthreads();
  x = 0.0f;
  for (int i = 0; i < num_warps; ++i) x += slots[threadIdx.y * num_warps + i];
  return x;
}

/// Writes a block's part of the weight's gradient. For each column this is the sum of the teams' d_w, in the order of
/// the teams. `sums` is shared memory. It holds one line of all threads' first numbers, one of their second numbers and
/// so on. A gap of 4 numbers between lines prevents bank conflicts.
template <int kCount, int kParts>
__device__ void write_weight_sums(const float (&d_w)[kParts][kCount], float* sums, int length, float* out) {
  const int num_threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int line = num_threads + 4;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[(part * kCount + i) * line + thread] = d_w[part][i];
  }
  __syncthreads();
  for (int j = thread; j < length; j += num_threads) {
    const int lanes = j / kCount, part = lanes / blockDim.x;
    const float* from = sums + (part * kCount + j % kCount) * line + lanes % blockDim.x;
    float sum = 0.0f;
    for (int team = 0; team < static_cast<int>(blockDim.y); ++team) sum += from[team * blockDim.x];
    out[j] = sum;
  }
}

/// A team of threads works on a row. Each thread has kParts times kCount numbers, and a block has blockDim.y teams.
/// While a team works on a row, its next row is being copied to shared memory. Let u = x · rstd. Then
/// d_x = rstd · (d_y · w - u · mean(d_y · w · u)), d_w += d_y · u.
template <typename T, int kCount, int kParts>
__global__ void __launch_bounds__(kMaxRowThreads) backward_kernel(const BackwardArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float slots[2][kMaxRowThreads / kWarp];  // rows use them by turns, so one barrier per row is enough
  const int num_threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  // Holds the threads' d_y, x and old d_x of two rows, part by part, so that the numbers of a warp are neighbours.
  auto* of_thread = reinterpret_cast<Lanes<T, kCount>*>(shared) + thread;
  const auto lanes_of = [&](int odd, int operand, int part) -> Lanes<T, kCount>& {
    return of_thread[((odd * kOperands + operand) * kParts + part) * num_threads];
  };
  const auto column = [](int part) { return static_cast<int>(part * blockDim.x + threadIdx.x) * kCount; };
  const auto load = [&](std::int64_t row, int odd) {
    if (row < args.num_rows) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int j = column(part);
        if (j >= args.length) continue;
        copy_lanes_async(args.d_y + row * args.length + j, lanes_of(odd, 0, part));
        copy_lanes_async(args.x + row * args.x_stride + j, lanes_of(odd, 1, part));
        if (args.accumulate) copy_lanes_async(args.d_x + row * args.d_x_stride + j, lanes_of(odd, 2, part));
      }
    }
    __pipeline_commit();
  };
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y, step = std::int64_t{gridDim.x} * blockDim.y;
  load(first + threadIdx.y, 0);
  load(first + threadIdx.y + step, 1);
  float next_rstd = first + threadIdx.y < args.num_rows ? args.rstd[first + threadIdx.y] : 0.0f;
  float d_w[kParts][kCount] = {};
  Lanes<T, kCount> w[kParts] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (column(part) < args.length) w[part] = get_lanes<kCount>(args.w + column(part));
  }
  int odd = 0;
  for (std::int64_t start = first; start < args.num_rows; start += step, odd ^= 1) {
    const std::int64_t row = start + threadIdx.y;
    const std::int64_t length = row < args.num_rows ? args.length : 0;
    const float rstd = next_rstd;
    if (row + step < args.num_rows) next_rstd = args.rstd[row + step];
    __pipeline_wait_prior(1);
    float dot = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (column(part) >= length) continue;
      const Lanes<T, kCount> d_y = lanes_of(odd, 0, part), x = lanes_of(odd, 1, part);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float gradient = to_float(d_y.x[i]), u = to_float(x.x[i]) * rstd;
        d_w[part][i] += gradient * u;
        dot += gradient * to_float(w[part].x[i]) * u;
      }
    }
    dot = team_sum(dot, slots[odd]);
    const float factor = dot * rstd * rstd * args.inverse_length;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int j = column(part);
      if (j >= length) continue;
      const Lanes<T, kCount> d_y = lanes_of(odd, 0, part), x = lanes_of(odd, 1, part);
      float sum[kCount] = {};
      if (args.accumulate) {
        const Lanes<T, kCount> old = lanes_of(odd, 2, part);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = to_float(old.x[i]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float d_u = to_float(d_y.x[i]) * to_float(w[part].x[i]);
        sum[i] += rstd * d_u - to_float(x.x[i]) * factor;
      }
      store_lanes(sum, args.d_x + row * args.d_x_stride + j);
    }
    load(row + 2 * step, odd);
  }
  __pipeline_wait_prior(0);
  __syncthreads();
  write_weight_sums<kCount, kParts>(d_w, reinterpret_cast<float*>(shared), args.length,
                                    args.parts + blockIdx.x * args.length);
}

/// Each block sums 32 columns. Each warp sums some of the parts, and then the warps' sums are added in order.
__global__ void add_parts_kernel(const float* parts, std::int64_t num_parts, std::int64_t length, float* d_w) {
  __shared__ float of_warp[kMaxThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0f;
  if (j < length) {
#pragma unroll 8
    for (std::int64_t part = warp; part < num_parts; part += kMaxThreads / kWarp) sum += parts[part * length + j];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || j >= length) return;
  for (int i = 1; i < kMaxThreads / kWarp; ++i) sum += of_warp[i][lane];
  d_w[j] += sum;
}

/// Produces x · rstd · w of rows whose rstd is known.
template <typename T>
struct Normalised {
  using Number = T;
  static constexpr int kInFlight = 8, kBlocksPerSm = sizeof(T) == 2 ? 3 : 2;
  template <int kCount>
  struct Input {
    Lanes<T, kCount> x;
    float rstd;
  };
  template <int kCount>
  using Columns = Lanes<T, kCount>;

  const T* x;
  std::int64_t stride;
  const float* rstd;
  const T* w;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t, std::int64_t row, std::int64_t column) const {
    return {get_lanes<kCount>(x + row * stride + column), rstd[row]};
  }
  template <int kCount>
  __device__ Columns<kCount> columns(std::int64_t column) const {
    return get_lanes<kCount>(w + column);
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const Columns<kCount>& of_columns, Lanes<T, kCount> (&out)[1],
                          float&) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[0].x[i] = from_float<T>(to_float(input.x.x[i]) * input.rstd * to_float(of_columns.x[i]));
    }
  }
};

/// Calls body(kParts) with the kParts of the forward_kernel for rows of `length`.
template <typename Body>
void for_parts(std::int64_t length, Body&& body) {
  const std::int64_t parts = (length + kWarp * kLanes - 1) / (kWarp * kLanes);
  if (parts <= 2) return body(std::integral_constant<int, 2>{});
  if (parts <= 8) return body(std::integral_constant<int, 8>{});
  if (parts <= 16) return body(std::integral_constant<int, 16>{});
  body(std::integral_constant<int, 32>{});
}

void forward(const Context& op, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N, float eps,
             const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  if (op.measuring() || num_rows == 0 || length == 0) return;
  const bool lanes = length <= kMaxLength && in_lanes(x_TN, delta_TN, w_N.reshape({1, length}), sum_TN, y_TN.plain);
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    const ForwardArgs<T> args{.x = numbers<T>(x_TN),
                              .delta = delta_TN.defined() ? numbers<T>(delta_TN) : nullptr,
                              .w = numbers<T>(w_N),
                              .x_stride = x_TN.stride(),
                              .sum = sum_TN.defined() ? numbers<T>(sum_TN) : nullptr,
                              .y = y_TN.quantized() ? nullptr : numbers<T>(y_TN.plain),
                              .rstd = numbers<float>(rstd_T),
                              .eps = eps,
                              .num_rows = num_rows,
                              .length = length};
    const auto blocks = static_cast<unsigned>((num_rows + kRowsPerBlock - 1) / kRowsPerBlock);
    if (lanes && num_rows <= kFewRows) {
      launch_early(op, few_rows_forward_kernel<T>, static_cast<unsigned>(num_rows), kFewRowsThreads, 0, args);
    } else if (lanes) {
      for_parts(length, [&](auto parts) {
        launch_early(op, forward_kernel<T, decltype(parts)::value>, blocks, kRowsPerBlock * kWarp, 0, args);
      });
    } else {
      launch_early(op, forward_scalar_kernel<T>, blocks, kRowsPerBlock * kWarp, 0, args);
    }
    if (!y_TN.quantized()) return;
    const Tensor& x = sum_TN.defined() ? sum_TN : x_TN;
    run_tiles(op,
              TileArgs<Normalised<T>>{.producer = {.x = numbers<T>(x),
                                                   .stride = x.stride(),
                                                   .rstd = numbers<const float>(rstd_T),
                                                   .w = numbers<T>(w_N)},
                                      .outputs = {tile_outputs<T>(y_TN)},
                                      .num_rows = num_rows,
                                      .length = length},
              lanes);
  });
}

}  // namespace

void rmsnorm_forward(const Context& op, const Tensor& x_TN, const Tensor& w_N, float eps, const GemmOperand& y_TN,
                     const Tensor& rstd_T) {
  forward(op, x_TN, {}, w_N, eps, {}, y_TN, rstd_T);
}

void residual_rmsnorm_forward(const Context& op, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N,
                              float eps, const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T) {
  forward(op, x_TN, delta_TN, w_N, eps, sum_TN, y_TN, rstd_T);
}

void rmsnorm_backward(const Context& op, const Tensor& d_y_TN, const Tensor& x_TN, const Tensor& w_N,
                      const Tensor& rstd_T, const Tensor& d_x_TN, Write write_d_x, const Tensor& d_w_N) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const std::int64_t num_blocks = std::min(kBackwardBlocks, num_rows);
  const ArenaScope scope(*op.arena);
  const Tensor parts = op.arena->allocate({num_blocks, length}, DType::kFloat32);
  if (op.measuring() || num_rows == 0 || length == 0) return;
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    const BackwardArgs<T> args{.d_y = numbers<T>(d_y_TN),
                               .x = numbers<T>(x_TN),
                               .w = numbers<T>(w_N),
                               .rstd = numbers<const float>(rstd_T),
                               .d_x = numbers<T>(d_x_TN),
                               .x_stride = x_TN.stride(),
                               .d_x_stride = d_x_TN.stride(),
                               .accumulate = write_d_x == Write::kAccumulate,
                               .parts = numbers<float>(parts),
                               .num_rows = num_rows,
                               .length = length,
                               .inverse_length = 1.0f / static_cast<float>(length)};
    const auto launch = [&](auto count, auto num_parts) {
      constexpr int kCount = decltype(count)::value, kParts = decltype(num_parts)::value;
      constexpr std::int64_t kPerWarp = kWarp * kCount * kParts;
      const std::int64_t threads = (length + kPerWarp - 1) / kPerWarp * kWarp;
      const std::int64_t teams =
          std::clamp<std::int64_t>(kBackwardThreads / threads, 1, (num_rows + num_blocks - 1) / num_blocks);
      const std::size_t num_bytes =
          static_cast<std::size_t>(threads * teams * 2 * kOperands * kParts) * sizeof(Lanes<T, kCount>);
      TESSERA_CHECK(threads <= kMaxRowThreads && num_bytes <= kMostDynamicShared, "rows of {}", length);
      const auto kernel = backward_kernel<T, kCount, kParts>;
      TESSERA_CUDA(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(num_bytes)));
      kernel<<<static_cast<unsigned>(num_blocks), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(teams)),
               num_bytes, stream_of(op)>>>(args);
    };
    if (length <= kMaxLength && in_lanes(d_y_TN, x_TN, w_N.reshape({1, length}), d_x_TN)) {
      launch(std::integral_constant<int, kLanes>{}, std::integral_constant<int, 2>{});
    } else {
      launch(std::integral_constant<int, 1>{}, std::integral_constant<int, 32>{});
    }
  });
  add_parts_kernel<<<static_cast<unsigned>((length + kWarp - 1) / kWarp), kMaxThreads, 0, stream_of(op)>>>(
      numbers<const float>(parts), num_blocks, length, numbers<float>(d_w_N));
}

}  // namespace tessera::cuda
