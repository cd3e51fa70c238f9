#include "ops/elementwise/init_number.h"
#include "tensor/parallel.h"

namespace tessera::cpu {

void draw_initial(const Context& context, const Philox& random, const InitPattern& pattern, std::int64_t begin,
                  const Tensor& x_N) {
  if (context.measuring()) return;
  constexpr std::int64_t kGrain = 1 << 14;
  float* x = x_N.data<float>();
  parallel_ranges(x_N.num_elements(), kGrain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) x[i] = initial_number(random, pattern, begin + i);
  });
}

}  // namespace tessera::cpu
