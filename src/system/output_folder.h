// A folder that appears when it is whole: a dataset, a folder of Hugging Face files.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "system/file_lock.h"

namespace tessera {

/// What a kind of folder consists of. It guards what is removed: a folder that holds anything else is never replaced.
struct OutputKind {
  const char* name;         // "a dataset"
  std::string_view marker;  // the file that is written last
  bool (*is_part)(const std::filesystem::path& name);
};

/// Throws Error unless `output` may be written: there is nothing, or an empty folder, or, with `overwrite`, a folder of
/// this kind. For asking before a long way there; OutputFolder asks again.
void check_output(const std::filesystem::path& output, const OutputKind& kind, bool overwrite);

/// "OUTPUT.tmp": becomes `output` on commit, or disappears. What a killed run left under that name is removed. While
/// the object lives, "OUTPUT.tmp.lock" keeps other writers away: their constructor throws Error, which names the
/// process.
class OutputFolder {
 public:
  OutputFolder(const std::filesystem::path& output, const OutputKind& kind);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void commit(bool overwrite);

 private:
  std::filesystem::path output_;
  std::optional<FileLock> lock_;
  std::filesystem::path path_;  // empty once it is committed
  OutputKind kind_;
};

}  // namespace tessera
