#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tile_quantizer.cuh"
#include "ops/rmsnorm.h"

namespace tessera::cuda {
namespace {

/// Rows are cut into as many ranges, each with its own sum of d_w, as this many SMs work on at once.
constexpr std::int64_t kSms = 128;
constexpr int kRowsPerBlock = 4;

template <typename T>
struct ForwardArgs {
  const T *x, *delta, *w;  // delta: null without a residual
  std::int64_t x_stride;
  T *sum, *y;  // y: null if only rstd is wanted
  float* rstd;
  float eps;
  std::int64_t num_rows, length;
};

__device__ inline float rstd_of(float squares, std::int64_t length, float eps) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
  return 1.0f / sqrtf(squares / static_cast<float>(length) + eps);
}

/// A row a warp, held in registers: kParts times 8 numbers a lane.
template <typename T, int kParts>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) forward_kernel(const ForwardArgs<T> args) {
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
  const float rstd = rstd_of(squares, args.length, args.eps);
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

/// The same number by number, of any length: reads rows twice.
template <typename T>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) forward_scalar_kernel(const ForwardArgs<T> args) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= args.num_rows) return;
  const T* x = args.x + row * args.x_stride;
  const auto number = [&](std::int64_t j) {
    return args.delta == nullptr ? to_float(x[j])
                                 : rounded<T>(to_float(x[j]) + to_float(args.delta[row * args.length + j]));
  };
  float squares = 0.0f;
  for (std::int64_t j = threadIdx.x % kWarp; j < args.length; j += kWarp) squares += number(j) * number(j);
  const float rstd = rstd_of(squares, args.length, args.eps);
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
  float* parts;  // [ranges, length] of d_w
  std::int64_t num_rows, rows_per_range, length;
};

/// A range of rows a block, a row at a time, of which a thread has kParts times kCount numbers. With u = x · rstd:
/// d_x = rstd · (d_y · w - u · mean(d_y · w · u)), d_w += d_y · u.
template <typename T, int kCount, int kParts>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const BackwardArgs<T> args) {
  __shared__ float slots[2][kMaxThreads / kWarp];
  struct Row {
    Lanes<T, kCount> d_y[kParts], x[kParts];
    float rstd;
  };
  const auto column = [](int part) { return static_cast<int>(part * blockDim.x + threadIdx.x) * kCount; };
  const auto load = [&](std::int64_t row) {
    Row result = {};
    result.rstd = args.rstd[row];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int j = column(part);
      if (j >= args.length) continue;
      result.d_y[part] = get_lanes<kCount>(args.d_y + row * args.length + j);
      result.x[part] = get_lanes<kCount>(args.x + row * args.x_stride + j);
    }
    return result;
  };
  const std::int64_t first = blockIdx.x * args.rows_per_range;
  const std::int64_t end = min(args.num_rows, first + args.rows_per_range);
  float d_w[kParts][kCount] = {};
  Lanes<T, kCount> w[kParts] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (column(part) < args.length) w[part] = get_lanes<kCount>(args.w + column(part));
  }
  Row next = load(first);
  for (std::int64_t row = first; row < end; ++row) {
    const Row now = next;
    if (row + 1 < end) next = load(row + 1);  // on its way while this one is summed
    float dot = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float d_y = to_float(now.d_y[part].x[i]), u = to_float(now.x[part].x[i]) * now.rstd;
        d_w[part][i] += d_y * u;
        dot += d_y * to_float(w[part].x[i]) * u;
      }
    }
    const float mean = sum_of_block(dot, slots[(row - first) % 2]) / static_cast<float>(args.length);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int j = column(part);
      if (j >= args.length) continue;
      T* d_x = args.d_x + row * args.d_x_stride + j;
      float sum[kCount] = {};
      if (args.accumulate) load_lanes(d_x, sum);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float d_u = to_float(now.d_y[part].x[i]) * to_float(w[part].x[i]);
        sum[i] += now.rstd * (d_u - to_float(now.x[part].x[i]) * now.rstd * mean);
      }
      store_lanes(sum, d_x);
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (column(part) < args.length) store_lanes(d_w[part], args.parts + blockIdx.x * args.length + column(part));
  }
}

/// 32 columns a block: each warp sums some of the ranges, then their sums are added in order.
__global__ void add_parts_kernel(const float* parts, std::int64_t num_ranges, std::int64_t length, float* d_w) {
  __shared__ float of_warp[kMaxThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0f;
  if (j < length) {
#pragma unroll 8
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
  static constexpr int kOutputs = 1, kInFlight = 8, kTeams = 1;
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

/// Calls body(kParts) with the instance of forward_kernel for rows of `length`.
template <typename Body>
void for_parts(std::int64_t length, Body&& body) {
  const std::int64_t parts = (length + kWarp * kLanes - 1) / (kWarp * kLanes);
  if (parts <= 2) return body(std::integral_constant<int, 2>{});
  if (parts <= 8) return body(std::integral_constant<int, 8>{});
  if (parts <= 16) return body(std::integral_constant<int, 16>{});
  body(std::integral_constant<int, 32>{});
}

/// The longest rows that the kernels' registers hold.
constexpr std::int64_t kMaxLength = 32 * kWarp * kLanes;

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
    if (lanes) {
      for_parts(length, [&](auto parts) {
        forward_kernel<T, decltype(parts)::value><<<blocks, kRowsPerBlock * kWarp, 0, stream_of(op)>>>(args);
      });
    } else {
      forward_scalar_kernel<<<blocks, kRowsPerBlock * kWarp, 0, stream_of(op)>>>(args);
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
  const std::int64_t threads = std::clamp<std::int64_t>((length + kLanes - 1) / kLanes, kWarp, kMaxThreads);
  const std::int64_t most = kSms * (kMaxThreads / threads);
  const std::int64_t rows_per_range = (num_rows + most - 1) / most;
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
    const auto launch = [&](auto count, auto num_parts) {
      constexpr int kCount = decltype(count)::value, kParts = decltype(num_parts)::value;
      TESSERA_CHECK(length <= kMaxThreads * kCount * kParts, "rows of {}", length);
      const auto block = std::min<std::int64_t>((length + kCount - 1) / kCount, kMaxThreads);
      backward_kernel<T, kCount, kParts>
          <<<static_cast<unsigned>(num_ranges), static_cast<unsigned>((block + kWarp - 1) / kWarp * kWarp), 0,
             stream_of(op)>>>(args);
    };
    if (length <= kMaxLength && in_lanes(d_y_TN, x_TN, w_N.reshape({1, length}), d_x_TN)) {
      launch(std::integral_constant<int, kLanes>{}, std::integral_constant<int, 1>{});
    } else {
      launch(std::integral_constant<int, 1>{}, std::integral_constant<int, 16>{});
    }
  });
  add_parts_kernel<<<static_cast<unsigned>((length + kWarp - 1) / kWarp), kMaxThreads, 0, stream_of(op)>>>(
      numbers<const float>(parts), num_ranges, length, numbers<float>(d_w_N));
}

}  // namespace tessera::cuda
