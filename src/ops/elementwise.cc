#include "ops/elementwise.h"

#include "ops/backends.h"

namespace tessera {

TESSERA_BACKENDS(convert)
TESSERA_BACKENDS(add)
TESSERA_BACKENDS(copy)
TESSERA_BACKENDS(set_zero)
TESSERA_BACKENDS(all_finite)

void convert(const Context& context, const Tensor& source, const Tensor& target) {
  const TraceScope trace(context.trace, "convert");
  TESSERA_CHECK(source.shape() == target.shape(), "{} {}", source.shape().to_string(), target.shape().to_string());
  TESSERA_RUN(convert, context, source, target);
}

void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum) {
  const TraceScope trace(context.trace, "add");
  TESSERA_CHECK(a.shape() == b.shape() && a.shape() == sum.shape(), "{} {} {}", a.shape().to_string(),
                b.shape().to_string(), sum.shape().to_string());
  TESSERA_CHECK(a.dtype() == sum.dtype() && (b.dtype() == a.dtype() || b.dtype() == DType::kFloat32));
  TESSERA_CHECK(a.is_contiguous() && b.is_contiguous() && sum.is_contiguous());
  TESSERA_RUN(add, context, a, b, sum);
}

void copy(const Context& context, const Tensor& source, const Tensor& target) {
  const TraceScope trace(context.trace, "copy");
  TESSERA_CHECK(source.is_contiguous() && target.is_contiguous());
  TESSERA_CHECK(source.shape() == target.shape() && source.dtype() == target.dtype(), "{} {} to {} {}",
                name_of(source.dtype()), source.shape().to_string(), name_of(target.dtype()),
                target.shape().to_string());
  TESSERA_RUN(copy, context, source, target);
}

void set_zero(const Context& context, const Tensor& target) {
  const TraceScope trace(context.trace, "set_zero");
  TESSERA_CHECK(target.is_contiguous());
  TESSERA_RUN(set_zero, context, target);
}

bool all_finite(const Context& context, const Tensor& x) {
  if (context.measuring()) return true;
  return TESSERA_RUN(all_finite, context, x);
}

}  // namespace tessera
