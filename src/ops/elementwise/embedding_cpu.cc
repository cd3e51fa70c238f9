#include <cstring>

#include "ops/cpu/types.h"
#include "ops/elementwise/embedding.h"
#include "tensor/parallel.h"

namespace tessera::cpu {

void embedding_forward(const Context& context, const Tensor& tokens_T, const Tensor& table_VD, std::int64_t first_id,
                       const Tensor& x_TD) {
  const std::int64_t num_tokens = tokens_T.dim(0), dim = table_VD.dim(1);
  if (context.measuring()) return;
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * size_of(table_VD.dtype());
  parallel_ranges(num_tokens, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t row = tokens_T.data<std::int32_t>()[t] - first_id;
      void* x = x_TD.rows(t, t + 1).raw();
      if (0 <= row && row < table_VD.dim(0)) {
        std::memcpy(x, table_VD.rows(row, row + 1).raw(), row_bytes);
      } else {
        std::memset(x, 0, row_bytes);
      }
    }
  });
}

void embedding_backward(const Context& context, const Tensor& tokens_T, const Tensor& d_x_TD, std::int64_t first_id,
                        const Tensor& d_table_VD) {
  const std::int64_t num_tokens = tokens_T.dim(0), dim = d_table_VD.dim(1);
  if (context.measuring()) return;
  // A task owns columns, not tokens, because tokens repeat and columns do not.
  constexpr std::int64_t kColumnsPerTask = 64;
  for_float_type(d_x_TD.dtype(), [&]<typename T>(T) {
    parallel_ranges(dim, kColumnsPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const std::int64_t row = tokens_T.data<std::int32_t>()[t] - first_id;
        if (row < 0 || row >= d_table_VD.dim(0)) continue;
        const T* d_x = row_of<T>(d_x_TD, t);
        float* d_row = row_of<float>(d_table_VD, row);
        for (std::int64_t j = begin; j < end; ++j) d_row[j] += load(d_x[j]);
      }
    });
  });
}

}  // namespace tessera::cpu
