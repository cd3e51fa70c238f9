// What the control groups of a job or of a container leave to this process, of a machine's memory and of its cores.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace tessera {

/// What holds for a process: the least of the limits of its control groups and of those that they are within. None
/// where no group has a limit.
struct GroupLimits {
  std::optional<std::size_t> memory_bytes;
  std::optional<double> cores;  // of processor time: 1.5 is a core and a half
};

/// The limits of this process.
GroupLimits control_group_limits();
/// The same for a file like /proc/self/cgroup, with the hierarchies (versions 2 and 1) mounted at `root`.
GroupLimits control_group_limits(const std::filesystem::path& groups, const std::filesystem::path& root);

}  // namespace tessera
