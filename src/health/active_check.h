// Checks that put load on a node, for a Prolog or an idle node: does it multiply right, bit for bit, and as fast as its
// peers? A few seconds each, on all GPUs at the same time.
#pragma once

#include "health/probe.h"
#include "tensor/tensor.h"

namespace tessera {

struct ActiveCheckOptions {
  Device device = Device::kCpu;
  double seconds = 1.0;  // that a check measures at least
  /// What the node's peers reach; a node below kSlow of it is bad. 0: not compared.
  double expected_gemm_tflops = 0.0, expected_copy_gb_per_s = 0.0;
};
inline constexpr double kSlow = 0.8;
inline constexpr const char *kGemmRateName = "gemm_tflops", *kCopyRateName = "copy_gb_per_second";

/// - `gemmWrong`: a product of bfloat16 matrices of small whole numbers, whose sums are exact in float32 in any order,
///   differs from the numbers that whole-number arithmetic gives.
/// - `gemmSlow`: its rate.
/// - `copySlow`: the rate of a copy within the memory, of bytes read and written.
/// Every GPU is checked, and all findings are hard evidence. The measurements kGemmRateName and kCopyRateName are those
/// of the slowest GPU. Throws Error if there is no such device.
ProbeResult run_active_checks(const ActiveCheckOptions& options);

}  // namespace tessera
