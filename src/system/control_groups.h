// Reads how much of a machine's memory and cores the control groups of a job or a container allow this process.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace tessera {

/// Holds the lowest limits among a process's control groups and all groups above them. A limit is not set if no group
/// has it.
struct GroupLimits {
  std::optional<std::size_t> memory_bytes;
  std::optional<double> cores;  // processor time: 1.5 is one and a half cores
};

/// Returns the limits of this process.
GroupLimits control_group_limits();
/// Returns the limits that a file like /proc/self/cgroup leads to. `root` is where the hierarchies (versions 2 and 1)
/// are mounted.
GroupLimits control_group_limits(const std::filesystem::path& groups, const std::filesystem::path& root);

}  // namespace tessera
