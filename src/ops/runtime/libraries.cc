#include "ops/runtime/libraries.h"

#include "base/error.h"
#include "ops/runtime/attention_library.h"
#include "system/optional_library.h"

namespace tessera::cuda {

void* blas_symbol(const char* name) {
  static const OptionalLibrary library("cuBLASLt", fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR));
  return library.symbol(name);
}

namespace {

cudaDataType_t library_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat8E4M3:
      return CUDA_R_8F_E4M3;
    default:
      break;
  }
  TESSERA_CHECK(false, "no product of {}", name_of(dtype));
}

/// Describes a matrix [rows, columns] to the library, which stores matrices by columns.
cublasLtMatrixLayout_t transposed_layout(std::int64_t rows, std::int64_t columns, std::int64_t stride, DType dtype) {
  cublasLtMatrixLayout_t layout = nullptr;
  TESSERA_BLAS(cublasLtMatrixLayoutCreate, &layout, library_type(dtype), static_cast<std::uint64_t>(columns),
               static_cast<std::uint64_t>(rows), std::max(stride, columns));
  return layout;
}

void set_batch(cublasLtMatrixLayout_t layout, std::int64_t count, std::int64_t step) {
  const auto matrices = static_cast<std::int32_t>(count);
  TESSERA_BLAS(cublasLtMatrixLayoutSetAttribute, layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices,
               sizeof matrices);
  TESSERA_BLAS(cublasLtMatrixLayoutSetAttribute, layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
               sizeof step);
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  TESSERA_BLAS(cublasLtMatmulDescSetAttribute, operation, attribute, &value, sizeof value);
}

/// Sets the scales of the operands. The library's a is our b.
void set_scales(cublasLtMatmulDesc_t operation, const BlasScales& scales) {
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(scales.b.raw()));
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(scales.a.raw()));
}

}  // namespace

BlasPlan::~BlasPlan() {
  if (operation != nullptr) TESSERA_BLAS_FUNCTION(cublasLtMatmulDescDestroy)(operation);
  for (const cublasLtMatrixLayout_t layout : {a, b, c}) {
    if (layout != nullptr) TESSERA_BLAS_FUNCTION(cublasLtMatrixLayoutDestroy)(layout);
  }
}

Runtime::Libraries::Libraries(const Stream& stream, int sm_target) : stream_(stream), sm_target_(sm_target) {
  const cublasStatus_t status = TESSERA_BLAS_FUNCTION(cublasLtCreate)(&blas_);
  require(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt cannot start: {}",
          TESSERA_BLAS_FUNCTION(cublasLtGetStatusString)(status));
}

Runtime::Libraries::~Libraries() { TESSERA_BLAS_FUNCTION(cublasLtDestroy)(blas_); }

const BlasPlan& Runtime::Libraries::plan_for(const GemmKey& key, const BlasScales& scales) {
  const bool is_block_scaled = key.dtype == DType::kFloat8E4M3;
  if (const auto found = plans_.find(key); found != plans_.end()) {
    if (is_block_scaled) set_scales(found->second->operation, scales);
    return *found->second;
  }
  auto made = std::make_unique<BlasPlan>();
  BlasPlan& plan = *made;
  // Float32 stays float32, because this compute type does not use tf32. Bfloat16 is summed in float32.
  TESSERA_BLAS(cublasLtMatmulDescCreate, &plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (sm_target_ != 0) set(plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm_target_);
  if (is_block_scaled) {
    set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
    set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
    set_scales(plan.operation, scales);
  }
  plan.a = key.transpose_a ? transposed_layout(key.k, key.m, key.stride_a, key.dtype)
                           : transposed_layout(key.m, key.k, key.stride_a, key.dtype);
  plan.b = key.transpose_b ? transposed_layout(key.n, key.k, key.stride_b, key.dtype)
                           : transposed_layout(key.k, key.n, key.stride_b, key.dtype);
  plan.c = transposed_layout(key.m, key.n, key.stride_c, key.dtype_c);
  if (key.batch.count > 1) {
    set_batch(plan.a, key.batch.count, key.batch.step_a);
    set_batch(plan.b, key.batch.count, key.batch.step_b);
    set_batch(plan.c, key.batch.count, key.batch.step_c);
  }

  cublasLtMatmulPreference_t preference = nullptr;
  TESSERA_BLAS(cublasLtMatmulPreferenceCreate, &preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    TESSERA_BLAS(cublasLtMatmulPreferenceSetAttribute, preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kBlasWorkspace);
  // The library's a is our b.
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment_b);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment_a);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignment_c);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignment_c);
  cublasLtMatmulHeuristicResult_t best = {};
  int num_found = 0;
  const cublasStatus_t status = TESSERA_BLAS_FUNCTION(cublasLtMatmulAlgoGetHeuristic)(
      blas_, plan.operation, plan.b, plan.a, plan.c, plan.c, preference, 1, &best, &num_found);
  TESSERA_BLAS_FUNCTION(cublasLtMatmulPreferenceDestroy)(preference);
  TESSERA_CHECK(status == CUBLAS_STATUS_SUCCESS && num_found > 0,
                "cuBLASLt has no kernel for {} x {} x {} in {}, c {}, strides {} {} {}: {}", key.m, key.n, key.k,
                name_of(key.dtype), name_of(key.dtype_c), key.stride_a, key.stride_b, key.stride_c,
                TESSERA_BLAS_FUNCTION(cublasLtGetStatusString)(status));
  plan.algorithm = best.algo;
  return *plans_.emplace(key, std::move(made)).first->second;
}

AttentionLibrary& Runtime::Libraries::attention() {
  if (attention_ == nullptr) attention_ = std::make_unique<AttentionLibrary>(stream_);
  return *attention_;
}

}  // namespace tessera::cuda
