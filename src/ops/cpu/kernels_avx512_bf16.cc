// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "avx512_bf16"
#define TESSERA_KERNELS_TABLE kKernelsAvx512Bf16
#define TESSERA_KERNELS_SIMD "ops/cpu/simd_512.inc"
#define TESSERA_KERNELS_BFLOAT16 "ops/cpu/bfloat16_avx512.inc"
#define TESSERA_KERNELS_QUANTIZE "ops/cpu/quantize_avx512.inc"
#include "ops/cpu/kernels_impl.inc"
