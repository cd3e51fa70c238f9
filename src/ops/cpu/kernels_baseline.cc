// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "baseline"
#define TESSERA_KERNELS_TABLE kKernelsBaseline
#include "ops/cpu/kernels_impl.inc"
