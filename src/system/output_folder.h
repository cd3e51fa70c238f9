// Writes a folder that appears only when it is complete, such as a dataset or a folder of Hugging Face files.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "system/file_lock.h"

namespace tessera {

/// Describes a kind of output folder and the files it consists of. A folder that holds any other file is never
/// replaced.
struct OutputKind {
  const char* name;         // "a dataset"
  std::string_view marker;  // the file that is written last
  bool (*is_part)(const std::filesystem::path& name);
};

/// Throws Error unless `output` may be written. It may not exist, be an empty folder, or, with `overwrite`, be a folder
/// of this kind. Call it before long work. OutputFolder::commit checks again.
void check_output(const std::filesystem::path& output, const OutputKind& kind, bool overwrite);

/// Owns the folder "OUTPUT.tmp". `commit` renames it to `output`. Otherwise the destructor removes it. The constructor
/// removes what a killed program left under that name. It also ends a replacement of `output` that was cut short
/// (replace_folder): "OUTPUT.replaced" gets its name back if `output` is missing, and is deleted otherwise. While the
/// object lives, "OUTPUT.tmp.lock" keeps other writers out.
class OutputFolder {
 public:
  /// Throws Error if check_output does, or if another writer holds the lock; the message then names its process.
  OutputFolder(const std::filesystem::path& output, const OutputKind& kind, bool overwrite);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Call it once. Throws Error if check_output does. The complete folder then stays, and the message says where.
  void commit();

 private:
  std::filesystem::path output_;
  std::optional<FileLock> lock_;
  std::filesystem::path path_;  // empty after commit
  OutputKind kind_;
  bool overwrite_;
};

}  // namespace tessera
