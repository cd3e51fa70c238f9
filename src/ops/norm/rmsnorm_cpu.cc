#include <cmath>

#include "ops/cpu/operand_output.h"
#include "ops/norm/rmsnorm.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kNormRowsPerTask = 64;
// Sums over a row run in so many independent lanes, so that they can be vectorised without reordering.
constexpr std::int64_t kNormLanes = 16;

/// Returns the sum of f(j) for j in [0, length).
template <typename Function>
float sum_lanes(std::int64_t length, Function&& f) {
  float lanes[kNormLanes] = {};
  std::int64_t j = 0;
  for (; j + kNormLanes <= length; j += kNormLanes) {
    for (std::int64_t lane = 0; lane < kNormLanes; ++lane) lanes[lane] += f(j + lane);
  }
  for (; j < length; ++j) lanes[0] += f(j);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <typename T>
float normalise_row(const T* x, const T* w, float eps, std::int64_t length, T* y) {
  const float squares = sum_lanes(length, [&](std::int64_t j) { return load(x[j]) * load(x[j]); });
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(length) + eps);
  for (std::int64_t j = 0; j < length; ++j) store(y[j], load(x[j]) * rstd * load(w[j]));
  return rstd;
}

}  // namespace

void rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& w_N, float eps, const GemmOperand& y_TN,
                     const Tensor& rstd_T) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const OperandOutput output(context, y_TN, length, x_TN.dtype());
  if (context.measuring()) return;
  for_float_type(x_TN.dtype(), [&]<typename T>(T) {
    parallel_ranges(num_rows, output.rows_per_task(kNormRowsPerTask), [&](std::int64_t begin, std::int64_t end) {
      T* y = output.rows<T>(begin);
      for (std::int64_t i = begin; i < end; ++i, y += length) {
        rstd_T.data<float>()[i] = normalise_row(row_of<T>(x_TN, i), w_N.data<T>(), eps, length, y);
      }
      output.finish<T>(begin, end);
    });
  });
}

void residual_rmsnorm_forward(const Context& context, const Tensor& x_TN, const Tensor& delta_TN, const Tensor& w_N,
                              float eps, const Tensor& sum_TN, const GemmOperand& y_TN, const Tensor& rstd_T) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const DType dtype = x_TN.dtype();
  const OperandOutput output(context, y_TN, length, dtype);
  if (context.measuring()) return;
  for_float_type(dtype, [&]<typename T>(T) {
    parallel_ranges(num_rows, output.rows_per_task(kNormRowsPerTask), [&](std::int64_t begin, std::int64_t end) {
      T* y = output.rows<T>(begin);
      for (std::int64_t i = begin; i < end; ++i, y += length) {
        const T* x = row_of<T>(x_TN, i);
        const T* delta = row_of<T>(delta_TN, i);
        T* sum = row_of<T>(sum_TN, i);
        for (std::int64_t j = 0; j < length; ++j) store(sum[j], load(x[j]) + load(delta[j]));
        rstd_T.data<float>()[i] = normalise_row(sum, w_N.data<T>(), eps, length, y);
      }
      output.finish<T>(begin, end);
    });
  });
}

// Let u = x · rstd, so y = u · w. Then d_u = d_y · w, and d_x = rstd · (d_u - u · mean(d_u · u)). d_w is the sum over
// rows of d_y · u.
void rmsnorm_backward(const Context& context, const Tensor& d_y_TN, const Tensor& x_TN, const Tensor& w_N,
                      const Tensor& rstd_T, const Tensor& d_x_TN, Write write_d_x, const Tensor& d_w_N) {
  const std::int64_t num_rows = x_TN.dim(0), length = x_TN.dim(1);
  const DType dtype = x_TN.dtype();
  const bool accumulate = write_d_x == Write::kAccumulate;
  const ArenaScope scope(*context.arena);
  const std::int64_t num_tasks = (num_rows + kNormRowsPerTask - 1) / kNormRowsPerTask;
  const Tensor partial_d_w = context.arena->allocate({num_tasks, length}, DType::kFloat32);
  if (context.measuring()) return;
  for_float_type(dtype, [&]<typename T>(T) {
    parallel_for(num_tasks, [&](std::int64_t task) {
      float* d_w = row_of<float>(partial_d_w, task);
      std::fill(d_w, d_w + length, 0.0f);
      const T* w = w_N.data<T>();
      for (std::int64_t i = task * kNormRowsPerTask; i < std::min(num_rows, (task + 1) * kNormRowsPerTask); ++i) {
        const T* d_y = row_of<T>(d_y_TN, i);
        const T* x = row_of<T>(x_TN, i);
        T* d_x = row_of<T>(d_x_TN, i);
        const float rstd = rstd_T.data<float>()[i];
        const float dot = sum_lanes(length, [&](std::int64_t j) { return load(d_y[j]) * load(w[j]) * load(x[j]); });
        const float mean = dot * rstd / static_cast<float>(length);
        for (std::int64_t j = 0; j < length; ++j) {
          const float u = load(x[j]) * rstd;
          const float gradient = rstd * (load(d_y[j]) * load(w[j]) - u * mean);
          store(d_x[j], accumulate ? load(d_x[j]) + gradient : gradient);
          d_w[j] += load(d_y[j]) * u;
        }
      }
    });
  });
  float* d_w = d_w_N.data<float>();
  for (std::int64_t task = 0; task < num_tasks; ++task) {
    const float* partial = row_of<float>(partial_d_w, task);
    for (std::int64_t j = 0; j < length; ++j) d_w[j] += partial[j];
  }
}

}  // namespace tessera::cpu
