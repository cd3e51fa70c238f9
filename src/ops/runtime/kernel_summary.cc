#include <algorithm>
#include <map>

#include "ops/runtime/kernel_profile.h"

namespace tessera::cuda {

KernelSummary summarize(std::span<const KernelRun> runs) {
  KernelSummary summary;
  std::map<std::string, KernelTime> by_name;
  std::int64_t end = runs.empty() ? 0 : runs.front().begin;
  for (const KernelRun& run : runs) {
    KernelTime& time = by_name[run.name];
    time.name = run.name;
    ++time.num_runs;
    time.nanoseconds += run.end - run.begin;
    time.idle_before += std::max<std::int64_t>(0, run.begin - end);
    summary.busy += std::max<std::int64_t>(0, run.end - std::max(run.begin, end));  // without overlaps
    end = std::max(end, run.end);
  }
  if (!runs.empty()) summary.span = end - runs.front().begin;
  for (auto& [name, time] : by_name) summary.kernels.push_back(std::move(time));
  std::ranges::stable_sort(summary.kernels, std::ranges::greater(), &KernelTime::nanoseconds);
  return summary;
}

void add_to_trace(std::span<const KernelRun> runs, TraceRecorder& trace) {
  using Clock = TraceRecorder::Clock;
  const auto at = [](std::int64_t nanoseconds) { return Clock::time_point(std::chrono::nanoseconds(nanoseconds)); };
  for (const KernelRun& run : runs) trace.record_on_gpu(run.name, at(run.begin), at(run.end));
}

}  // namespace tessera::cuda
