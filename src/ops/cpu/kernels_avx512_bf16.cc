// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "avx512_bf16"
#define TESSERA_KERNELS_TABLE kKernelsAvx512Bf16
#include "ops/cpu/kernels_impl.inc"
