// Functions that CPUs and GPUs share.
#pragma once

/// On the host always inlined, because kernels that are compiled for a newer processor than the program may use these
/// functions without leaving a copy for the rest of the program.
#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE [[gnu::always_inline]]
#endif
