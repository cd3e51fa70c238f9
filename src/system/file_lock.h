// A lock between programs: two that write to one folder would destroy each other's files.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace tessera {

/// Holds an exclusive lock on a file, which is created if it is missing and says who holds the lock. The lock ends with
/// the object, or with the program, however that ends.
class FileLock {
 public:
  enum class AtEnd { kKeepFile, kRemoveFile };  // of the object; the file of a killed program stays, and locks nothing

  struct Options {
    AtEnd at_end = AtEnd::kKeepFile;
    /// What the program that holds the lock does, for messages: "run 4711, attempt 1". Its process is added.
    std::string owner = {};
    /// Whether to take the lock from a holder that is still there, given what it has as `owner`. Null: never. What it
    /// throws, the constructor throws.
    std::function<bool(const std::string& owner)> takes_over = {};
  };

  /// Does not wait. Throws Error if another object, of this program or of another, holds the lock: "`what` is in use".
  FileLock(std::filesystem::path path, const std::string& what) : FileLock(std::move(path), what, Options{}) {}
  FileLock(std::filesystem::path path, const std::string& what, const Options& options);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  /// False once another program has taken the lock over, or someone has deleted the file.
  bool is_held() const;

 private:
  enum class Outcome { kLocked, kHeldByOther, kNoLocks };
  Outcome try_lock();
  /// Puts a file that this object has locked in the place of the one that someone else holds.
  void replace_file();

  std::filesystem::path path_;
  AtEnd at_end_;
  int descriptor_ = -1;
};

}  // namespace tessera
