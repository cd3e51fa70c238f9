// Files: whole-file reads, read-only memory maps, and files that appear complete or not at all.
// Every failure throws Error with the path. If the system is the reason, it is a SystemError. If storage is full or
// broken, the error's status is ExitStatus::kStorageFailed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace tessera {

/// Returns the 64-bit XXH3 hash of `bytes` (xxHash 0.8). Every binary file that Tessera writes has this checksum.
std::uint64_t checksum(std::span<const std::byte> bytes);

/// Computes XXH3 over bytes that arrive in pieces. The value equals `checksum` of the pieces joined.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  void* state_;
};

/// Returns whether an error code of the system says that there is no such file, or no such folder above it.
bool is_missing(int reason);

/// Is thrown if the system refuses a call on a file, for the reason of this error code. The message is "cannot `what`"
/// and the reason's text.
class SystemError : public Error {
 public:
  SystemError(const std::string& what, int reason);
  int reason() const { return reason_; }

 private:
  int reason_;
};

std::string read_text_file(const std::filesystem::path& path);

/// Maps a whole file into memory, read-only. The map shows what other processes write into the file after it was
/// mapped. An empty file maps to an empty span. The constructor throws SystemError if the file cannot be mapped, and
/// Error if it is not a regular file. If storage fails later, the system ends the process (SIGBUS).
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

struct FileSum {
  std::uint64_t size = 0;  // in bytes
  std::uint64_t checksum = 0;
};

/// Returns the size and the checksum of a file. It reads the file in pieces. Throws SystemError if it cannot be read,
/// and Error if it is not a regular file.
FileSum sum_file(const std::filesystem::path& path);

/// Writes a file under a temporary name beside `path`, which no other file or writer has. `commit` flushes it to the
/// disk (fsync) and renames it to `path`, so `path` is always the old file or the whole new one. Without `commit` the
/// destructor removes the temporary file. A symbolic link stays: the file that it leads to is written, even if that is
/// not there yet. Throws SystemError if the system refuses, and Error if `path` is something other than a file.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  /// Overwrites bytes already written, e.g. a header whose numbers are known only at the end.
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  std::uint64_t size() const { return size_; }
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Returns the name of the file that a temporary file of AtomicFile was to become. A killed program leaves such files.
/// Returns any other name unchanged.
std::filesystem::path name_without_temporary(const std::filesystem::path& name);

/// Writes a file with this content through AtomicFile, so that it appears complete or not at all. Throws Error.
void write_whole_file(const std::filesystem::path& path, std::string_view content);

/// Takes the storage of a file's first `num_bytes` bytes, so that a later store to a map of them finds room: on a full
/// tmpfs it would raise a signal. Returns the system's error code, or 0.
int reserve_storage(int descriptor, std::size_t num_bytes);

/// Makes the names in `directory` durable by an fsync of the directory.
void sync_directory(const std::filesystem::path& directory);

/// Creates a folder and every missing folder above it, and makes their names durable.
void create_folder(const std::filesystem::path& folder);

/// Returns whether `path` names something. Throws Error if the system cannot tell.
bool path_exists(const std::filesystem::path& path);

/// Returns the entries of a folder, in any order. Returns none if there is no such folder.
std::vector<std::filesystem::directory_entry> entries_of(const std::filesystem::path& folder);

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);

/// Deletes a file, or a folder with all that is in it, if it is there.
void remove_tree(const std::filesystem::path& path);

/// The suffix of the old folder's name while replace_folder works on a file system that cannot exchange two names.
inline constexpr const char* kReplacedSuffix = ".replaced";

/// Renames the folder `whole` to `target`, durably, and removes the folder that had that name, if there was one. It
/// warns if it cannot remove that one. If it throws Error, `target` is unchanged, unless only the flush of the new name
/// failed.
void replace_folder(const std::filesystem::path& whole, const std::filesystem::path& target);

template <typename T>
std::span<const std::byte> as_bytes_of(const T& object) {
  return std::as_bytes(std::span<const T, 1>(&object, 1));
}

}  // namespace tessera
