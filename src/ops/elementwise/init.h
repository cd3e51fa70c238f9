// Initial values of parameters. Every number is a function of (seed, name, index) alone (tensor/philox.h). So it does
// not depend on which rank holds it.
#pragma once

#include "ops/runtime/context.h"
#include "tensor/philox.h"

namespace tessera {

/// Describes an initial distribution. It is a normal distribution conditioned on |x| <= bound, or the constant 1.
struct Init {
  float std = 0.0f;    // standard deviation; 0 means the constant 1
  float bound = 0.0f;  // bound of |x|; 0 means that there is none
};

/// Says how the flattened numbers of a parameter are drawn from two distributions in turn. The first `run` numbers come
/// from `first`, as many come from `second`, and so on.
struct InitPattern {
  Init first, second;
  std::int64_t run = 1;
};

/// Assigns to x_N (float32) the numbers of the parameter that start at index `begin`. On a GPU and on a CPU they may
/// differ in the last bit.
void draw_initial(const Context& context, const Philox& random, const InitPattern& pattern, std::int64_t begin,
                  const Tensor& x_N);

}  // namespace tessera
