// Checkpoints: folders `step-N` with safetensors files and a manifest that says their sizes and checksums.
// docs/checkpoints.md describes the layout. A checkpoint is written under another name (partial_path) and renamed when
// all of it is on the disk, so that what is called `step-N` is whole, whatever happens while saving.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/shards.h"

namespace tessera {

/// What manifest.json says. `files` has all shards of the model and, but for converted weights, of the optimizer.
struct CheckpointManifest {
  std::int64_t step = 0;
  std::int64_t num_shards = 1;  // of each kind
  std::map<std::string, WrittenFile> files = {};
  nlohmann::json state = nlohmann::json::object();  // whatever the trainer needs besides files
};

/// A file of a checkpoint, and how it is written to a path.
struct CheckpointPart {
  std::string name;
  std::function<WrittenFile(const std::filesystem::path&)> write;
};
CheckpointPart text_part(std::string name, std::string text);

/// The attempt of a run that saves. Each one writes into partial folders of its own, so a process of an earlier attempt
/// that wakes up late changes no file that a later attempt commits.
struct Saver {
  std::string run = {};  // its id; empty: the program is no run
  std::int64_t attempt = 0;
};

// A save: files into the folder partial_path(), by as many processes as there are; then one of them commits, or
// discards.

/// `folder`/step-`step`.partial-`run`-`attempt`, or step-`step`.partial without a run.
std::filesystem::path partial_path(const std::filesystem::path& folder, std::int64_t step, const Saver& saver);
/// Writes the manifest into the partial folder, beside the files that it lists, and renames that folder to step-N.
/// Throws Error; then the checkpoints that were there are unchanged.
void commit_checkpoint(const std::filesystem::path& folder, const CheckpointManifest& manifest, const Saver& saver);
/// Removes what is there of a save that failed.
void discard_partial(const std::filesystem::path& folder, std::int64_t step, const Saver& saver) noexcept;

/// The whole save by one process; it fills in the manifest's `files`. Throws Error (disk full, ...); then the
/// checkpoints that were there are as they were.
void save_checkpoint(const std::filesystem::path& folder, const std::vector<CheckpointPart>& parts,
                     CheckpointManifest manifest);

/// Deletes all but the newest `keep` checkpoints and that of step `last_saved`, and what an interrupted save or
/// deletion left. 0 keeps all. Partial folders of later attempts of the saver's run stay.
void prune_checkpoints(const std::filesystem::path& folder, const Saver& saver, std::int64_t keep,
                       std::int64_t last_saved = -1);

/// Steps of the checkpoints in `folder`, rising; empty if there is no such folder.
std::vector<std::int64_t> checkpoint_steps(const std::filesystem::path& folder);
/// The same with folders that have lost their manifest.
std::vector<std::int64_t> steps_of_folders(const std::filesystem::path& folder);

std::filesystem::path checkpoint_path(const std::filesystem::path& folder, std::int64_t step);

/// The checkpoint that a person means by `path`: itself, or the newest one in it, or in its folder "checkpoint". Throws
/// Error if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

/// Reads manifest.json. Throws Error, also if it does not list the shards that it should.
CheckpointManifest read_checkpoint_manifest(const std::filesystem::path& path);

/// Which files one of several processes verifies, so that together they verify all.
struct VerifyShare {
  int rank = 0, size = 1;
};

/// Throws Error unless the files have the sizes and the checksums that the manifest says. Shards of the kind `except`,
/// which the caller does not read, are left out.
void verify_files(const std::filesystem::path& path, const CheckpointManifest& manifest, std::string_view except = {},
                  const VerifyShare& share = {});

/// Reads the manifest and verifies files as above.
CheckpointManifest verify_checkpoint(const std::filesystem::path& path, std::string_view except = {},
                                     const VerifyShare& share = {});

}  // namespace tessera
