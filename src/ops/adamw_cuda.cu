#include "ops/adamw.h"
#include "ops/cuda/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// Parts of a sum: as many blocks as a large GPU runs at once.
constexpr int kParts = 1024;

struct AdamWArgs {
  AdamWOptions options;
  const AdamWStep* step;
  const float* d_w;
  float *m, *v, *w;
  __nv_bfloat16* shadow;  // null: none
  std::int64_t size;
};

template <int kCount>
__global__ void adamw_kernel(const AdamWArgs args) {
  const AdamWStep step = *args.step;
  if (step.finite == 0.0f) return;
  const float beta1 = args.options.beta1, beta2 = args.options.beta2;
  const float keep = 1.0f - step.learning_rate * args.options.weight_decay;
  const float rate = step.learning_rate * step.correction1;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount; i < args.size;
       i += std::int64_t{gridDim.x} * kThreads * kCount) {
    float g[kCount], m[kCount], v[kCount], w[kCount];
    load_lanes(args.d_w + i, g);
    load_lanes(args.m + i, m);
    load_lanes(args.v + i, v);
    load_lanes(args.w + i, w);
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      g[lane] *= step.gradient_scale;
      m[lane] = beta1 * m[lane] + (1.0f - beta1) * g[lane];
      v[lane] = beta2 * v[lane] + (1.0f - beta2) * g[lane] * g[lane];
      w[lane] = keep * w[lane] - rate * m[lane] / (sqrtf(v[lane] * step.correction2) + args.options.epsilon);
    }
    store_lanes(m, args.m + i);
    store_lanes(v, args.v + i);
    store_lanes(w, args.w + i);
    if (args.shadow != nullptr) store_lanes(w, args.shadow + i);
  }
}

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
  step->finite = isfinite(norm) && (loss == nullptr || isfinite(*loss)) ? 1.0f : 0.0f;
}

template <typename T>
bool aligned(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
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
  const std::int64_t size = w_N.dim(0);
  if (op.measuring() || size == 0) return;
  AdamWArgs args{.options = options,
                 .step = reinterpret_cast<const AdamWStep*>(numbers<float>(step_S)),
                 .d_w = numbers<const float>(d_w_N),
                 .m = numbers<float>(m_N),
                 .v = numbers<float>(v_N),
                 .w = numbers<float>(w_N),
                 .shadow = shadow_N.defined() ? numbers<__nv_bfloat16>(shadow_N) : nullptr,
                 .size = size};
  const bool lanes = size % kLanes == 0 && aligned(args.d_w) && aligned(args.m) && aligned(args.v) && aligned(args.w) &&
                     aligned(args.shadow);
  for_lanes(lanes, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    adamw_kernel<kCount><<<grid_for(op, size / kCount, kThreads), kThreads, 0, stream_of(op)>>>(args);
  });
}

}  // namespace tessera::cuda
