// Names of the files that a run leaves in its folder.
#pragma once

namespace tessera {

inline constexpr const char* kRunInfoName = "run.json";       // what the run is (run/record/run_info.h)
inline constexpr const char* kMetricsName = "metrics.jsonl";  // what it did (docs/metrics.md)
/// The loads of a logged step, which is up to 30 s older than the last one (run/record/expert_loads.h).
inline constexpr const char* kExpertLoadsName = "expert_loads.json";
inline constexpr const char* kRunLockName = "run.lock";  // locked while a program trains there

}  // namespace tessera
