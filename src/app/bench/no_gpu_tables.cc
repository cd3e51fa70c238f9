#include "app/bench/gpu_tables.h"
#include "base/error.h"
#include "device/cuda.h"

// Replaces gpu_tables_*.cc in a build without CUDA.
namespace tessera {

void print_gpu_table(GpuTable, const GpuTableOptions&) { fail("no GPU: {}", cuda::why_unavailable()); }

}  // namespace tessera
