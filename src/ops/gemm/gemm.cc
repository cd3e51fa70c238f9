#include "ops/gemm/gemm.h"

#include "ops/runtime/backends.h"

namespace tessera {

TESSERA_BACKENDS(gemm)
TESSERA_BACKENDS(batched_gemm)
TESSERA_BACKENDS(linear_pair_forward)

namespace {

void check_operands(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c) {
  const std::int64_t m = c.dim(0), n = c.dim(1), k = a.dim(transpose_a ? 0 : 1);
  TESSERA_CHECK(a.shape() == (transpose_a ? Shape{k, m} : Shape{m, k}), "a {} c {}", a.shape().to_string(),
                c.shape().to_string());
  TESSERA_CHECK(b.shape() == (transpose_b ? Shape{n, k} : Shape{k, n}), "b {} a {} c {}", b.shape().to_string(),
                a.shape().to_string(), c.shape().to_string());
  TESSERA_CHECK((a.dtype() == b.dtype() || a.dtype() == DType::kFloat32) &&
                    (c.dtype() == b.dtype() || c.dtype() == DType::kFloat32),
                "{} {} {}", name_of(a.dtype()), name_of(b.dtype()), name_of(c.dtype()));
  TESSERA_CHECK(k > 0 || m == 0 || n == 0);
}

}  // namespace

void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  const TraceScope trace(context.trace, "gemm");
  check_operands(a, transpose_a, b, transpose_b, c);
  if (c.num_elements() == 0) return;
  TESSERA_RUN(gemm, context, a, transpose_a, b, transpose_b, c, write);
}

void batched_gemm(const Context& context, const Tensor& a, const Tensor& b, bool transpose_b, const Tensor& c,
                  const GemmBatch& batch) {
  const TraceScope trace(context.trace, "batched_gemm");
  check_operands(a, false, b, transpose_b, c);
  TESSERA_CHECK(a.dtype() == b.dtype() && c.dtype() == b.dtype(), "{} {} {}", name_of(a.dtype()), name_of(b.dtype()),
                name_of(c.dtype()));
  if (c.num_elements() == 0) return;
  TESSERA_RUN(batched_gemm, context, a, b, transpose_b, c, batch);
}

void linear_pair_forward(const Context& context, const Tensor& x_TN, const std::array<Tensor, 2>& weights,
                         const std::array<Tensor, 2>& outputs) {
  const TraceScope trace(context.trace, "linear_pair_forward");
  for (std::size_t i = 0; i < 2; ++i) {
    check_operands(x_TN, false, weights[i], true, outputs[i]);
    TESSERA_CHECK(weights[i].dtype() == x_TN.dtype() && outputs[i].dtype() == x_TN.dtype(), "{} {} {}",
                  name_of(x_TN.dtype()), name_of(weights[i].dtype()), name_of(outputs[i].dtype()));
  }
  if (x_TN.num_elements() == 0) return;
  TESSERA_RUN(linear_pair_forward, context, x_TN, weights, outputs);
}

}  // namespace tessera
