#include "ops/kit/reduce.cuh"
#include "ops/optimizer/adamw.h"
#include "ops/optimizer/quantize_master.h"
#include "ops/quantize/tile_quantizer.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerAccess = 4;  // numbers of an access
constexpr int kAccesses = 2;   // a thread's accesses to each array before the first result is written
/// The number of parts of a sum. It is the number of blocks that a large GPU runs at once.
constexpr int kParts = 1024;

/// Holds the kernel's arguments. `Moment` is float or __nv_bfloat16.
template <typename Moment>
struct AdamWArgs {
  AdamWOptions options;
  const AdamWStep* step;
  const float* d_w;
  Moment *m, *v;
  float* w;
  __nv_bfloat16* shadow;  // may be null
  std::int64_t size;

  /// Computes the new numbers of one number's state.
  __device__ void update(const AdamWStep& now, float d_w_i, float& m_i, float& v_i, float& w_i) const {
    const float gradient = d_w_i * now.gradient_scale;
    const float keep = 1.0f - now.learning_rate * options.weight_decay, rate = now.learning_rate * now.correction1;
    m_i = options.beta1 * m_i + (1.0f - options.beta1) * gradient;
    v_i = options.beta2 * v_i + (1.0f - options.beta2) * gradient * gradient;
    w_i = keep * w_i - rate * m_i / (sqrtf(v_i * now.correction2) + options.epsilon);
  }
};

/// Computes a step of kAccesses · kThreads · kCount numbers. A thread's accesses are kThreads · kCount numbers apart,
/// so the accesses of a warp are neighbours. A block ends after its numbers, because blocks that loop are slower.
template <int kCount, typename Moment>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamWArgs<Moment> args) {
  const AdamWStep step = *args.step;
  if (step.finite == 0.0f) return;
  constexpr std::int64_t kStride = kThreads * kCount;
  const std::int64_t first = blockIdx.x * kAccesses * kStride + threadIdx.x * kCount;
  float g[kAccesses][kCount], m[kAccesses][kCount], v[kAccesses][kCount], w[kAccesses][kCount];
#pragma unroll
  for (int access = 0; access < kAccesses; ++access) {
    const std::int64_t i = first + access * kStride;
    if (i >= args.size) break;
    load_lanes(args.d_w + i, g[access]);
    load_lanes(args.m + i, m[access]);
    load_lanes(args.v + i, v[access]);
    load_lanes(args.w + i, w[access]);
  }
#pragma unroll
  for (int access = 0; access < kAccesses; ++access) {
    const std::int64_t i = first + access * kStride;
    if (i >= args.size) break;
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      args.update(step, g[access][lane], m[access][lane], v[access][lane], w[access][lane]);
    }
    store_lanes(m[access], args.m + i);
    store_lanes(v[access], args.v + i);
    store_lanes(w[access], args.w + i);
    if (args.shadow != nullptr) store_lanes(w[access], args.shadow + i);
  }
}

/// Computes a step over the numbers of a weight, for the tile kernel, which quantizes them as rounded to bfloat16.
template <typename Moment>
struct AdamWTile {
  using Number = __nv_bfloat16;
  static constexpr int kInFlight = 2, kBlocksPerSm = 2;
  template <int kCount>
  struct Input {
    std::int64_t at;
    float d_w[kCount], m[kCount], v[kCount], w[kCount];
  };
  template <int kCount>
  using Columns = AdamWStep;

  AdamWArgs<Moment> args;
  std::int64_t matrix_stride, stride;

  template <int kCount>
  __device__ Columns<kCount> columns(std::int64_t) const {
    return *args.step;
  }
  template <int kCount>
  __device__ Input<kCount> load(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
    Input<kCount> input;
    input.at = matrix * matrix_stride + row * stride + column;
    load_lanes(args.d_w + input.at, input.d_w);
    load_lanes(args.m + input.at, input.m);
    load_lanes(args.v + input.at, input.v);
    load_lanes(args.w + input.at, input.w);
    return input;
  }
  template <int kCount>
  __device__ void compute(Input<kCount>& input, const AdamWStep& step, Lanes<Number, kCount> (&out)[1], float&) const {
    if (step.finite != 0.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) args.update(step, input.d_w[i], input.m[i], input.v[i], input.w[i]);
      store_lanes(input.m, args.m + input.at);
      store_lanes(input.v, args.v + input.at);
      store_lanes(input.w, args.w + input.at);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[0].x[i] = __float2bfloat16_rn(input.w[i]);
  }
};

template <typename Moment>
struct WidenedAdamWTile : AdamWTile<Moment> {
  using Wide = void;
};

template <int kCount>
__global__ void squares_kernel(const float* x, std::int64_t size, double* parts) {
  double sums[2] = {};
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount; i < size;
       i += std::int64_t{kParts} * kThreads * kCount) {
    float numbers[kCount];
    load_lanes(x + i, numbers);
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      const double number = static_cast<double>(numbers[lane]);
      sums[lane % 2] += number * number;
    }
  }
  __shared__ double slots[kThreads / kWarp];
  const double sum = sum_of_block(sums[0] + sums[1], slots);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void add_parts_kernel(const double* parts, double* sum_1) {
  __shared__ double slots[kParts / kWarp];
  const double sum = sum_of_block(parts[threadIdx.x], slots);
  if (threadIdx.x == 0) *sum_1 = sum;
}

__global__ void clip_kernel(const double* squares, const double* loss, double max_norm, AdamWStep* step) {
  const double norm = sqrt(*squares);
  step->gradient_scale = static_cast<float>(fmin(1.0, max_norm / (norm + kNormFloor)));
  const double sum = loss == nullptr ? 0.0 : *loss;
  if (!isfinite(norm) || !isfinite(sum) || sum > static_cast<double>(step->largest_loss)) step->finite = 0.0f;
}

template <typename T>
bool aligned(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}

template <typename Moment>
AdamWArgs<Moment> adamw_args(const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N, const Tensor& m_N,
                             const Tensor& v_N, const Tensor& w, const Tensor& shadow) {
  return {.options = options,
          .step = reinterpret_cast<const AdamWStep*>(numbers<float>(step_S)),
          .d_w = numbers<const float>(d_w_N),
          .m = numbers<Moment>(m_N),
          .v = numbers<Moment>(v_N),
          .w = numbers<float>(w),
          .shadow = shadow.defined() ? numbers<__nv_bfloat16>(shadow) : nullptr,
          .size = w.num_elements()};
}

template <typename Moment>
bool are_aligned(const AdamWArgs<Moment>& args) {
  return aligned(args.d_w) && aligned(args.m) && aligned(args.v) && aligned(args.w) && aligned(args.shadow);
}

template <typename Moment>
void launch_adamw(const Context& op, const AdamWArgs<Moment>& args) {
  const std::int64_t size = args.size;
  const bool by_four = size % kPerAccess == 0 && are_aligned(args);
  const auto launch = [&](auto kernel, std::int64_t per_block) {
    kernel<<<static_cast<unsigned>((size + per_block - 1) / per_block), kThreads, 0, stream_of(op)>>>(args);
  };
  constexpr int kPerBlock = kAccesses * kThreads;
  by_four ? launch(adamw_kernel<kPerAccess, Moment>, kPerBlock * kPerAccess)
          : launch(adamw_kernel<1, Moment>, kPerBlock);
}

/// Launches the kernel of tiles.
template <typename Moment>
void launch_tiles(const Context& op, const AdamWArgs<Moment>& args, const Shape& shape, const mx::Format& format,
                  const QuantizedWeight& quantized) {
  const int last = shape.num_dims() - 1;
  const std::int64_t num_rows = shape[last - 1], length = shape[last];
  TESSERA_CHECK(are_aligned(args));
  const auto launch = [&](const auto& producer, const TileOutput& rows, const TileOutput& columns) {
    using Producer = std::remove_cvref_t<decltype(producer)>;
    const TileArgs<Producer> tiles{.producer = producer,
                                   .outputs = {{.rows = rows, .columns = columns}},
                                   .num_matrices = last == 2 ? shape[0] : 1,
                                   .num_rows = num_rows,
                                   .length = length};
    launch_tile_kernel<Producer, kPerAccess, true>(op, tiles);
  };
  const AdamWTile<Moment> tile{.args = args, .matrix_stride = num_rows * length, .stride = length};
  if (quantized.wide_rows.defined()) {
    launch(WidenedAdamWTile<Moment>{tile}, tile_output_wide(quantized.wide_rows, format),
           tile_output_wide(quantized.wide_columns, format));
  } else {
    launch(tile, tile_output(quantized.rows), tile_output(quantized.columns));
  }
}

/// Calls use(Moment) with the type of the moments.
template <typename Use>
auto for_moments(const Tensor& m_N, const Use& use) {
  return m_N.dtype() == DType::kBFloat16 ? use(__nv_bfloat16{}) : use(float{});
}

}  // namespace

void sum_of_squares(const Context& op, const Tensor& x_N, const Tensor& squares_1) {
  const ArenaScope scope(*op.arena);
  const Tensor parts = op.arena->allocate({kParts}, DType::kFloat64);
  if (op.measuring()) return;
  const std::int64_t size = x_N.dim(0);
  for_lanes(size % kLanes == 0 && aligned(numbers<float>(x_N)), [&](auto lanes) {
    squares_kernel<decltype(lanes)::value>
        <<<kParts, kThreads, 0, stream_of(op)>>>(numbers<const float>(x_N), size, numbers<double>(parts));
  });
  add_parts_kernel<<<1, kParts, 0, stream_of(op)>>>(numbers<const double>(parts), numbers<double>(squares_1));
}

void clip_gradients(const Context& op, const Tensor& squares_1, const Tensor& loss_1, double max_norm,
                    const Tensor& step_S) {
  if (op.measuring()) return;
  clip_kernel<<<1, 1, 0, stream_of(op)>>>(numbers<const double>(squares_1),
                                          loss_1.defined() ? numbers<const double>(loss_1) : nullptr, max_norm,
                                          reinterpret_cast<AdamWStep*>(numbers<float>(step_S)));
}

void adamw(const Context& op, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N, const Tensor& m_N,
           const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N) {
  if (op.measuring() || w_N.dim(0) == 0) return;
  for_moments(m_N, [&]<typename Moment>(Moment) {
    launch_adamw(op, adamw_args<Moment>(options, step_S, d_w_N, m_N, v_N, w_N, shadow_N));
  });
}

void adamw_quantized(const Context& op, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
                     const Tensor& m_N, const Tensor& v_N, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized) {
  if (w.num_elements() == 0) return;
  // The kernel of tiles reads rows that start at multiples of 16 bytes.
  const bool by_tiles = compute == DType::kBFloat16 && w.dim(w.num_dims() - 1) % kPerAccess == 0;
  if (!op.measuring()) {
    for_moments(m_N, [&]<typename Moment>(Moment) {
      const auto args = adamw_args<Moment>(options, step_S, d_w_N, m_N, v_N, w, {});
      by_tiles ? launch_tiles(op, args, w.shape(), format, quantized) : launch_adamw(op, args);
    });
  }
  if (!by_tiles) tessera::quantize_master(op, w, compute, format, quantized);
}

}  // namespace tessera::cuda
