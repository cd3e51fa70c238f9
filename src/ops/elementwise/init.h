// What parameters start from. Every number is a function of (seed, name, index) alone (tensor/philox.h), so that it
// does not depend on who has it.
#pragma once

#include "ops/runtime/context.h"
#include "tensor/philox.h"

namespace tessera {

/// Initial distribution: normal, conditioned on |x| <= bound; or the constant 1.
struct Init {
  float std = 0.0f;    // 0: all ones
  float bound = 0.0f;  // absolute; 0: none
};

/// How the flattened numbers of a parameter are drawn from two distributions in turn: `run` numbers from the first, as
/// many from the second, and so on.
struct InitPattern {
  Init first, second;
  std::int64_t run = 1;
};

/// x_N (float32) = the parameter's numbers from `begin` on. A GPU's may differ from a CPU's in the last bit.
void draw_initial(const Context& context, const Philox& random, const InitPattern& pattern, std::int64_t begin,
                  const Tensor& x_N);

}  // namespace tessera
