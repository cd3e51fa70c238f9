#include "base/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/parse_number.h"

namespace tessera {
namespace {

constexpr std::string_view kTemporarySuffix = ".tmp";

[[noreturn]] void fail_system(const char* action, const std::filesystem::path& path, int reason = errno) {
  throw SystemError(fmt::format("{} '{}'", action, path.string()), reason);
}

void write_fully(int descriptor, std::span<const std::byte> bytes, std::uint64_t offset,
                 const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_system("write", path);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

/// Opens a regular file for reading and reads its size. The caller closes the descriptor.
int open_regular_file(const std::filesystem::path& path, std::uint64_t& size) {
  // A pipe without a writer would block. O_NONBLOCK changes nothing for regular files.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail_system("open", path);
  struct stat status {};
  const int reason = ::fstat(descriptor, &status) == 0 ? 0 : errno;
  if (reason == 0 && S_ISREG(status.st_mode)) {
    size = static_cast<std::uint64_t>(status.st_size);
    return descriptor;
  }
  ::close(descriptor);
  if (reason != 0) fail_system("look at", path, reason);
  fail("cannot read '{}': not a regular file", path.string());
}

/// Returns the path of the file that a write to `path` changes: behind all symbolic links, where there may be none yet.
std::filesystem::path behind_links(std::filesystem::path path) {
  constexpr int kMaxLinks = 40;  // as many as Linux follows
  for (int i = 0; i < kMaxLinks; ++i) {
    std::error_code error;  // if the folder cannot be read, no file can be created there, which is reported then
    if (!std::filesystem::is_symlink(path, error)) return path;
    const std::filesystem::path target = std::filesystem::read_symlink(path, error);
    if (error) fail_system("read the link", path, error.value());
    path = path.parent_path() / target;
  }
  fail_system("create", path, ELOOP);
}

/// Deletes a folder that is in nobody's way.
void remove_or_warn(const std::filesystem::path& path) {
  try {
    remove_tree(path);
  } catch (const Error& error) {
    spdlog::warn("{}; it was replaced, and can be deleted by hand", error.what());
  }
}

}  // namespace

bool is_missing(int reason) { return reason == ENOENT || reason == ENOTDIR; }

SystemError::SystemError(const std::string& what, int reason)
    : Error(fmt::format("cannot {}: {}", what, std::strerror(reason)), exit_status_of_reason(reason)),
      reason_(reason) {}

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Checksum::Checksum() : state_(XXH3_createState()) {
  TESSERA_CHECK(state_ != nullptr);
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_));
}
Checksum::~Checksum() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void Checksum::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(), bytes.size());
}
std::uint64_t Checksum::value() const { return XXH3_64bits_digest(static_cast<XXH3_state_t*>(state_)); }

std::string read_text_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const int descriptor = open_regular_file(path, size_);
  if (size_ > 0) {
    void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
      const int reason = errno;
      ::close(descriptor);
      fail_system("map", path, reason);
    }
    data_ = static_cast<const std::byte*>(address);
  }
  ::close(descriptor);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

FileSum sum_file(const std::filesystem::path& path) {
  constexpr std::size_t kPieceBytes = 1 << 20;
  std::uint64_t size = 0;
  const int descriptor = open_regular_file(path, size);
  std::vector<std::byte> piece(kPieceBytes);
  Checksum sum;
  std::uint64_t num_read = 0;
  for (;;) {
    const ssize_t count = ::pread(descriptor, piece.data(), piece.size(), static_cast<off_t>(num_read));
    if (count < 0 && errno == EINTR) continue;
    const int reason = count < 0 ? errno : 0;
    if (count <= 0) ::close(descriptor);
    if (reason != 0) fail_system("read", path, reason);
    if (count == 0) return {.size = num_read, .checksum = sum.value()};
    sum.update(std::span(piece).first(static_cast<std::size_t>(count)));
    num_read += static_cast<std::uint64_t>(count);
  }
}

AtomicFile::AtomicFile(std::filesystem::path path) {
  std::error_code unreadable;  // on an error, open() below fails too, and its message reports it
  // A rename would put a regular file in the place of a device.
  require(!std::filesystem::exists(path, unreadable) || std::filesystem::is_regular_file(path, unreadable),
          "'{}' is no regular file, and cannot be replaced by one", path.string());
  path_ = behind_links(std::move(path));
  static std::atomic<std::uint64_t> num_files = 0;
  do {
    temporary_ = path_;
    temporary_ += fmt::format(".{}-{}{}", ::getpid(), num_files++, kTemporarySuffix);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_system("create", temporary_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  write_fully(descriptor_, bytes, size_, temporary_);
  size_ += bytes.size();
}

void AtomicFile::write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  TESSERA_CHECK(offset + bytes.size() <= size_, "offset {} size {} file size {}", offset, bytes.size(), size_);
  write_fully(descriptor_, bytes, offset, temporary_);
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail_system("flush", temporary_);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_system("close", temporary_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary_.c_str());
    fail_system("rename", temporary_, reason);
  }
  sync_directory(path_.parent_path());
}

std::filesystem::path name_without_temporary(const std::filesystem::path& name) {
  const std::filesystem::path with_number = name.stem();  // "file.123-4" of "file.123-4.tmp"
  const std::string number = with_number.extension().string();
  const std::size_t dash = number.find('-');
  const bool is_temporary = name.extension() == kTemporarySuffix && dash != number.npos &&
                            parse_number<std::int64_t>(std::string_view(number).substr(1, dash - 1)) &&
                            parse_number<std::int64_t>(std::string_view(number).substr(dash + 1));
  return is_temporary ? with_number.stem() : name;
}

void write_whole_file(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

int reserve_storage(int descriptor, std::size_t num_bytes) {
  int reason = 0;
  do {
    reason = ::posix_fallocate(descriptor, 0, static_cast<off_t>(num_bytes));
  } while (reason == EINTR);
  return reason;
}

void sync_directory(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory.empty() ? "." : directory;
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_system("open", path);
  const int reason = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (reason != 0) fail_system("flush", path, reason);
}

void create_folder(const std::filesystem::path& folder) {
  std::error_code error;
  require(!std::filesystem::is_regular_file(folder, error),
          "'{}' is a file; expected a folder, or a name for a new one", folder.string());
  std::vector<std::filesystem::path> parents;  // of the folders that are new
  for (std::filesystem::path path = folder; !path.empty() && !std::filesystem::exists(path, error);) {
    path = path.parent_path();
    parents.push_back(path);
  }
  std::filesystem::create_directories(folder, error);
  if (error) fail_system("create the folder", folder, error.value());
  for (const std::filesystem::path& parent : parents) sync_directory(parent);
}

bool path_exists(const std::filesystem::path& path) {
  std::error_code error;
  const bool exists = std::filesystem::exists(path, error);
  if (error) fail_system("look for", path, error.value());
  return exists;
}

std::vector<std::filesystem::directory_entry> entries_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::directory_entry> entries;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) entries.push_back(*entry);
  if (error && !is_missing(error.value())) fail_system("read the folder", folder, error.value());
  return entries;
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  if (error) throw SystemError(fmt::format("rename '{}' to '{}'", from.string(), to.string()), error.value());
}

void remove_tree(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail_system("delete", path, error.value());
}

void replace_folder(const std::filesystem::path& whole, const std::filesystem::path& target) {
  // RENAME_EXCHANGE swaps the two names in one step.
  if (::renameat2(AT_FDCWD, whole.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    sync_directory(target.parent_path());
    remove_or_warn(whole);
    return;
  }
  if (!path_exists(target)) {
    rename_path(whole, target);
    sync_directory(target.parent_path());
    return;
  }
  const std::filesystem::path replaced = target.string() + kReplacedSuffix;
  remove_tree(replaced);
  rename_path(target, replaced);
  try {
    rename_path(whole, target);
  } catch (...) {
    std::error_code ignored;  // the first failure is the one to report
    std::filesystem::rename(replaced, target, ignored);
    throw;
  }
  sync_directory(target.parent_path());
  remove_or_warn(replaced);
}

}  // namespace tessera
