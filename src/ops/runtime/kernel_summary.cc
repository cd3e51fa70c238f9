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

double add_to_record(std::span<const KernelRun> runs, StepRecord& record) {
  constexpr double kNanosecond = 1e-9;
  double others = 0.0;
  bool has_begun = false;
  for (const KernelRun& run : runs) {
    const double seconds = static_cast<double>(run.end - run.begin) * kNanosecond;
    has_begun |= run.region >= 0;
    if (run.region >= 0) {
      record.add_seconds(static_cast<std::size_t>(run.region), seconds);
    } else if (has_begun) {
      others += seconds;
    }
  }
  return others;
}

void add_to_trace(std::span<const KernelRun> runs, TraceRecorder& trace) {
  using Clock = TraceRecorder::Clock;
  const auto at = [](std::int64_t nanoseconds) { return Clock::time_point(std::chrono::nanoseconds(nanoseconds)); };
  for (const KernelRun& run : runs) trace.record_on_gpu(run.name, at(run.begin), at(run.end));
}

}  // namespace tessera::cuda
