// Runs the grouped GEMM's tasks; for the operators that are made of it.
#pragma once

#include "ops/context.h"
#include "ops/cpu/kernels.h"

namespace tessera::cpu {

/// The product that `kind` says, of operands named as in GroupedGemm; sizes follow from theirs. offsets_E1 as in
/// ops/grouped_gemm.h. The operands' shapes are the caller's to check.
void run_grouped_gemm(const Context& context, GroupedGemm::Kind kind, const Tensor& x_or_dy, const Tensor& w_or_x,
                      const Tensor& offsets_E1, const Tensor& out);

}  // namespace tessera::cpu
