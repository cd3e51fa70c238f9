#include <cmath>

#include "ops/optimizer/adamw.h"
#include "ops/optimizer/quantize_master.h"
#include "tensor/parallel.h"

namespace tessera::cpu {

namespace {
constexpr std::int64_t kAdamwGrain = 1 << 15;

/// Computes a step. `Moment` is float or BFloat16.
template <typename Moment>
void make_step(const AdamWOptions& options, const AdamWStep& step, const Tensor& d_w_N, const Tensor& m_N,
               const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N) {
  const std::int64_t size = w_N.dim(0);
  const float keep = 1.0f - step.learning_rate * options.weight_decay;
  const float rate = step.learning_rate * step.correction1;
  const float correction2 = step.correction2, scale = step.gradient_scale;
  const float beta1 = options.beta1, beta2 = options.beta2, epsilon = options.epsilon;
  parallel_ranges(size, kAdamwGrain, [&](std::int64_t begin, std::int64_t end) {
    const float* __restrict d_w = d_w_N.data<float>();
    Moment* __restrict m = m_N.data<Moment>();
    Moment* __restrict v = v_N.data<Moment>();
    float* __restrict w = w_N.data<float>();
    for (std::int64_t i = begin; i < end; ++i) {
      const float g = d_w[i] * scale;
      const float m_i = beta1 * static_cast<float>(m[i]) + (1.0f - beta1) * g;
      const float v_i = beta2 * static_cast<float>(v[i]) + (1.0f - beta2) * g * g;
      w[i] = keep * w[i] - rate * m_i / (std::sqrt(v_i * correction2) + epsilon);
      m[i] = Moment(m_i);
      v[i] = Moment(v_i);
    }
    if (!shadow_N.defined()) return;
    BFloat16* shadow = shadow_N.data<BFloat16>();
    for (std::int64_t i = begin; i < end; ++i) shadow[i] = BFloat16(w[i]);
  });
}

}  // namespace

void adamw(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
           const Tensor& m_N, const Tensor& v_N, const Tensor& w_N, const Tensor& shadow_N) {
  if (context.measuring()) return;
  const auto step = *reinterpret_cast<const AdamWStep*>(step_S.data<float>());
  if (step.finite == 0.0f) return;
  const auto make = m_N.dtype() == DType::kBFloat16 ? make_step<BFloat16> : make_step<float>;
  make(options, step, d_w_N, m_N, v_N, w_N, shadow_N);
}

void adamw_quantized(const Context& context, const AdamWOptions& options, const Tensor& step_S, const Tensor& d_w_N,
                     const Tensor& m_N, const Tensor& v_N, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized) {
  cpu::adamw(context, options, step_S, d_w_N, m_N, v_N, w.reshape({w.num_elements()}), {});
  quantize_master(context, w, compute, format, quantized);
}

void sum_of_squares(const Context& context, const Tensor& x_N, const Tensor& squares_1) {
  const std::int64_t size = x_N.dim(0), num_tasks = (size + kAdamwGrain - 1) / kAdamwGrain;
  const ArenaScope scope(*context.arena);
  auto* partial =
      reinterpret_cast<double*>(context.arena->allocate_bytes(static_cast<std::size_t>(num_tasks) * sizeof(double)));
  if (context.measuring()) return;
  parallel_for(num_tasks, [&](std::int64_t task) {
    const float* x = x_N.data<float>();
    constexpr std::int64_t kLanes = 8;
    double lanes[kLanes] = {};
    const std::int64_t end = std::min(size, (task + 1) * kAdamwGrain);
    std::int64_t i = task * kAdamwGrain;
    for (; i + kLanes <= end; i += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);
      }
    }
    for (; i < end; ++i) lanes[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    partial[task] = sum;
  });
  double sum = 0.0;
  for (std::int64_t task = 0; task < num_tasks; ++task) sum += partial[task];
  squares_1.data<double>()[0] = sum;
}

void clip_gradients(const Context& context, const Tensor& squares_1, const Tensor& loss_1, double max_norm,
                    const Tensor& step_S) {
  if (context.measuring()) return;
  const double norm = std::sqrt(squares_1.data<double>()[0]);
  auto* step = reinterpret_cast<AdamWStep*>(step_S.data<float>());
  step->gradient_scale = static_cast<float>(std::min(1.0, max_norm / (norm + kNormFloor)));
  const double loss = loss_1.defined() ? loss_1.data<double>()[0] : 0.0;
  if (!std::isfinite(norm) || !std::isfinite(loss) || loss > static_cast<double>(step->largest_loss)) {
    step->finite = 0.0f;
  }
}

}  // namespace tessera::cpu
