// Checkpoints: folders `step-N` with safetensors files and a manifest of their sizes and checksums. docs/checkpoints.md
// describes the layout. A checkpoint is written under another name (partial_path) and renamed when all of it is on the
// disk. So a folder called `step-N` is complete, whatever happens while saving.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/shards.h"

namespace tessera {

inline constexpr const char* kCheckpointManifestName = "manifest.json";

/// Holds the content of manifest.json. `files` lists all shards of the model and of the optimizer. Converted weights
/// have no optimizer shards.
struct CheckpointManifest {
  std::int64_t step = 0;
  std::int64_t num_shards = 1;  // number of shards of each kind
  std::map<std::string, WrittenFile> files = {};
  nlohmann::json state = nlohmann::json::object();  // what the trainer needs besides the files
};

/// Names a file of a checkpoint, and the function that writes it to a path.
struct CheckpointPart {
  std::string name;
  std::function<WrittenFile(const std::filesystem::path&)> write;
};
/// Returns a part that writes this text.
CheckpointPart text_part(std::string name, std::string text);

/// Identifies the attempt of a run that saves. Each attempt writes into partial folders of its own. A process of an
/// earlier attempt that wakes up late therefore changes no file that a later attempt commits.
struct Saver {
  std::string run = {};  // the run's id; empty: the program belongs to no run
  std::int64_t attempt = 0;
};

// To save a checkpoint, any number of processes write files into the folder partial_path(). Then one of them commits or
// discards it.

/// Returns `folder`/step-`step`.partial-`run`-`attempt`, or step-`step`.partial if there is no run.
std::filesystem::path partial_path(const std::filesystem::path& folder, std::int64_t step, const Saver& saver);
/// Writes the manifest into the partial folder, beside the files that it lists, and renames that folder to step-N. If
/// it throws Error, the existing checkpoints are unchanged.
void commit_checkpoint(const std::filesystem::path& folder, const CheckpointManifest& manifest, const Saver& saver);
/// Removes what a failed save has left.
void discard_partial(const std::filesystem::path& folder, std::int64_t step, const Saver& saver) noexcept;

/// Saves a whole checkpoint from one process, and fills in the manifest's `files`. If it throws Error (disk full, ...),
/// the existing checkpoints are unchanged.
void save_checkpoint(const std::filesystem::path& folder, const std::vector<CheckpointPart>& parts,
                     CheckpointManifest manifest);

/// Names the checkpoints that prune_checkpoints keeps.
struct CheckpointsToKeep {
  std::int64_t newest = 0;       // number of the newest ones; 0: all
  std::int64_t last_saved = -1;  // the checkpoint of this step as well
  /// Steps that are not counted as newest, and stay: of damaged ones, and of those that the run has left behind by
  /// going back to an earlier step.
  std::set<std::int64_t> not_counted = {};
};

/// Deletes the checkpoints that `keep` does not name. It also deletes what an interrupted save or deletion left, except
/// partial folders of later attempts of the saver's run.
void prune_checkpoints(const std::filesystem::path& folder, const Saver& saver, const CheckpointsToKeep& keep = {});

/// Returns the steps of the checkpoints in `folder`, ascending. Returns none if there is no such folder.
std::vector<std::int64_t> checkpoint_steps(const std::filesystem::path& folder);
/// Returns the steps of all folders that are named like checkpoints, even if they have lost their manifest.
std::vector<std::int64_t> steps_of_folders(const std::filesystem::path& folder);

/// Returns the folder of the checkpoint of a step: `folder`/step-N.
std::filesystem::path checkpoint_path(const std::filesystem::path& folder, std::int64_t step);

/// Returns the checkpoint that a person means by `path`: `path` itself, the newest checkpoint in it, or the newest one
/// in its folder "checkpoint", or else in the only folder in it that holds checkpoints (checkpoint.folder of a run).
/// Throws Error if there is none, if several folders hold some, or if the newest one has lost its manifest. Passes over
/// other folders in `path` that cannot be read.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

/// Reads manifest.json. Throws Error if it is damaged, or if it does not list the shards that it should.
CheckpointManifest read_checkpoint_manifest(const std::filesystem::path& path);

/// Says which part of the files one of several processes verifies. Together they verify all files.
struct VerifyShare {
  int rank = 0, size = 1;
};

/// Throws Error unless the files have the sizes and the checksums in the manifest, and SystemError if a file cannot be
/// read. It skips shards of the kind `except`, which the caller does not read.
void verify_files(const std::filesystem::path& path, const CheckpointManifest& manifest, std::string_view except = {},
                  const VerifyShare& share = {});

/// Reads the manifest and verifies files as verify_files does.
CheckpointManifest verify_checkpoint(const std::filesystem::path& path, std::string_view except = {},
                                     const VerifyShare& share = {});

}  // namespace tessera
