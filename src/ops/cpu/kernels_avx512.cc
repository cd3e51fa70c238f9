// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "avx512"
#define TESSERA_KERNELS_TABLE kKernelsAvx512
#define TESSERA_KERNELS_SIMD "ops/cpu/simd_512.inc"
#define TESSERA_KERNELS_BFLOAT16 "ops/cpu/bfloat16.inc"
#define TESSERA_KERNELS_QUANTIZE "ops/cpu/quantize_avx512.inc"
#include "ops/cpu/kernels_impl.inc"
