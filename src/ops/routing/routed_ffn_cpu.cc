#include "ops/routing/routed_ffn.h"

namespace tessera::cpu {

void routed_ffn(const Context& context, const Tensor& y_TD, const RoutedFfn& experts, const Tensor& out_TD) {
  routed_ffn_by_operators(context, y_TD, experts, out_TD);
}

}  // namespace tessera::cpu
