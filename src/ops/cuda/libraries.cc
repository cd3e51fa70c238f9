#include "ops/cuda/libraries.h"

#include "base/error.h"

namespace tessera::cuda {

Runtime::Libraries::Libraries(const Stream&) {
  const cublasStatus_t status = cublasLtCreate(&blas_);
  require(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt cannot start: {}", cublasLtGetStatusString(status));
}

Runtime::Libraries::~Libraries() { cublasLtDestroy(blas_); }

}  // namespace tessera::cuda
