// Says where the attempts after a launch's first one resume, if a person has asked for checkpoint.load_step. The launch
// begins there. Its restarts go on from what it has saved since, and not from checkpoints of later steps that it has
// left behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>

namespace tessera {

/// What a launch with checkpoint.load_step has found when it began. launch.json has it for the run's next launcher.
struct LaunchBegin {
  std::int64_t load_step = 0;
  std::map<std::int64_t, std::uint64_t> left_behind = {};  // checksums of later checkpoints' manifests, by step
  bool has_trained = false;                                // a step has begun since

  bool operator==(const LaunchBegin&) const = default;
};

/// Notes the later checkpoints in `folder`, which is that of the run's checkpoints. Must be called before the first
/// attempt saves. Throws Error if `folder` cannot be read.
LaunchBegin begin_of_launch(const std::filesystem::path& folder, std::int64_t load_step);

/// Returns checkpoint.load_step for a restart of a launch that began so. Without later checkpoints that were left
/// behind, it is -1, which also takes copies in memory. With them, it is the newest step that the launch has saved. It
/// is the launch's own load_step if the launch has saved none, or has not trained: until the first step, there may be
/// copies in memory that an earlier launch has left behind. Throws Error if `folder` cannot be read.
std::int64_t restart_step(const std::filesystem::path& folder, const LaunchBegin& begin);

}  // namespace tessera
