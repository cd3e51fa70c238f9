#include "run/restart_step.h"

#include <span>
#include <string>
#include <utility>

#include "base/file.h"
#include "checkpoint/checkpoint.h"

namespace tessera {

RestartStep::RestartStep(std::filesystem::path folder, std::int64_t load_step) : folder_(std::move(folder)) {
  begin_ = {.load_step = load_step, .left_behind = manifests_behind(load_step)};
}

RestartStep::RestartStep(std::filesystem::path folder, LaunchBegin begin)
    : folder_(std::move(folder)), begin_(std::move(begin)) {}

std::int64_t RestartStep::next() const {
  std::int64_t saved = begin_.load_step, left_behind = -1;
  for (const auto& [step, manifest] : manifests_behind(begin_.load_step)) {
    const auto before = begin_.left_behind.find(step);
    const bool is_saved = before == begin_.left_behind.end() || before->second != manifest;
    (is_saved ? saved : left_behind) = step;
  }
  return left_behind > saved ? saved : -1;
}

std::map<std::int64_t, std::uint64_t> RestartStep::manifests_behind(std::int64_t step) const {
  std::map<std::int64_t, std::uint64_t> manifests;
  for (const std::int64_t later : steps_of_folders(folder_)) {
    if (later <= step) continue;
    const std::filesystem::path path = checkpoint_path(folder_, later) / kCheckpointManifestName;
    const std::string text = path_exists(path) ? read_text_file(path) : "";
    manifests[later] = checksum(std::as_bytes(std::span(text)));
  }
  return manifests;
}

}  // namespace tessera
