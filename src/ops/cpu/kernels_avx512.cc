// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "avx512"
#define TESSERA_KERNELS_TABLE kKernelsAvx512
#include "ops/cpu/kernels_impl.inc"
