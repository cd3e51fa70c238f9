// RMSNorm with its weight [N] (ops/norm/rmsnorm.h), as layers use it.
#pragma once

#include "model/layer_context.h"
#include "ops/norm/rmsnorm.h"

namespace tessera {

class RmsNorm {
 public:
  RmsNorm(Parameters& parameters, const std::string& name, std::int64_t size)
      : weight_(parameters.add({name, {size}, {}})) {}

  /// Computes y_tN = RMSNorm(x_tN), in the forms of the operand, and rstd_t [t] (float32), which the backward needs.
  void forward(const LayerContext& context, const Tensor& x_tN, const GemmOperand& y_tN, const Tensor& rstd_t) const {
    rmsnorm_forward(context.op, x_tN, context.weight(weight_), context.config().norm_eps, y_tN, rstd_t);
  }
  /// Computes sum_tN = x_tN + delta_tN and y_tN = RMSNorm(sum_tN).
  void residual_forward(const LayerContext& context, const Tensor& x_tN, const Tensor& delta_tN, const Tensor& sum_tN,
                        const GemmOperand& y_tN, const Tensor& rstd_t) const {
    residual_rmsnorm_forward(context.op, x_tN, delta_tN, context.weight(weight_), context.config().norm_eps, sum_tN,
                             y_tN, rstd_t);
  }
  /// Assigns or adds the input's gradient to d_x_tN, and adds to the weight's gradient.
  void backward(const LayerContext& context, const Tensor& d_y_tN, const Tensor& x_tN, const Tensor& rstd_t,
                const Tensor& d_x_tN, Write write = Write::kAssign) const {
    rmsnorm_backward(context.op, d_y_tN, x_tN, context.weight(weight_), rstd_t, d_x_tN, write,
                     context.gradient(weight_));
  }
  ParamId weight() const { return weight_; }

 private:
  ParamId weight_;
};

}  // namespace tessera
