#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tile_quantizer.cuh"
#include "ops/rmsnorm.h"

namespace tessera::cuda {
namespace {

/// Rows are cut into this many ranges at most, each with its own sum of d_w.
constexpr std::int64_t kMaxRanges = 512;

template <typename T>
struct RowArgs {
  const T *x, *delta, *w;  // delta: null without a residual
  std::int64_t x_stride;
  T *sum, *y;  // y: null if only rstd is wanted
  float* rstd;
  float eps;
  std::int64_t num_rows, length;
};

/// A row a block at a time; a thread has kCount · kParts numbers of it.
template <typename T, int kCount, int kParts>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const RowArgs<T> args) {
  __shared__ float slots[2][kMaxThreads / kWarp];
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x, turn ^= 1) {
    float x[kParts][kCount], squares = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
      if (j >= args.length) continue;
      load_lanes(args.x + row * args.x_stride + j, x[part]);
      if (args.delta != nullptr) {
        float delta[kCount];
        load_lanes(args.delta + row * args.length + j, delta);
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[part][i] = rounded<T>(x[part][i] + delta[i]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares += x[part][i] * x[part][i];
    }
    squares = sum_of_block(squares, slots[turn]);
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(args.length) + args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
      if (j >= args.length) continue;
      if (args.delta != nullptr) store_lanes(x[part], args.sum + row * args.length + j);
      if (args.y == nullptr) continue;
      float w[kCount];
      load_lanes(args.w + j, w);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[part][i] = x[part][i] * rstd * w[i];
      store_lanes(x[part], args.y + row * args.length + j);
    }
  }
}

template <typename T>
struct BackwardArgs {
  const T *d_y, *x, *w;
  const float* rstd;
  T* d_x;
  std::int64_t x_stride, d_x_stride;
  bool accumulate;
  float* parts;  // [ranges, length] of d_w
  std::int64_t num_rows, rows_per_range, length;
};

/// A range of rows a block, as above. With u = x · rstd: d_x = rstd · (d_y · w - u · mean(d_y · w · u)), d_w += d_y ·
/// u.
template <typename T, int kCount, int kParts>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const BackwardArgs<T> args) {
  __shared__ float slots[2][kMaxThreads / kWarp];
  const std::int64_t first = blockIdx.x * args.rows_per_range;
  const std::int64_t end = min(args.num_rows, first + args.rows_per_range);
  float d_w[kParts][kCount] = {};
  Lanes<T, kCount> d_y[kParts] = {}, x[kParts] = {};
  const auto load = [&](std::int64_t row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
      if (j >= args.length) continue;
      d_y[part] = *reinterpret_cast<const Lanes<T, kCount>*>(args.d_y + row * args.length + j);
      x[part] = *reinterpret_cast<const Lanes<T, kCount>*>(args.x + row * args.x_stride + j);
    }
  };
  if (first < end) load(first);
  for (std::int64_t row = first; row < end; ++row) {
    const float rstd = args.rstd[row];
    float dot = 0.0f, d_u[kParts][kCount], u[kParts][kCount];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
      float w[kCount] = {};
      if (j < args.length) load_lanes(args.w + j, w);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float gradient = to_float(d_y[part].x[i]);
        u[part][i] = to_float(x[part].x[i]) * rstd;
        d_u[part][i] = gradient * w[i];
        d_w[part][i] += gradient * u[part][i];
        dot += d_u[part][i] * u[part][i];
      }
    }
    // The next row's numbers come while this one's are summed.
    if (row + 1 < end) load(row + 1);
    const float mean = sum_of_block(dot, slots[(row - first) % 2]) / static_cast<float>(args.length);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
      if (j >= args.length) continue;
      T* d_x = args.d_x + row * args.d_x_stride + j;
      float before[kCount] = {};
      if (args.accumulate) load_lanes(d_x, before);
#pragma unroll
      for (int i = 0; i < kCount; ++i) before[i] += rstd * (d_u[part][i] - u[part][i] * mean);
      store_lanes(before, d_x);
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const std::int64_t j = (part * blockDim.x + threadIdx.x) * kCount;
    if (j < args.length) store_lanes(d_w[part], args.parts + blockIdx.x * args.length + j);
  }
}

/// 32 columns a block: each warp sums some of the ranges, then their sums are added in order.
__global__ void add_parts_kernel(const float* parts, std::int64_t num_ranges, std::int64_t length, float* d_w) {
  __shared__ float of_warp[kMaxThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0f;
  if (j < length) {
#pragma unroll 4
    for (std::int64_t range = warp; range < num_ranges; range += kMaxThreads / kWarp) sum += parts[range * length + j];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || j >= length) return;
  for (int i = 1; i < kMaxThreads / kWarp; ++i) sum += of_warp[i][lane];
  d_w[j] += sum;
}

/// x · rstd · w of rows whose rstd is known.
template <typename T>
struct Normalised {
  using Number = T;
  static constexpr int kOutputs = 1, kInFlight = 8;
  static constexpr int kBlocksPerSm = sizeof(T) == 2 ? 3 : 2;
  static constexpr bool kSums = false;
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
    return {*reinterpret_cast<const Lanes<T, kCount>*>(x + row * stride + column), rstd[row]};
  }
  template <int kCount>
  __device__ Columns<kCount> columns(std::int64_t column) const {
    return *reinterpret_cast<const Lanes<T, kCount>*>(w + column);
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const Columns<kCount>& of_columns, std::int64_t,
                          float (&out)[1][kCount], float&) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[0][i] = to_float(input.x.x[i]) * input.rstd * to_float(of_columns.x[i]);
    }
  }
};

/// Calls body(kCount, kParts, threads of a block), so that a block's threads have a row of `length` in registers.
template <typename Body>
void for_row_shape(bool in_lanes, std::int64_t length, Body&& body) {
  constexpr int kScalarParts = 16;
  const std::int64_t threads = std::min<std::int64_t>(in_lanes ? length / kLanes : length, kMaxThreads);
  const auto rounded_up = static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
  const std::int64_t longest = kMaxThreads * (in_lanes ? kLanes : kScalarParts);
  TESSERA_CHECK(length <= longest, "rows of {}, at most {} are supported", length, longest);
  in_lanes ? body(std::integral_constant<int, kLanes>{}, std::integral_constant<int, 1>{}, rounded_up)
           : body(std::integral_constant<int, 1>{}, std::integral_constant<int, kScalarParts>{}, rounded_up);
}

void forward(const Context& op, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N, float eps,
             const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  if (op.measuring() || num_rows == 0 || length == 0) return;
  const bool lanes = in_lanes(x_TN, delta_TN, w_N.reshape({1, length}), sum_TN, y_TN.plain);
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    const RowArgs<T> args{.x = numbers<T>(x_TN),
                          .delta = delta_TN.defined() ? numbers<T>(delta_TN) : nullptr,
                          .w = numbers<T>(w_N),
                          .x_stride = x_TN.stride(),
                          .sum = sum_TN.defined() ? numbers<T>(sum_TN) : nullptr,
                          .y = y_TN.quantized() ? nullptr : numbers<T>(y_TN.plain),
                          .rstd = numbers<float>(rstd_T),
                          .eps = eps,
                          .num_rows = num_rows,
                          .length = length};
    for_row_shape(lanes, length, [&](auto count, auto parts, int threads) {
      forward_kernel<T, decltype(count)::value, decltype(parts)::value>
          <<<grid_for(op, num_rows * threads, threads), threads, 0, stream_of(op)>>>(args);
    });
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
  const std::int64_t rows_per_range = (num_rows + kMaxRanges - 1) / kMaxRanges;
  const std::int64_t num_ranges = num_rows == 0 ? 0 : (num_rows + rows_per_range - 1) / rows_per_range;
  const ArenaScope scope(*op.arena);
  const Tensor parts = op.arena->allocate({num_ranges, length}, DType::kFloat32);
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
                               .rows_per_range = rows_per_range,
                               .length = length};
    for_row_shape(in_lanes(d_y_TN, x_TN, w_N.reshape({1, length}), d_x_TN), length,
                  [&](auto count, auto num_parts, int threads) {
                    backward_kernel<T, decltype(count)::value, decltype(num_parts)::value>
                        <<<static_cast<unsigned>(num_ranges), threads, 0, stream_of(op)>>>(args);
                  });
  });
  add_parts_kernel<<<static_cast<unsigned>((length + kWarp - 1) / kWarp), kMaxThreads, 0, stream_of(op)>>>(
      numbers<const float>(parts), num_ranges, length, numbers<float>(d_w_N));
}

}  // namespace tessera::cuda
