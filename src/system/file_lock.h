// A lock between programs. Two programs that write to one folder would destroy each other's files.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace tessera {

/// Holds an exclusive lock on a file, which it creates if necessary. The file says who holds the lock. The lock ends
/// with the object or with the program, however the program ends.
class FileLock {
 public:
  /// Says what the destructor does with the file. The file of a killed program stays, but locks nothing.
  enum class AtEnd { kKeepFile, kRemoveFile };

  struct Options {
    AtEnd at_end = AtEnd::kKeepFile;
    /// Says what this program does, for other programs' messages: "run 4711, attempt 1". The file names its process,
    /// too.
    std::string owner = {};
    /// Returns whether to take the lock over from a holder that still runs. `owner` is the holder's Options::owner. If
    /// it is null, the lock is never taken over. The constructor passes on what it throws.
    std::function<bool(const std::string& owner)> takes_over = {};
  };

  /// Locks the file. It does not wait. Throws Error ("`what` is in use") if another object of this or another program
  /// holds the lock, and SystemError if the system refuses. It only warns if the file system has no locks.
  FileLock(std::filesystem::path path, const std::string& what) : FileLock(std::move(path), what, Options{}) {}
  FileLock(std::filesystem::path path, const std::string& what, const Options& options);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  /// Returns false once another program has taken the lock over or someone has deleted the file. Throws SystemError if
  /// the system cannot tell, as when storage fails.
  bool is_held() const;

 private:
  enum class Outcome { kLocked, kHeldByOther, kNoLocks };
  Outcome lock(const std::string& what, const Options& options);
  Outcome try_lock();
  /// Opens the file that has the path now.
  void reopen();
  /// Replaces the file that someone else has locked with a new one that this object has locked. Returns false if yet
  /// another program has replaced that file first.
  bool replace_file();

  std::filesystem::path path_;
  AtEnd at_end_;
  int descriptor_ = -1;
};

}  // namespace tessera
