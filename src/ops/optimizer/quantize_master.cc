#include "ops/optimizer/quantize_master.h"

#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"

namespace tessera {

void quantize_master(const Context& context, const Tensor& w, DType compute, const mx::Format& format,
                     const QuantizedWeight& quantized) {
  if (compute == DType::kFloat32) return quantize_weight(context, w, format, quantized);
  const ArenaScope scope(*context.arena);
  const bool is_stack = w.num_dims() == 3;
  const Tensor rounded = context.arena->allocate(is_stack ? w[0].shape() : w.shape(), compute);
  for (std::int64_t i = 0; i < (is_stack ? w.dim(0) : 1); ++i) {
    convert(context, is_stack ? w[i] : w, rounded);
    quantize_weight(context, rounded, format, is_stack ? quantized[i] : quantized);
  }
}

}  // namespace tessera
