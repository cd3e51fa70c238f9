// Says where the attempts after a launch's first one resume, if a person has asked for checkpoint.load_step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>

namespace tessera {

/// What a launch with checkpoint.load_step has found when it began. launch.json has it for the run's next launcher.
struct LaunchBegin {
  std::int64_t load_step = 0;
  std::map<std::int64_t, std::uint64_t> left_behind = {};  // checksums of later checkpoints' manifests, by step

  bool operator==(const LaunchBegin&) const = default;
};

/// A launch that is given checkpoint.load_step begins there. Its restarts go on from what it has saved since, and not
/// from checkpoints of later steps that it has left behind. `folder` is that of the run's checkpoints.
class RestartStep {
 public:
  /// Notes the later checkpoints. Must be constructed before the first attempt saves. Throws Error if `folder` cannot
  /// be read.
  RestartStep(std::filesystem::path folder, std::int64_t load_step);
  /// Goes on with a launch that began so.
  RestartStep(std::filesystem::path folder, LaunchBegin begin);

  const LaunchBegin& begin() const { return begin_; }

  /// Returns checkpoint.load_step for a restart: the newest step that the launch has saved, or `load_step` if it has
  /// saved none. It is -1, which also takes copies in memory, unless later checkpoints that were left behind are still
  /// there. Throws Error if `folder` cannot be read.
  std::int64_t next() const;

 private:
  /// Returns the checksums of the manifests of checkpoints later than `step`. A step that is saved again gets another
  /// one, unless it has the same content.
  std::map<std::int64_t, std::uint64_t> manifests_behind(std::int64_t step) const;

  std::filesystem::path folder_;
  LaunchBegin begin_;
};

}  // namespace tessera
