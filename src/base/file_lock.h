// A lock between programs: two that write to one folder would destroy each other's files.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Holds an exclusive lock on a file, which is made if it is missing and says which process holds the lock. The lock
/// ends with the object, or with the program, however that ends.
class FileLock {
 public:
  enum class AtEnd { kKeepFile, kRemoveFile };  // of the object; the file of a killed program stays, and locks nothing

  /// Does not wait. Throws Error if another object, of this program or of another, holds the lock: "`what` is in use".
  FileLock(std::filesystem::path path, const std::string& what, AtEnd at_end = AtEnd::kKeepFile);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  std::filesystem::path path_;
  AtEnd at_end_;
  int descriptor_ = -1;
};

}  // namespace tessera
