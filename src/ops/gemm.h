// Dense matrix products, through the GEMM library (oneDNN on the CPU), accumulated in float32.
#pragma once

#include <memory>

#include "ops/context.h"

namespace tessera {

/// The library's kernels for the shapes met so far. Measuring a step compiles all that it needs, so that the step
/// itself neither compiles nor allocates. Not thread-safe: one per thread that runs operators.
class GemmLibrary {
 public:
  GemmLibrary();
  ~GemmLibrary();
  GemmLibrary(const GemmLibrary&) = delete;
  GemmLibrary& operator=(const GemmLibrary&) = delete;

  struct Implementation;
  Implementation& implementation() { return *implementation_; }

 private:
  std::unique_ptr<Implementation> implementation_;
};

/// c_MN (= or +=) op(a) · op(b), where op transposes if asked to. a, b: float32 or bfloat16, strided; c: float32, or
/// bfloat16 if b is, strided. Sums in float32; into a bfloat16 c, += rounds once. A float32 a counts in full when b is
/// bfloat16.
void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write);

/// y_TM (= or +=) x_TN · w_MNᵀ: a linear layer whose weight is [out, in].
inline void linear_forward(const Context& context, const Tensor& x_TN, const Tensor& w_MN, const Tensor& y_TM,
                           Write write = Write::kAssign) {
  gemm(context, x_TN, false, w_MN, true, y_TM, write);
}

/// d_x_TN (= or +=) d_y_TM · w_MN.
inline void linear_dgrad(const Context& context, const Tensor& d_y_TM, const Tensor& w_MN, const Tensor& d_x_TN,
                         Write write = Write::kAssign) {
  gemm(context, d_y_TM, false, w_MN, false, d_x_TN, write);
}

/// d_w_MN (+= or =) d_y_TMᵀ · x_TN; d_w is float32.
inline void linear_wgrad(const Context& context, const Tensor& d_y_TM, const Tensor& x_TN, const Tensor& d_w_MN,
                         Write write = Write::kAccumulate) {
  gemm(context, d_y_TM, true, x_TN, false, d_w_MN, write);
}

}  // namespace tessera
