// Files: whole-file reads, read-only memory maps, and files that appear complete or not at all.
// Every failure is an Error with the path and the system's reason; where storage is full or broken, the program ends
// with ExitStatus::kStorageFailed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The 64-bit XXH3 hash of `bytes` (xxHash 0.8), the checksum of every binary file that Tessera writes.
std::uint64_t checksum(std::span<const std::byte> bytes);

/// XXH3 over bytes that arrive in pieces; equal to `checksum` of them joined.
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

/// A read-only memory map of a whole file, which shows what other processes write into it meanwhile. Empty files map to
/// an empty span.
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
/// `path`, so that `path` is the old file or the whole new one, never a part. Without commit the temporary is removed.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  /// Overwrites bytes already written, e.g. a header whose numbers are known last.
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  std::uint64_t size() const { return size_; }
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Writes a file with this content by AtomicFile: whole or not at all. Throws Error.
void write_whole_file(const std::filesystem::path& path, std::string_view content);

/// Makes the names in `directory` durable (fsync of the directory).
void sync_directory(const std::filesystem::path& directory);

/// Creates a folder and those above it, as far as they are missing.
void create_folder(const std::filesystem::path& folder);

/// Suffix of the old folder while replace_folder works on a file system that cannot exchange two names.
inline constexpr const char* kReplacedSuffix = ".replaced";

/// Gives the folder `whole` the name `target`, durably, and removes the folder that had it, if there is one. On an
/// Error `target` is what it was.
void replace_folder(const std::filesystem::path& whole, const std::filesystem::path& target);

template <typename T>
std::span<const std::byte> as_bytes_of(const T& object) {
  return std::as_bytes(std::span<const T, 1>(&object, 1));
}

}  // namespace tessera
