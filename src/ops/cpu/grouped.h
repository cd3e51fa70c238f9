// Runs the grouped GEMM's tasks; for the operators that are made of it.
#pragma once

#include "ops/context.h"
#include "ops/cpu/kernels.h"

namespace tessera::cpu {

/// `args.offsets` is filled in. `columns`: of the output. offsets_E1 as in ops/grouped_gemm.h.
void run_grouped_gemm(const Context& context, GroupedGemm args, DType dtype, std::int64_t columns,
                      const Tensor& offsets_E1);

}  // namespace tessera::cpu
