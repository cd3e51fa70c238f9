// A lock between programs: two that write to one folder would destroy each other's files.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Holds an exclusive lock on a file, which is made if it is missing and stays. The lock ends with the object, or with
/// the program, however that ends.
class FileLock {
 public:
  /// Does not wait. Throws Error if another object, of this program or of another, holds the lock: "`what` is in use".
  FileLock(const std::filesystem::path& path, const std::string& what);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace tessera
