// Records what the GPU did and when. CUPTI, the profiling library of CUDA's toolkit, measures it.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "system/trace.h"
#include "tensor/step_record.h"

namespace tessera::cuda {

/// Describes a run of a kernel, a copy or a fill on the GPU. Times are nanoseconds of TraceRecorder::Clock.
struct KernelRun {
  std::string name;  // demangled, without parameters
  std::int64_t begin = 0, end = 0;
  std::int64_t region = -1;  // the ProfiledRegion in which it was launched; -1: none
};

/// While this object exists, a KernelProfile records `region` for what this thread launches. Regions do not nest.
class ProfiledRegion {
 public:
  explicit ProfiledRegion(std::int64_t region);
  ~ProfiledRegion();
  ProfiledRegion(const ProfiledRegion&) = delete;
  ProfiledRegion& operator=(const ProfiledRegion&) = delete;

 private:
  [[maybe_unused]] bool is_noted_ = false;  // unused in a build without CUDA
};

/// Records what the GPU runs from its construction to finish(). Nodes of graphs are recorded one by one, and belong to
/// no region. Only one profile may exist at a time. Launches are a little slower while it records.
class KernelProfile {
 public:
  /// Throws Error if there is no CUPTI, or no CUDA in this build.
  KernelProfile();
  ~KernelProfile();
  KernelProfile(const KernelProfile&) = delete;
  KernelProfile& operator=(const KernelProfile&) = delete;

  /// Ends the recording and returns all runs, ordered by their begin. The GPU must be idle.
  std::vector<KernelRun> finish();

 private:
  void stop();

  std::int64_t offset_ = 0;  // difference from CUPTI's clock to ours
};

/// Adds the runs to a trace, as events of the GPU.
void add_to_trace(std::span<const KernelRun> runs, TraceRecorder& trace);

/// Adds each run's duration to the operator of `record` whose index is its region. Returns the total seconds of the
/// runs without a region, leaving out those before the first run that has one.
double add_to_record(std::span<const KernelRun> runs, StepRecord& record);

/// Sums up the runs of all kernels of one name.
struct KernelTime {
  std::string name;
  std::size_t num_runs = 0;
  std::int64_t nanoseconds = 0;
  std::int64_t idle_before = 0;  // nanoseconds in which nothing ran before one of these runs began
};

struct KernelSummary {
  std::vector<KernelTime> kernels;  // in descending order of nanoseconds
  std::int64_t span = 0;            // nanoseconds from the first begin to the last end
  std::int64_t busy = 0;            // nanoseconds of the span in which something ran
};

/// Summarizes runs, which must be ordered by their begin.
KernelSummary summarize(std::span<const KernelRun> runs);

}  // namespace tessera::cuda
