#include "system/file_lock.h"

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
#include "base/file.h"
#include "base/log.h"
#include "system/host_name.h"

namespace tessera {
namespace {

constexpr std::string_view kProcess = "process ";

int open_file(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) throw SystemError(fmt::format("open '{}'", path.string()), errno);
  return descriptor;
}

/// The holder of a lock, as the lock's file names it.
struct Holder {
  std::string owner;    // FileLock::Options::owner
  std::string process;  // "process 123 on node1"

  std::string describe() const { return owner.empty() ? process : fmt::format("{} ({})", owner, process); }
};

Holder this_holder(const std::string& owner) {
  return {.owner = owner, .process = fmt::format("{}{} on {}", kProcess, ::getpid(), host_name())};
}

/// Reads the holder from a lock's file. A new holder may not have written its lines yet.
Holder read_holder(int descriptor) {
  std::array<char, 1024> bytes{};
  const ssize_t size = ::pread(descriptor, bytes.data(), bytes.size(), 0);
  const std::string_view text(bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  const std::size_t end = text.find('\n');
  if (!text.starts_with(kProcess) || end == text.npos) return {.owner = {}, .process = "another running program"};
  const std::string_view owner = text.substr(end + 1);
  return {.owner = std::string(owner.substr(0, owner.find('\n'))), .process = std::string(text.substr(0, end))};
}

void write_holder(int descriptor, const Holder& holder) {
  const std::string text = fmt::format("{}\n{}\n", holder.process, holder.owner);
  // People and the next attempt of a run read these lines. If the disk is full, whoever writes more reports it.
  [[maybe_unused]] const bool written =
      ::ftruncate(descriptor, 0) == 0 && ::pwrite(descriptor, text.data(), text.size(), 0) >= 0;
}

}  // namespace

FileLock::FileLock(std::filesystem::path path, const std::string& what, const Options& options)
    : path_(std::move(path)), at_end_(options.at_end), descriptor_(open_file(path_)) {
  try {
    if (lock(what, options) == Outcome::kLocked) {
      write_holder(descriptor_, this_holder(options.owner));
    } else {  // as on some network file systems, where a run is worth more than this check
      spdlog::warn("cannot lock '{}': {}", path_.string(), std::strerror(errno));
    }
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

FileLock::~FileLock() {
  try {
    if (at_end_ == AtEnd::kRemoveFile && is_held()) ::unlink(path_.c_str());
  } catch (const Error& error) {
    spdlog::warn("{}; it stays, but locks nothing", error.what());
  }
  ::close(descriptor_);
}

FileLock::Outcome FileLock::lock(const std::string& what, const Options& options) {
  for (;;) {
    const Outcome outcome = try_lock();
    if (outcome != Outcome::kHeldByOther) return outcome;
    const Holder holder = read_holder(descriptor_);
    if (!options.takes_over || !options.takes_over(holder.owner)) {
      fail("{} is in use: {} holds '{}'; wait for it to end, or stop it", what, holder.describe(), path_.string());
    }
    if (replace_file()) {
      spdlog::warn("{} is taken over from {}", what, holder.describe());
      return Outcome::kLocked;
    }
    reopen();
  }
}

FileLock::Outcome FileLock::try_lock() {
  for (;;) {
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {
      if (is_held()) return Outcome::kLocked;
      reopen();  // someone removed or replaced the file between open and flock
      continue;
    }
    switch (errno) {
      case EINTR:
        break;
      case EWOULDBLOCK:
        return Outcome::kHeldByOther;
      case ENOLCK:
      case ENOSYS:
      case EOPNOTSUPP:
      case EINVAL:
        return Outcome::kNoLocks;
      default:
        throw SystemError(fmt::format("lock '{}'", path_.string()), errno);
    }
  }
}

void FileLock::reopen() {
  const int descriptor = open_file(path_);
  ::close(std::exchange(descriptor_, descriptor));
}

bool FileLock::replace_file() {
  const std::filesystem::path own = fmt::format("{}.{}", path_.string(), ::getpid());
  const int descriptor = open_file(own);
  const auto give_up = [&] {
    ::close(descriptor);
    ::unlink(own.c_str());
  };
  try {
    const bool is_locked = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
    // The holder whose owner was read must still be there, because another one may be a later attempt.
    if (is_locked && !is_held()) {
      give_up();
      return false;
    }
    const bool is_replaced = is_locked && ::rename(own.c_str(), path_.c_str()) == 0;
    if (!is_replaced) throw SystemError(fmt::format("take over '{}'", path_.string()), errno);
  } catch (...) {
    give_up();
    throw;
  }
  ::close(std::exchange(descriptor_, descriptor));
  return true;
}

bool FileLock::is_held() const {
  struct stat opened {
  }, named{};
  const auto fail_to_look = [&](int reason) { throw SystemError(fmt::format("look at '{}'", path_.string()), reason); };
  if (::stat(path_.c_str(), &named) != 0) {
    if (is_missing(errno)) return false;
    fail_to_look(errno);
  }
  if (::fstat(descriptor_, &opened) != 0) {
    // The path can be looked at, so NFS says with ESTALE that another machine has deleted the file that was opened.
    if (errno == ESTALE) return false;
    fail_to_look(errno);
  }
  return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace tessera
