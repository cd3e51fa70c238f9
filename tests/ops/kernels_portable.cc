// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "portable"
#define TESSERA_KERNELS_TABLE kKernelsPortable
#define TESSERA_KERNELS_SIMD "ops/cpu/simd_256.inc"
#define TESSERA_KERNELS_BFLOAT16 "ops/cpu/bfloat16.inc"
#include "ops/cpu/kernels_impl.inc"
