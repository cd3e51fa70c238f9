// `tessera bench gemm|grouped|attention|quantize|operators` times operators on this process's GPU. It prints a row per
// operator and shape, beside the most that the same GPU reached in the same run.
#pragma once

#include <string>

namespace tessera {

enum class GpuTable { kGemm, kGrouped, kAttention, kQuantize, kOperators };

struct GpuTableOptions {
  std::string filter;  // only rows whose names contain this text
  std::string json;    // file that also gets the rows, as lines of JSON; empty: none
};

/// Prints the table. Throws Error if there is no GPU, and in a build without CUDA.
void print_gpu_table(GpuTable table, const GpuTableOptions& options);

}  // namespace tessera
