// cuBLASLt and cuDNN, for the operators that use them. Only sources that are built with CUDA may include this header.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <unordered_map>

#include "ops/runtime/blas_gemm.h"
#include "ops/runtime/gemm_key.h"
#include "ops/runtime/runtime.h"

/// Returns the function of cuBLASLt with this name, with the type that its header declares. The first use opens the
/// library. So a run on a CPU neither needs nor loads its half a gigabyte. Throws Error if it is not found.
#define TESSERA_BLAS_FUNCTION(name)                                                                     \
  ([] {                                                                                                 \
    static const auto found = reinterpret_cast<decltype(&::name)>(::tessera::cuda::blas_symbol(#name)); \
    return found;                                                                                       \
  }())

/// TESSERA_BLAS(cublasLtMatmul, operands...) calls the function. If it fails, it throws InternalError, which names the
/// call and the status.
#define TESSERA_BLAS(name, ...)                                                     \
  do {                                                                              \
    const cublasStatus_t tessera_status = TESSERA_BLAS_FUNCTION(name)(__VA_ARGS__); \
    TESSERA_CHECK(tessera_status == CUBLAS_STATUS_SUCCESS, "{}: {}", #name,         \
                  TESSERA_BLAS_FUNCTION(cublasLtGetStatusString)(tessera_status));  \
  } while (false)

namespace tessera::cuda {

void* blas_symbol(const char* name);

/// Bytes of scratch memory of every GEMM, from the operator's arena. NVIDIA recommends this size for Hopper.
inline constexpr std::size_t kBlasWorkspace = std::size_t{32} << 20;

/// Holds what cublasLtMatmul needs besides the operands.
struct BlasPlan {
  BlasPlan() = default;
  ~BlasPlan();
  BlasPlan(const BlasPlan&) = delete;
  BlasPlan& operator=(const BlasPlan&) = delete;

  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

class AttentionLibrary;

class Runtime::Libraries {
 public:
  /// sm_target is the number of SMs that products should use. 0 means all.
  Libraries(const Stream& stream, int sm_target);
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  cublasLtHandle_t blas() const { return blas_; }
  /// Returns the library's choice of a kernel for this product. The library is asked once per key. A plan includes the
  /// addresses of the scales. They stay in effect until the next call with the same key.
  const BlasPlan& plan_for(const GemmKey& key, const BlasScales& scales = {});
  /// Returns cuDNN's attention (attention_library.h). Throws Error if there is no cuDNN.
  AttentionLibrary& attention();

 private:
  const Stream& stream_;
  int sm_target_;
  cublasLtHandle_t blas_ = nullptr;
  std::unordered_map<GemmKey, std::unique_ptr<const BlasPlan>, GemmKeyHash> plans_;
  std::unique_ptr<AttentionLibrary> attention_;
};

}  // namespace tessera::cuda
