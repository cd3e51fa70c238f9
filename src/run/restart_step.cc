#include "run/restart_step.h"

#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/checkpoint.h"

namespace tessera {

RestartStep::RestartStep(std::filesystem::path folder, std::int64_t load_step)
    : folder_(std::move(folder)), load_step_(load_step), left_behind_(later_manifests()) {}

std::int64_t RestartStep::next() const {
  std::int64_t saved = load_step_, left_behind = -1;
  for (const auto& [step, manifest] : later_manifests()) {
    const auto before = left_behind_.find(step);
    const bool is_saved = before == left_behind_.end() || before->second != manifest;
    (is_saved ? saved : left_behind) = step;
  }
  return left_behind > saved ? saved : -1;
}

std::map<std::int64_t, std::string> RestartStep::later_manifests() const {
  std::map<std::int64_t, std::string> manifests;
  for (const std::int64_t step : steps_of_folders(folder_)) {
    if (step <= load_step_) continue;
    const std::filesystem::path path = checkpoint_path(folder_, step) / kCheckpointManifestName;
    manifests[step] = path_exists(path) ? read_text_file(path) : "";
  }
  return manifests;
}

}  // namespace tessera
