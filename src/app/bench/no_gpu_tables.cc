#include "app/bench/gpu_tables.h"
#include "base/error.h"
#include "device/cuda.h"

// What a build without CUDA has in place of gpu_tables_*.cc.
namespace tessera {

void print_gpu_table(GpuTable, const GpuTableOptions&) { fail("no GPU: {}", cuda::why_unavailable()); }

}  // namespace tessera
