// The kernels for one instruction set. CMakeLists.txt gives this file its flags.
#define TESSERA_KERNELS_NAME "portable"
#define TESSERA_KERNELS_TABLE kKernelsPortable
#include "ops/cpu/kernels_impl.inc"
