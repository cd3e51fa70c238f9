// cuBLASLt and cuDNN for the operators that use them. For sources that are built with CUDA only.
#pragma once

#include <cublasLt.h>

#include "ops/cuda/runtime.h"

namespace tessera::cuda {

class Runtime::Libraries {
 public:
  explicit Libraries(const Stream& stream);
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  cublasLtHandle_t blas() const { return blas_; }

 private:
  cublasLtHandle_t blas_ = nullptr;
};

}  // namespace tessera::cuda
