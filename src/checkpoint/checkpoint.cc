#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/parse_number.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tessera-checkpoint";
constexpr int kVersion = 3;
constexpr std::uint64_t kMaxStep = std::uint64_t{1} << 48;
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartialSuffix = ".partial";
constexpr std::string_view kDeletedSuffix = ".deleted";

/// Returns the number of digits as a save writes them: without a sign and without a leading zero. People may have
/// folders with other numbers.
std::optional<std::int64_t> number_of(std::string_view digits) {
  const std::optional<std::int64_t> number = parse_number<std::int64_t>(digits);
  return number >= 0 && fmt::format("{}", *number) == digits ? number : std::nullopt;
}

/// Returns the step of a name "step-N".
std::optional<std::int64_t> step_of(std::string_view name) {
  return name.starts_with(kPrefix) ? number_of(name.substr(kPrefix.size())) : std::nullopt;
}

/// Returns whether a name is "step-N" and this suffix.
bool is_step_with(std::string_view name, std::string_view suffix) {
  return name.ends_with(suffix) && step_of(name.substr(0, name.size() - suffix.size()));
}

/// Returns whether a folder of this name is an unfinished save, unless a later attempt of the saver's run has begun it.
bool is_old_partial(std::string_view name, const Saver& saver) {
  const std::size_t at = name.find(kPartialSuffix);
  if (at == name.npos || !step_of(name.substr(0, at))) return false;
  const std::string_view owner = name.substr(at + kPartialSuffix.size());  // "", or "-RUN-ATTEMPT"
  if (owner.empty()) return true;
  const std::size_t dash = owner.rfind('-');
  if (!owner.starts_with('-') || dash == 0) return false;
  const std::optional<std::int64_t> attempt = number_of(owner.substr(dash + 1));
  // The saver's run holds the lock now, so another run's save is over.
  return attempt && (owner.substr(1, dash - 1) != saver.run || *attempt <= saver.attempt);
}

/// Returns the entries of a folder that are folders or links.
std::vector<fs::path> folders_in(const fs::path& path) {
  std::vector<fs::path> folders;
  for (const fs::directory_entry& entry : entries_of(path)) {
    std::error_code error;
    // A link counts even if its target is away for now: a checkpoint may be kept on other storage.
    if (entry.is_symlink(error) || entry.is_directory(error)) folders.push_back(entry.path());
    if (error && !is_missing(error.value())) {
      throw SystemError(fmt::format("look at '{}'", entry.path().string()), error.value());
    }
  }
  return folders;
}

/// Returns `path` or its folder "checkpoint" if that holds checkpoints, and otherwise all folders in it that do. Throws
/// Error if there are none, and names the folders that could not be read.
std::vector<fs::path> folders_of_checkpoints(const fs::path& path) {
  for (const fs::path& folder : {path, path / "checkpoint"}) {
    if (!steps_of_folders(folder).empty()) return {folder};
  }
  std::vector<fs::path> folders;
  std::string unreadable;
  for (const fs::path& folder : folders_in(path)) {
    try {
      if (!steps_of_folders(folder).empty()) folders.push_back(folder);
    } catch (const SystemError& error) {  // as for a lost+found, which only root may read
      unreadable += fmt::format("; {}", error.what());
    }
  }
  require(!folders.empty(),
          "'{}' is no checkpoint: expected a folder with {}, or one that holds {}N folders. A folder of Hugging Face "
          "files has a config.json{}",
          path.string(), kCheckpointManifestName, kPrefix, unreadable);
  std::ranges::sort(folders);
  return folders;
}

}  // namespace

fs::path checkpoint_path(const fs::path& folder, std::int64_t step) {
  return folder / fmt::format("{}{}", kPrefix, step);
}

fs::path find_checkpoint(const fs::path& path) {
  if (path_exists(path / kCheckpointManifestName)) return path;
  const std::vector<fs::path> folders = folders_of_checkpoints(path);
  require(folders.size() == 1, "'{}' and '{}' hold checkpoints: name one of these folders", folders.front().string(),
          folders.back().string());
  const fs::path& folder = folders.front();
  const fs::path newest = checkpoint_path(folder, steps_of_folders(folder).back());
  if (path_exists(newest / kCheckpointManifestName)) return newest;
  const std::vector<std::int64_t> others = checkpoint_steps(folder);
  fail("'{}' has no {}, so it is damaged; {}", newest.string(), kCheckpointManifestName,
       others.empty()
           ? "no other checkpoint is there"
           : fmt::format("name another one to use it: '{}'", checkpoint_path(folder, others.back()).string()));
}

CheckpointPart text_part(std::string name, std::string text) {
  return {.name = std::move(name), .write = [text = std::move(text)](const fs::path& path) {
            write_whole_file(path, text);
            return WrittenFile{.size = text.size(), .checksum = checksum(std::as_bytes(std::span(text)))};
          }};
}

fs::path partial_path(const fs::path& folder, std::int64_t step, const Saver& saver) {
  const fs::path path = checkpoint_path(folder, step).concat(kPartialSuffix);
  return saver.run.empty() ? path : fs::path(path).concat(fmt::format("-{}-{}", saver.run, saver.attempt));
}

void commit_checkpoint(const fs::path& folder, const CheckpointManifest& manifest, const Saver& saver) {
  const fs::path partial = partial_path(folder, manifest.step, saver);
  nlohmann::ordered_json json = {
      {"format", kFormat}, {"version", kVersion}, {"step", manifest.step}, {"num_shards", manifest.num_shards}};
  for (const auto& [name, written] : manifest.files) {
    json["files"][name] = {{"bytes", written.size}, {"xxh3_64", to_hex(written.checksum)}};
  }
  json["state"] = manifest.state;
  json[kChecksumField] = checksum_of_rest(json);
  write_whole_file(partial / kCheckpointManifestName, json_text(json, 2) + "\n");
  // The folder exists if a run that went on from an earlier step has saved this step before.
  replace_folder(partial, checkpoint_path(folder, manifest.step));
}

void discard_partial(const fs::path& folder, std::int64_t step, const Saver& saver) noexcept {
  std::error_code ignored;  // the failure that came before is the one to report
  fs::remove_all(partial_path(folder, step, saver), ignored);
}

void save_checkpoint(const fs::path& folder, const std::vector<CheckpointPart>& parts, CheckpointManifest manifest) {
  const fs::path partial = partial_path(folder, manifest.step, {});
  remove_tree(partial);
  create_folder(partial);
  try {
    for (const CheckpointPart& part : parts) manifest.files[part.name] = part.write(partial / part.name);
    commit_checkpoint(folder, manifest, {});
  } catch (...) {
    discard_partial(folder, manifest.step, {});
    throw;
  }
}

std::vector<std::int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<std::int64_t> steps = steps_of_folders(folder);
  std::erase_if(
      steps, [&](std::int64_t step) { return !path_exists(checkpoint_path(folder, step) / kCheckpointManifestName); });
  return steps;
}

std::vector<std::int64_t> steps_of_folders(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const fs::path& path : folders_in(folder)) {
    if (const auto step = step_of(path.filename().string())) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

void prune_checkpoints(const fs::path& folder, const Saver& saver, const CheckpointsToKeep& keep) {
  // A folder that cannot be deleted does no harm. Someone may be reading its files over NFS, or own it.
  const auto or_warn = [](auto&& remove) {
    try {
      remove();
    } catch (const Error& error) {
      spdlog::warn("{}: the next save tries again", error.what());
    }
  };
  for (const fs::path& path : folders_in(folder)) {
    // A replacement was cut short between two renames: the old checkpoint is the only one of its step.
    const fs::path original = fs::path(path).replace_extension();
    if (is_step_with(path.filename().string(), kReplacedSuffix) && !path_exists(original)) rename_path(path, original);
  }
  for (const fs::path& path : folders_in(folder)) {
    const std::string name = path.filename().string();
    if (is_old_partial(name, saver) || is_step_with(name, kReplacedSuffix) || is_step_with(name, kDeletedSuffix)) {
      or_warn([&] { remove_tree(path); });
    }
  }
  if (keep.newest <= 0) return;
  std::vector<std::int64_t> steps = steps_of_folders(folder);
  std::erase_if(steps, [&](std::int64_t step) {
    std::error_code unreadable;  // such a folder stays, and others are deleted all the same
    return keep.not_counted.contains(step) ||
           !fs::exists(checkpoint_path(folder, step) / kCheckpointManifestName, unreadable);
  });
  const auto surplus = static_cast<std::int64_t>(steps.size()) - keep.newest;
  for (std::int64_t i = 0; i < surplus; ++i) {
    // The folder is renamed first, so that a deletion that is cut short leaves nothing that looks like a checkpoint.
    const std::int64_t step = steps[static_cast<std::size_t>(i)];
    if (step == keep.last_saved) continue;  // a run that went back to an earlier step has just saved it
    const fs::path path = checkpoint_path(folder, step);
    const fs::path doomed = fs::path(path).concat(kDeletedSuffix);
    or_warn([&] {
      rename_path(path, doomed);
      remove_tree(doomed);
    });
  }
}

CheckpointManifest read_checkpoint_manifest(const fs::path& path) {
  const fs::path manifest_path = path / kCheckpointManifestName;
  require(path_exists(manifest_path), "'{}' has no {}", path.string(), kCheckpointManifestName);
  const std::string where = fmt::format("'{}'", manifest_path.string());
  const auto json = parse_json<nlohmann::ordered_json>(read_text_file(manifest_path), where);
  const JsonFields fields(json, where + ", $");
  const nlohmann::ordered_json &format = fields.at("format"), &version = fields.at("version");
  require(format == kFormat && version == kVersion, "{} has the format {} version {}, expected \"{}\" version {}",
          where, describe_json(format), describe_json(version), kFormat, kVersion);
  fields.require_checksum();
  CheckpointManifest manifest{.step = static_cast<std::int64_t>(fields.count("step", kMaxStep)),
                              .state = fields.at("state")};
  const JsonFields files(fields.at("files"), fields.place_of("files"));
  for (const auto& [name, json_file] : fields.at("files").items()) {
    require_plain_name(name, where);
    const JsonFields file(json_file, files.place_of(name.c_str()));
    manifest.files[name] = {.size = file.count("bytes"), .checksum = file.hex("xxh3_64")};
  }
  // Every shard has a file, so there cannot be more shards than files.
  manifest.num_shards = static_cast<std::int64_t>(fields.count("num_shards", manifest.files.size()));
  for (const std::string_view kind : {kModelShards, kOptimizerShards}) {
    const auto num_listed = std::count_if(manifest.files.begin(), manifest.files.end(),
                                          [&](const auto& file) { return is_shard_file_name(file.first, kind); });
    if (num_listed == 0 && kind == kOptimizerShards) continue;  // converted weights have none
    for (std::int64_t shard = 0; shard < std::max<std::int64_t>(manifest.num_shards, 1); ++shard) {
      const std::string name = shard_file_name(kind, shard, manifest.num_shards);
      require(manifest.files.contains(name), "{}: num_shards is {}, but its files have no '{}'", where,
              manifest.num_shards, name);
    }
    require(num_listed == manifest.num_shards, "{}: num_shards is {}, but its files have {} shards of the {}", where,
            manifest.num_shards, num_listed, kind);
  }
  return manifest;
}

namespace {

void verify_file(const fs::path& file_path, const WrittenFile& expected) {
  const FileSum actual = sum_file(file_path);
  require(expected.size == actual.size,
          "'{}' is {} bytes long, the manifest says {}: truncated or not of this checkpoint", file_path.string(),
          actual.size, expected.size);
  require(actual.checksum == expected.checksum,
          "'{}' has the checksum {:016x}, the manifest says {:016x}: the file is damaged", file_path.string(),
          actual.checksum, expected.checksum);
}

}  // namespace

void verify_files(const fs::path& path, const CheckpointManifest& manifest, std::string_view except,
                  const VerifyShare& share) {
  int next = 0;
  for (const auto& [name, expected] : manifest.files) {
    if (!except.empty() && is_shard_file_name(name, except)) continue;
    if (next++ % share.size == share.rank) verify_file(path / name, expected);
  }
}

CheckpointManifest verify_checkpoint(const fs::path& path, std::string_view except, const VerifyShare& share) {
  CheckpointManifest manifest = read_checkpoint_manifest(path);
  verify_files(path, manifest, except, share);
  return manifest;
}

}  // namespace tessera
