#include "ops/checks.h"
#include "ops/cpu/math.h"
#include "ops/cpu/types.h"
#include "ops/swiglu.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

using cpu::load;
using cpu::store;

constexpr std::int64_t kRowsPerTask = 32;

void check_operands(const Tensor& h_R2F, const Tensor& a_RF) {
  const std::int64_t num_rows = a_RF.dim(0), width = a_RF.dim(1);
  TESSERA_CHECK_TENSOR(a_RF, h_R2F.dtype(), {num_rows, width});
  TESSERA_CHECK_TENSOR(h_R2F, h_R2F.dtype(), {num_rows, 2 * width});
}

/// Gradient of one row for weight · d_a; writes weight · a and returns the sum of d_a · a.
template <typename T>
float backward_row(const T* d_a, const T* h, float weight, std::int64_t width, T* d_h, T* weighted_a) {
  constexpr std::int64_t kBlock = 64;  // a block's products wait in registers and L1, then are summed in order
  float dot = 0.0f;
  for (std::int64_t begin = 0; begin < width; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, width - begin);
    float products[kBlock];
#pragma GCC ivdep  // outputs are other arrays or the inputs themselves, never shifted
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t j = begin + i;
      const float gate = load(h[j]), up = load(h[width + j]), gradient = load(d_a[j]);
      const float s = cpu::sigmoid(gate);
      const float silu = gate * s;
      products[i] = gradient * silu * up;
      store(weighted_a[j], weight * silu * up);
      store(d_h[j], weight * gradient * up * (s + silu * (1.0f - s)));
      store(d_h[width + j], weight * gradient * silu);
    }
    for (std::int64_t i = 0; i < count; ++i) dot += products[i];
  }
  return dot;
}

}  // namespace

void swiglu_forward(const Context& context, const Tensor& h_R2F, const Tensor& a_RF) {
  const TraceScope trace(context.trace, "swiglu.forward");
  check_operands(h_R2F, a_RF);
  if (context.measuring()) return;
  const std::int64_t width = a_RF.dim(1);
  cpu::for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    parallel_ranges(a_RF.dim(0), kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const T* h = cpu::row_of<T>(h_R2F, r);
        T* a = cpu::row_of<T>(a_RF, r);
        for (std::int64_t j = 0; j < width; ++j) {
          const float gate = load(h[j]);
          store(a[j], gate * cpu::sigmoid(gate) * load(h[width + j]));
        }
      }
    });
  });
}

void swiglu_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const Tensor& d_h_R2F,
                     const Tensor& a_RF) {
  const TraceScope trace(context.trace, "swiglu.backward");
  check_operands(h_R2F, a_RF);
  check_operands(d_h_R2F, d_a_RF);
  if (context.measuring()) return;
  cpu::for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    parallel_ranges(a_RF.dim(0), kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        backward_row(cpu::row_of<T>(d_a_RF, r), cpu::row_of<T>(h_R2F, r), 1.0f, a_RF.dim(1), cpu::row_of<T>(d_h_R2F, r),
                     cpu::row_of<T>(a_RF, r));
      }
    });
  });
}

void swiglu_backward_weighted(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F,
                              const Tensor& slot_of_row_R, const Tensor& num_rows_1, const Tensor& weights_TK,
                              const Tensor& d_h_R2F, const Tensor& weighted_a_RF, const Tensor& d_weights_TK) {
  const TraceScope trace(context.trace, "swiglu.backward");
  check_operands(h_R2F, weighted_a_RF);
  check_operands(d_h_R2F, d_a_RF);
  TESSERA_CHECK_TENSOR(slot_of_row_R, DType::kInt32, {h_R2F.dim(0)});
  TESSERA_CHECK_TENSOR(num_rows_1, DType::kInt32, {1});
  TESSERA_CHECK_TENSOR(weights_TK, DType::kFloat32, {weights_TK.dim(0), weights_TK.dim(1)});
  TESSERA_CHECK_TENSOR(d_weights_TK, DType::kFloat32, {weights_TK.dim(0), weights_TK.dim(1)});
  if (context.measuring()) return;
  const std::int64_t num_rows = num_rows_1.data<std::int32_t>()[0];
  cpu::for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    parallel_ranges(num_rows, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int32_t slot = slot_of_row_R.data<std::int32_t>()[r];
        d_weights_TK.data<float>()[slot] =
            backward_row(cpu::row_of<T>(d_a_RF, r), cpu::row_of<T>(h_R2F, r), weights_TK.data<float>()[slot],
                         weighted_a_RF.dim(1), cpu::row_of<T>(d_h_R2F, r), cpu::row_of<T>(weighted_a_RF, r));
      }
    });
  });
}

}  // namespace tessera
