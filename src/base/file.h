// Files: whole-file reads, read-only memory maps, and files that appear complete or not at all.
// Every failure throws Error with the path and the system's reason. If storage is full or broken, the error's status is
// ExitStatus::kStorageFailed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

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

std::string read_text_file(const std::filesystem::path& path);

/// Maps a whole file into memory, read-only. The map shows what other processes write into the file after it was
/// mapped. An empty file maps to an empty span.
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

/// Writes a file under a temporary name beside `path`. `commit` flushes it to the disk (fsync) and renames it to
/// `path`, so `path` is always the old file or the whole new one. Without `commit` the destructor removes the temporary
/// file.
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

/// Writes a file with this content through AtomicFile, so that it appears complete or not at all. Throws Error.
void write_whole_file(const std::filesystem::path& path, std::string_view content);

/// Makes the names in `directory` durable by an fsync of the directory.
void sync_directory(const std::filesystem::path& directory);

/// Creates a folder and every missing folder above it.
void create_folder(const std::filesystem::path& folder);

/// The suffix of the old folder's name while replace_folder works on a file system that cannot exchange two names.
inline constexpr const char* kReplacedSuffix = ".replaced";

/// Renames the folder `whole` to `target`, durably, and removes the folder that had that name, if there was one. If it
/// throws Error, `target` is unchanged.
void replace_folder(const std::filesystem::path& whole, const std::filesystem::path& target);

template <typename T>
std::span<const std::byte> as_bytes_of(const T& object) {
  return std::as_bytes(std::span<const T, 1>(&object, 1));
}

}  // namespace tessera
