#include "ops/cpu/math.h"
#include "ops/cpu/operand_output.h"
#include "ops/elementwise/swiglu.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kSwigluRowsPerTask = 32;

/// Computes the gradient of one row for weight · d_a. Writes weight · a, and returns the sum of d_a · a.
template <typename T>
float backward_row(const T* d_a, const T* h, float weight, std::int64_t width, T* d_h, T* weighted_a) {
  // The products of a block wait in registers and the L1 cache. Then they are summed in order.
  constexpr std::int64_t kBlock = 64;
  float dot = 0.0f;
  for (std::int64_t begin = 0; begin < width; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, width - begin);
    float products[kBlock];
#pragma GCC ivdep  // Outputs are other arrays or exactly the inputs, never shifted.
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t j = begin + i;
      const float gate = load(h[j]), up = load(h[width + j]), gradient = load(d_a[j]);
      const float s = sigmoid(gate);
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

/// Calls `backward(r, d_a, h, d_h, a)` for every row.
template <typename Backward>
void for_rows_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const Tensor& num_rows_1,
                       const GemmOperand& d_h_R2F, const GemmOperand& a_RF, Backward&& backward) {
  const std::int64_t num_rows = d_a_RF.dim(0), width = d_a_RF.dim(1);
  const std::int64_t side = std::max(quantize_side(d_h_R2F), quantize_side(a_RF));
  const OperandOutput d_h_output(context, d_h_R2F, 2 * width, h_R2F.dtype(), side);
  const OperandOutput a_output(context, a_RF, width, h_R2F.dtype(), side);
  if (context.measuring()) return;
  for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    const std::int64_t rows_per_task = a_output.rows_per_task(d_h_output.rows_per_task(kSwigluRowsPerTask));
    parallel_ranges(computed_rows(num_rows_1, num_rows), rows_per_task, [&](std::int64_t begin, std::int64_t end) {
      T *d_h = d_h_output.rows<T>(begin), *a = a_output.rows<T>(begin);
      for (std::int64_t r = begin; r < end; ++r, d_h += 2 * width, a += width) {
        backward(r, row_of<T>(d_a_RF, r), row_of<T>(h_R2F, r), d_h, a);
      }
      d_h_output.finish<T>(begin, end);
      a_output.finish<T>(begin, end);
    });
  });
}

}  // namespace

void swiglu_forward(const Context& context, const Tensor& h_R2F, const GemmOperand& a_RF, const Tensor& num_rows_1) {
  const std::int64_t num_rows = h_R2F.dim(0), width = h_R2F.dim(1) / 2;
  const OperandOutput output(context, a_RF, width, h_R2F.dtype());
  if (context.measuring()) return;
  for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    parallel_ranges(computed_rows(num_rows_1, num_rows), output.rows_per_task(kSwigluRowsPerTask),
                    [&](std::int64_t begin, std::int64_t end) {
                      T* a = output.rows<T>(begin);
                      for (std::int64_t r = begin; r < end; ++r, a += width) {
                        const T* h = row_of<T>(h_R2F, r);
                        for (std::int64_t j = 0; j < width; ++j) {
                          const float gate = load(h[j]);
                          store(a[j], gate * sigmoid(gate) * load(h[width + j]));
                        }
                      }
                      output.finish<T>(begin, end);
                    });
  });
}

void swiglu_backward(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F,
                     const GemmOperand& a_RF) {
  const std::int64_t width = d_a_RF.dim(1);
  for_rows_backward(context, d_a_RF, h_R2F, {}, d_h_R2F, a_RF,
                    [&]<typename T>(std::int64_t, const T* d_a, const T* h, T* d_h, T* a) {
                      backward_row(d_a, h, 1.0f, width, d_h, a);
                    });
}

void swiglu_backward_weighted(const Context& context, const Tensor& d_a_RF, const Tensor& h_R2F,
                              const Tensor& weights_R, const Tensor& num_rows_1, const GemmOperand& d_h_R2F,
                              const GemmOperand& weighted_a_RF, const Tensor& d_weights_R) {
  const std::int64_t width = d_a_RF.dim(1);
  for_rows_backward(context, d_a_RF, h_R2F, num_rows_1, d_h_R2F, weighted_a_RF,
                    [&]<typename T>(std::int64_t r, const T* d_a, const T* h, T* d_h, T* a) {
                      d_weights_R.data<float>()[r] = backward_row(d_a, h, weights_R.data<float>()[r], width, d_h, a);
                    });
}

}  // namespace tessera::cpu
