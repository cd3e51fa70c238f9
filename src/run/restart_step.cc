#include "run/restart_step.h"

#include <span>
#include <string>

#include "base/file.h"
#include "checkpoint/checkpoint.h"

namespace tessera {
namespace {

/// Returns the checksums of the manifests of checkpoints later than `step`. A step that is saved again gets another
/// one, unless it has the same content.
std::map<std::int64_t, std::uint64_t> manifests_behind(const std::filesystem::path& folder, std::int64_t step) {
  std::map<std::int64_t, std::uint64_t> manifests;
  for (const std::int64_t later : steps_of_folders(folder)) {
    if (later <= step) continue;
    const std::filesystem::path path = checkpoint_path(folder, later) / kCheckpointManifestName;
    const std::string text = path_exists(path) ? read_text_file(path) : "";
    manifests[later] = checksum(std::as_bytes(std::span(text)));
  }
  return manifests;
}

}  // namespace

LaunchBegin begin_of_launch(const std::filesystem::path& folder, std::int64_t load_step) {
  return {.load_step = load_step, .left_behind = manifests_behind(folder, load_step)};
}

std::int64_t restart_step(const std::filesystem::path& folder, const LaunchBegin& begin) {
  std::int64_t saved = begin.load_step, left_behind = -1;
  for (const auto& [step, manifest] : manifests_behind(folder, begin.load_step)) {
    const auto before = begin.left_behind.find(step);
    const bool is_saved = before == begin.left_behind.end() || before->second != manifest;
    (is_saved ? saved : left_behind) = step;
  }
  const bool may_have_copies_behind = saved == begin.load_step && !begin.has_trained;
  return left_behind > saved || may_have_copies_behind ? saved : -1;
}

}  // namespace tessera
