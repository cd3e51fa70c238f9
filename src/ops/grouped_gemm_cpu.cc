#include <vector>
#include "ops/checks.h"
#include "ops/cpu/types.h"
#include "ops/grouped_gemm.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {
using cpu::load;
using cpu::store;
}

void grouped_linear_forward(const Context& context, const Tensor& x_RN, const Tensor& w_EMN, const Tensor& offsets_E1,
                            const Tensor& y_RM) {
  if (context.measuring()) return;
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2);
  const auto* offsets = offsets_E1.data<std::int32_t>();
  cpu::for_float_type(x_RN.dtype(), [&]<typename T>(T) {
    parallel_for(experts, [&](std::int64_t e) {
      for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r)
        for (std::int64_t i = 0; i < m; ++i) {
          const T* w = w_EMN.data<T>() + (e * m + i) * n;
          const T* x = cpu::row_of<T>(x_RN, r);
          float sum = 0;
          for (std::int64_t j = 0; j < n; ++j) sum += load(x[j]) * load(w[j]);
          store(cpu::row_of<T>(y_RM, r)[i], sum);
        }
    });
  });
}
void grouped_linear_dgrad(const Context& context, const Tensor& d_y_RM, const Tensor& w_EMN, const Tensor& offsets_E1,
                          const Tensor& d_x_RN) {
  if (context.measuring()) return;
  const std::int64_t experts = w_EMN.dim(0), m = w_EMN.dim(1), n = w_EMN.dim(2);
  const auto* offsets = offsets_E1.data<std::int32_t>();
  cpu::for_float_type(d_y_RM.dtype(), [&]<typename T>(T) {
    parallel_for(experts, [&](std::int64_t e) {
      std::vector<float> sum(n);
      for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
        std::fill(sum.begin(), sum.end(), 0.f);
        for (std::int64_t i = 0; i < m; ++i) {
          const T* w = w_EMN.data<T>() + (e * m + i) * n;
          const float d = load(cpu::row_of<T>(d_y_RM, r)[i]);
          for (std::int64_t j = 0; j < n; ++j) sum[j] += d * load(w[j]);
        }
        for (std::int64_t j = 0; j < n; ++j) store(cpu::row_of<T>(d_x_RN, r)[j], sum[j]);
      }
    });
  });
}
void grouped_linear_wgrad(const Context& context, const Tensor& d_y_RM, const Tensor& x_RN, const Tensor& offsets_E1,
                          const Tensor& d_w_EMN) {
  if (context.measuring()) return;
  const std::int64_t experts = d_w_EMN.dim(0), m = d_w_EMN.dim(1), n = d_w_EMN.dim(2);
  const auto* offsets = offsets_E1.data<std::int32_t>();
  cpu::for_float_type(d_y_RM.dtype(), [&]<typename T>(T) {
    parallel_for(experts, [&](std::int64_t e) {
      for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r)
        for (std::int64_t i = 0; i < m; ++i) {
          float* w = d_w_EMN.data<float>() + (e * m + i) * n;
          const float d = load(cpu::row_of<T>(d_y_RM, r)[i]);
          const T* x = cpu::row_of<T>(x_RN, r);
          for (std::int64_t j = 0; j < n; ++j) w[j] += d * load(x[j]);
        }
    });
  });
}

}  // namespace tessera
