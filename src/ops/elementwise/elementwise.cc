#include "ops/elementwise/elementwise.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"
#include "tensor/dims.h"

namespace tessera {

TESSERA_BACKENDS(convert)
TESSERA_BACKENDS(add)
TESSERA_BACKENDS(add_sum)
TESSERA_BACKENDS(add_counts)
TESSERA_BACKENDS(copy)
TESSERA_BACKENDS(set_zero)
TESSERA_BACKENDS(all_finite)

void convert(const Context& context, const Tensor& source, const Tensor& target) {
  const TraceScope trace(context.trace, "convert");
  TESSERA_CHECK(source.shape() == target.shape(), "{} {}", source.shape().to_string(), target.shape().to_string());
  TESSERA_RUN(convert, context, source, target);
}

void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& c) {
  const TraceScope trace(context.trace, "add");
  TESSERA_CHECK(a.shape() == b.shape() && a.shape() == sum.shape(), "{} {} {}", a.shape().to_string(),
                b.shape().to_string(), sum.shape().to_string());
  TESSERA_CHECK(a.dtype() == sum.dtype() && (b.dtype() == a.dtype() || b.dtype() == DType::kFloat32));
  TESSERA_CHECK(a.is_contiguous() && b.is_contiguous() && sum.is_contiguous());
  TESSERA_CHECK(!c.defined() || (c.shape() == a.shape() && c.dtype() == a.dtype() && c.is_contiguous()));
  TESSERA_RUN(add, context, a, b, sum, c);
}

void add_sum(const Context& context, const Tensor& x_N, const Tensor& sum_1) {
  TESSERA_DIMS(x_N, sum_1);
  TESSERA_CHECK_TENSOR(x_N, DType::kFloat32, {x_N.dim(0)});
  TESSERA_CHECK_TENSOR(sum_1, DType::kFloat64, {1});
  TESSERA_RUN(add_sum, context, x_N, sum_1);
}

void add_counts(const Context& context, const Tensor& x_N, const Tensor& sum_N) {
  TESSERA_DIMS(x_N, sum_N);
  TESSERA_CHECK_TENSOR(x_N, DType::kInt32, {x_N.dim(0)});
  TESSERA_CHECK_TENSOR(sum_N, DType::kFloat64, {x_N.dim(0)});
  TESSERA_RUN(add_counts, context, x_N, sum_N);
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
