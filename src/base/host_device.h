// TESSERA_HOST_DEVICE marks functions that CPU code and GPU kernels share.
#pragma once

/// In host code these functions are always inlined. Some kernels are compiled for a newer processor than the rest of
/// the program. An out-of-line copy from them could be linked into the rest.
#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE [[gnu::always_inline]]
#endif
