// cuBLASLt and cuDNN for the operators that use them. For sources that are built with CUDA only.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <unordered_map>

#include "ops/runtime/blas_gemm.h"
#include "ops/runtime/gemm_key.h"
#include "ops/runtime/runtime.h"

/// The function of cuBLASLt of this name, as its header declares it. The library is opened when the first is asked for,
/// so that a run on a CPU neither needs nor loads its half a gigabyte. Throws Error where it is not found.
#define TESSERA_BLAS_FUNCTION(name)                                                                     \
  ([] {                                                                                                 \
    static const auto found = reinterpret_cast<decltype(&::name)>(::tessera::cuda::blas_symbol(#name)); \
    return found;                                                                                       \
  }())

/// TESSERA_BLAS(cublasLtMatmul, operands...): calls it; throws InternalError naming call and status unless it succeeds.
#define TESSERA_BLAS(name, ...)                                                     \
  do {                                                                              \
    const cublasStatus_t tessera_status = TESSERA_BLAS_FUNCTION(name)(__VA_ARGS__); \
    TESSERA_CHECK(tessera_status == CUBLAS_STATUS_SUCCESS, "{}: {}", #name,         \
                  TESSERA_BLAS_FUNCTION(cublasLtGetStatusString)(tessera_status));  \
  } while (false)

namespace tessera::cuda {

void* blas_symbol(const char* name);

/// Scratch of every GEMM, from the operator's arena: what NVIDIA advises for Hopper.
inline constexpr std::size_t kBlasWorkspace = std::size_t{32} << 20;

/// What cublasLtMatmul is told besides operands.
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
  /// sm_target: SMs that products are to take, 0: all.
  Libraries(const Stream& stream, int sm_target);
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  cublasLtHandle_t blas() const { return blas_; }
  /// The library's choice for this product, asked for once. The addresses of scales are part of what it is told, and
  /// hold until the product is asked for again.
  const BlasPlan& plan_for(const GemmKey& key, const BlasScales& scales = {});
  /// cuDNN's attention (attention_library.h). Throws Error where there is no cuDNN.
  AttentionLibrary& attention();

 private:
  const Stream& stream_;
  int sm_target_;
  cublasLtHandle_t blas_ = nullptr;
  std::unordered_map<GemmKey, std::unique_ptr<const BlasPlan>, GemmKeyHash> plans_;
  std::unique_ptr<AttentionLibrary> attention_;
};

}  // namespace tessera::cuda
