// What the GPU did and when, measured by CUPTI, the profiling library of CUDA's toolkit.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "system/trace.h"

namespace tessera::cuda {

/// A kernel, a copy or a fill on the GPU; times in nanoseconds of TraceRecorder::Clock.
struct KernelRun {
  std::string name;  // demangled, without parameters
  std::int64_t begin = 0, end = 0;
};

/// Records what the GPU runs from its construction to finish(), the nodes of graphs one by one. One at a time.
/// Launches become a little slower meanwhile.
class KernelProfile {
 public:
  /// Throws Error where there is no CUPTI, or no CUDA in this build.
  KernelProfile();
  ~KernelProfile();
  KernelProfile(const KernelProfile&) = delete;
  KernelProfile& operator=(const KernelProfile&) = delete;

  /// Ends it: all that ran, by begin. The GPU must be idle.
  std::vector<KernelRun> finish();

 private:
  void stop();

  std::int64_t offset_ = 0;  // from CUPTI's clock to ours
};

/// Adds the runs to a trace, as the GPU's.
void add_to_trace(std::span<const KernelRun> runs, TraceRecorder& trace);

/// The runs of all kernels of one name.
struct KernelTime {
  std::string name;
  std::size_t num_runs = 0;
  std::int64_t nanoseconds = 0;
  std::int64_t idle_before = 0;  // nanoseconds in which nothing ran until one of these did
};

struct KernelSummary {
  std::vector<KernelTime> kernels;  // longest first
  std::int64_t span = 0;            // nanoseconds from the first begin to the last end
  std::int64_t busy = 0;            // of them, those in which something ran
};

/// `runs` by begin.
KernelSummary summarize(std::span<const KernelRun> runs);

}  // namespace tessera::cuda
