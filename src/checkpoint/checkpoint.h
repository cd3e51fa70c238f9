// Checkpoints: folders `step-N` with safetensors files and a manifest that says their sizes and checksums.
// docs/checkpoints.md describes the layout. A checkpoint is written as `step-N.partial` and renamed when all of it is
// on the disk, so that what is called `step-N` is whole, whatever happens while saving.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

/// Files of a checkpoint.
inline constexpr const char* kModelFileName = "model.safetensors";
inline constexpr const char* kOptimizerFileName = "optimizer.safetensors";

struct CheckpointFile {
  std::string name;  // one of these
  std::vector<NamedTensor> tensors;
};

/// A file of a checkpoint, and how it is written to a path.
struct CheckpointPart {
  std::string name;
  std::function<WrittenFile(const std::filesystem::path&)> write;
};
CheckpointPart tensors_part(CheckpointFile file);
CheckpointPart text_part(std::string name, std::string text);

/// Writes `folder`/step-`step`. `state`: whatever the trainer needs besides files. Throws Error (disk full, ...);
/// then the checkpoints that were there are as they were.
void save_checkpoint(const std::filesystem::path& folder, std::int64_t step, const std::vector<CheckpointPart>& parts,
                     const nlohmann::json& state);

/// Deletes all but the newest `keep` checkpoints and that of step `last_saved`, and what an interrupted save or
/// deletion left. 0 keeps all.
void prune_checkpoints(const std::filesystem::path& folder, std::int64_t keep, std::int64_t last_saved = -1);

/// Steps of the checkpoints in `folder`, rising; empty if there is no such folder.
std::vector<std::int64_t> checkpoint_steps(const std::filesystem::path& folder);

std::filesystem::path checkpoint_path(const std::filesystem::path& folder, std::int64_t step);

/// The checkpoint that a person means by `path`: itself, or the newest one in it, or in its folder "checkpoint". Throws
/// Error if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

/// The manifest's `state`, after checking that every file (but `except`, which the caller does not read) has the
/// manifest's size and checksum. Throws Error.
nlohmann::json verify_checkpoint(const std::filesystem::path& path, std::string_view except = {});

/// Reads the tensors of a verified checkpoint; names, dtypes and shapes must be the same. Throws Error.
void load_checkpoint(const std::filesystem::path& path, const std::vector<CheckpointFile>& files);

}  // namespace tessera
