#include "ops/routing/moe_decode.h"

namespace tessera::cpu {

void moe_decode(const Context& context, const Tensor& x_TD, const Tensor& y_TD, const MoeDecodeOperands& experts,
                const Tensor& out_TD) {
  moe_decode_by_operators(context, x_TD, y_TD, experts, out_TD);
}

}  // namespace tessera::cpu
