#include "ops/elementwise/init.h"

#include "ops/kit/checks.h"
#include "ops/runtime/backends.h"

namespace tessera {

TESSERA_BACKENDS(draw_initial)

void draw_initial(const Context& context, const Philox& random, const InitPattern& pattern, std::int64_t begin,
                  const Tensor& x_N) {
  TESSERA_CHECK_TENSOR(x_N, DType::kFloat32, {x_N.num_elements()});
  TESSERA_CHECK(pattern.run > 0 && begin >= 0, "{} {}", pattern.run, begin);
  TESSERA_RUN(draw_initial, context, random, pattern, begin, x_N);
}

}  // namespace tessera
