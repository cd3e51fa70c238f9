#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kFormat = "tessera-checkpoint";
constexpr int kVersion = 1;
constexpr std::string_view kPrefix = "step-";

std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return step;
}

template <typename Call>
void change_files(const char* action, const fs::path& path, Call&& call) {
  std::error_code error;
  call(error);
  require(!error, "cannot {} '{}': {}", action, path.string(), error.message());
}

void remove_folder(const fs::path& path) {
  change_files("delete", path, [&](std::error_code& error) { fs::remove_all(path, error); });
}

void rename_folder(const fs::path& from, const fs::path& to) {
  change_files("rename", from, [&](std::error_code& error) { fs::rename(from, to, error); });
}

}  // namespace

fs::path checkpoint_path(const fs::path& folder, std::int64_t step) {
  return folder / fmt::format("{}{}", kPrefix, step);
}

fs::path find_checkpoint(const fs::path& path) {
  std::error_code unreadable;
  if (fs::exists(path / kManifest, unreadable)) return path;
  for (const fs::path& folder : {path, path / "checkpoint"}) {
    const std::vector<std::int64_t> steps = checkpoint_steps(folder);
    if (!steps.empty()) return checkpoint_path(folder, steps.back());
  }
  fail("'{}' is no checkpoint: expected a folder with {}, or one that holds {}N folders", path.string(), kManifest,
       kPrefix);
}

CheckpointPart tensors_part(CheckpointFile file) {
  std::string name = file.name;
  return {.name = std::move(name), .write = [file = std::move(file)](const fs::path& path) {
            return write_safetensors(path, file.tensors, {{"format", "pt"}});
          }};
}

CheckpointPart text_part(std::string name, std::string text) {
  return {.name = std::move(name), .write = [text = std::move(text)](const fs::path& path) {
            AtomicFile file(path);
            file.write(text);
            file.commit();
            return WrittenFile{.size = text.size(), .checksum = checksum(std::as_bytes(std::span(text)))};
          }};
}

void save_checkpoint(const fs::path& folder, std::int64_t step, const std::vector<CheckpointPart>& parts,
                     const nlohmann::json& state) {
  const fs::path path = checkpoint_path(folder, step), partial = path.string() + ".partial";
  remove_folder(partial);
  create_folder(partial);
  try {
    nlohmann::ordered_json manifest = {{"format", kFormat}, {"version", kVersion}, {"step", step}};
    for (const CheckpointPart& part : parts) {
      const WrittenFile written = part.write(partial / part.name);
      manifest["files"][part.name] = {{"bytes", written.size}, {"xxh3_64", fmt::format("{:016x}", written.checksum)}};
    }
    manifest["state"] = state;
    AtomicFile manifest_file(partial / kManifest);
    // Text from the command line may be anything; JSON is UTF-8.
    manifest_file.write(manifest.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    manifest_file.commit();
  } catch (...) {
    std::error_code ignored;  // the first failure is the one to tell
    fs::remove_all(partial, ignored);
    throw;
  }
  replace_folder(partial,
                 path);  // there is one if the step was saved before, by a run that went on from an earlier step
}

std::vector<std::int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const auto step = step_of(entry.path().filename().string());
    std::error_code unreadable;  // not a checkpoint either
    if (step && fs::exists(entry.path() / kManifest, unreadable)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void prune_checkpoints(const fs::path& folder, std::int64_t keep, std::int64_t last_saved) {
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    // Cut short between two renames: the old checkpoint is the only one of its step.
    const fs::path path = entry.path(), original = fs::path(path).replace_extension();
    if (path.extension() == kReplacedSuffix && step_of(original.filename().string()) && !fs::exists(original)) {
      rename_folder(path, original);
    }
  }
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    if (name.ends_with(".partial") || name.ends_with(kReplacedSuffix) || name.ends_with(".deleted")) {
      remove_folder(entry.path());
    }
  }
  if (keep <= 0) return;
  const std::vector<std::int64_t> steps = checkpoint_steps(folder);
  const auto surplus = static_cast<std::int64_t>(steps.size()) - keep;
  for (std::int64_t i = 0; i < surplus; ++i) {
    // Renamed first, so that a deletion cut short leaves nothing that looks like a checkpoint.
    const std::int64_t step = steps[static_cast<std::size_t>(i)];
    if (step == last_saved) continue;  // of a run that went back to an earlier step
    const fs::path path = checkpoint_path(folder, step);
    const fs::path doomed = path.string() + ".deleted";
    rename_folder(path, doomed);
    remove_folder(doomed);
  }
}

nlohmann::json verify_checkpoint(const fs::path& path, std::string_view except) {
  const fs::path manifest_path = path / kManifest;
  try {
    const auto manifest = parse_json(read_text_file(manifest_path), fmt::format("'{}'", manifest_path.string()));
    require(manifest.at("format") == kFormat && manifest.at("version") == kVersion,
            "'{}' has the format {} version {}, expected \"{}\" version {}", manifest_path.string(),
            manifest.at("format").dump(), manifest.at("version").dump(), kFormat, kVersion);
    const auto& listed = manifest.at("files");
    require(listed.is_object(), "'{}': \"files\" is no JSON object", manifest_path.string());
    for (const auto& [name, expected] : listed.items()) {
      require_plain_name(name, fmt::format("'{}'", manifest_path.string()));
      const auto& expected_bytes = expected.at("bytes");
      require(expected_bytes.is_number_unsigned(), "'{}': \"bytes\" of '{}' is no whole number", manifest_path.string(),
              name);
      const auto bytes = expected_bytes.get<std::uint64_t>();
      if (name == except) continue;
      const MappedFile file(path / name);
      require(bytes == file.bytes().size(),
              "'{}' is {} bytes long, the manifest says {}: truncated or not of this checkpoint",
              (path / name).string(), file.bytes().size(), bytes);
      const std::string actual = fmt::format("{:016x}", checksum(file.bytes()));
      const auto saved = expected.at("xxh3_64").get<std::string>();
      require(
          actual == saved,
          "'{}' has the checksum {}, the manifest says {}: the file is damaged; resume from another checkpoint with "
          "--checkpoint.load_step",
          (path / name).string(), actual, saved);
    }
    return manifest.at("state");
  } catch (const nlohmann::json::exception& error) {
    fail("'{}' is no manifest of a checkpoint: {}", manifest_path.string(), error.what());
  }
}

void load_checkpoint(const fs::path& path, const std::vector<CheckpointFile>& files) {
  for (const CheckpointFile& expected : files) {
    const SafetensorsFile file(path / expected.name);
    require(file.entries().size() == expected.tensors.size(), "'{}' holds {} tensors, this model has {}",
            (path / expected.name).string(), file.entries().size(), expected.tensors.size());
    for (const NamedTensor& named : expected.tensors) file.read(named.name, named.tensor);
  }
}

}  // namespace tessera
