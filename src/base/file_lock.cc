#include "base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace tessera {
namespace {

/// Whether `path` is still the name of the open file: whoever held the lock before may have removed it.
bool is_named(int descriptor, const std::filesystem::path& path) {
  struct stat opened {
  }, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

/// "process 123 on node1"
std::string this_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {}", ::getpid(), host.data());
}

/// What the lock's holder wrote; it may not have done so yet.
std::string holder_of(int descriptor) {
  std::array<char, 300> text{};
  const ssize_t size = ::pread(descriptor, text.data(), text.size(), 0);
  const std::string_view holder(text.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return holder.starts_with("process ") ? std::string(holder.substr(0, holder.find('\n'))) : "another running program";
}

}  // namespace

FileLock::FileLock(std::filesystem::path path, const std::string& what, AtEnd at_end)
    : path_(std::move(path)), at_end_(at_end) {
  for (;;) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    require(descriptor_ >= 0, "cannot open '{}': {}", path_.string(), std::strerror(errno));
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) break;
    if (is_named(descriptor_, path_)) {
      const std::string holder = this_process() + "\n";
      // Only a message for people: a full disk is told of by whoever writes more.
      if (::ftruncate(descriptor_, 0) == 0) {
        [[maybe_unused]] const ssize_t written = ::pwrite(descriptor_, holder.data(), holder.size(), 0);
      }
      return;
    }
    ::close(descriptor_);
  }
  const int reason = errno;
  if (reason == EWOULDBLOCK) {
    const std::string holder = holder_of(descriptor_);
    ::close(descriptor_);
    fail("{} is in use: {} holds '{}'; wait for it to end, or stop it", what, holder, path_.string());
  }
  // Some network file systems have no locks; a run there is worth more than the check.
  spdlog::warn("cannot lock '{}': {}", path_.string(), std::strerror(reason));
}

FileLock::~FileLock() {
  if (at_end_ == AtEnd::kRemoveFile) ::unlink(path_.c_str());
  ::close(descriptor_);
}

}  // namespace tessera
