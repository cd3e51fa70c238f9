// `tessera bench gemm|grouped|attention|quantize|operators`: what operators take on this process's GPU, a row per
// operator and shape, beside the most that the same GPU did in the same run.
#pragma once

#include <string>

namespace tessera {

enum class GpuTable { kGemm, kGrouped, kAttention, kQuantize, kOperators };

struct GpuTableOptions {
  std::string filter;  // rows whose names have this part only
  std::string json;    // the rows also go to this file, as lines of JSON; empty: to none
};

/// Prints the table. Throws Error where there is no GPU, also in a build without CUDA.
void print_gpu_table(GpuTable table, const GpuTableOptions& options);

}  // namespace tessera
