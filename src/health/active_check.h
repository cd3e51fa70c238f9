// Active checks put load on a node, for a Prolog or an idle node. They check that it multiplies right, bit for bit, and
// as fast as its peers. Each takes a few seconds, on all GPUs at the same time.
#pragma once

#include <functional>

#include "health/probe.h"
#include "tensor/tensor.h"

namespace tessera {

struct ActiveCheckOptions {
  Device device = Device::kCpu;
  int num_gpus = 0;      // GPUs that CUDA should be able to use, if the device is kCuda
  double seconds = 1.0;  // least time that a check measures
  /// The rates that the node's peers reach. A node below kSlow of them is bad. 0 means that it is not compared.
  double expected_gemm_tflops = 0.0, expected_copy_gb_per_s = 0.0;
  std::function<void(const Tensor& product)> after_product = {};  // tests delay and damage products here
};
inline constexpr double kSlow = 0.8;
inline constexpr const char *kGemmRateName = "gemm_tflops", *kCopyRateName = "copy_gb_per_second";

/// Runs the checks. Its findings are:
/// - `gemmWrong`: a product of bfloat16 matrices of small whole numbers, whose sums are exact in float32 in any order,
///   differs from the result of integer arithmetic.
/// - `gemmSlow`: the rate of this product is too low.
/// - `copySlow`: the rate of a copy within the memory, in bytes read and written, is too low.
/// - `gpuFailed`: CUDA has failed on a GPU.
/// - `gpuMissing`: CUDA can use fewer GPUs than `num_gpus`. Those that it can use are checked all the same.
/// It checks every GPU, and all findings are hard evidence. The measurements kGemmRateName and kCopyRateName are those
/// of the slowest GPU. There are none if CUDA can use no GPU. Throws Error if `num_gpus` is 0 and there is no GPU, or
/// if others use so much of a GPU's memory that too little is left.
ProbeResult run_active_checks(const ActiveCheckOptions& options);

/// Runs `check` for the GPUs 0 to num_gpus - 1 at the same time. Returns all findings, and the least value of each
/// measurement. If a check throws InternalError, as CUDA's errors do, the finding is `gpuFailed`. Throws other errors.
ProbeResult check_gpus(int num_gpus, const std::function<ProbeResult(int gpu)>& check);

}  // namespace tessera
