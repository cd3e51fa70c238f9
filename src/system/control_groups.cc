#include "system/control_groups.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Lowers `limit` to `found` if it is higher or not set.
template <typename Number>
void lower(std::optional<Number>& limit, Number found) {
  limit = limit ? std::min(*limit, found) : found;
}

/// Returns the first number of a file. Returns 0 if the file sets no limit ("max", -1) or does not exist.
double number_in(const fs::path& path) {
  double number = 0.0;
  return std::ifstream(path) >> number ? std::max(number, 0.0) : 0.0;
}

void lower_memory(GroupLimits& limits, const fs::path& file) {
  constexpr double kNoLimit = 0x1p62;  // version 1 writes the last page below 2^63 if there is no limit
  const double bytes = number_in(file);
  if (bytes > 0.0 && bytes < kNoLimit) lower(limits.memory_bytes, static_cast<std::size_t>(bytes));
}

/// Lowers the limit of cores to `quota` of every `period`; both are in microseconds.
void lower_cores(GroupLimits& limits, double quota, double period) {
  if (quota > 0.0 && period > 0.0) lower(limits.cores, quota / period);
}

}  // namespace

GroupLimits control_group_limits() { return control_group_limits("/proc/self/cgroup", "/sys/fs/cgroup"); }

GroupLimits control_group_limits(const fs::path& groups, const fs::path& root) {
  GroupLimits limits;
  std::ifstream file(groups);  // each line is number:controllers:path
  for (std::string line; std::getline(file, line);) {
    const std::size_t name = line.find(':'), path = line.find(':', name + 1);
    if (name == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = "," + line.substr(name + 1, path - name - 1) + ",";
    const auto has = [&](const std::string& controller) {
      return controllers.find("," + controller + ",") != std::string::npos;
    };
    const bool is_version_2 = controllers == ",,", is_memory = has("memory"), is_processor = has("cpu");
    if (!is_version_2 && !is_memory && !is_processor) continue;
    for (fs::path group = line.substr(path + 1);; group = group.parent_path()) {
      if (is_version_2) {
        const fs::path folder = root / group.relative_path();
        lower_memory(limits, folder / "memory.max");
        double quota = 0.0, period = 0.0;  // "max" does not parse as a number, so it sets no limit
        if (std::ifstream(folder / "cpu.max") >> quota >> period) lower_cores(limits, quota, period);
      }
      if (is_memory) lower_memory(limits, root / "memory" / group.relative_path() / "memory.limit_in_bytes");
      if (is_processor) {
        const fs::path folder = root / "cpu" / group.relative_path();
        lower_cores(limits, number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us"));
      }
      if (!group.has_relative_path()) break;
    }
  }
  return limits;
}

}  // namespace tessera
