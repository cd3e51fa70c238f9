#include "base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace tessera {

FileLock::FileLock(const std::filesystem::path& path, const std::string& what)
    : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
  require(descriptor_ >= 0, "cannot open '{}': {}", path.string(), std::strerror(errno));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  const int reason = errno;
  if (reason == EWOULDBLOCK) {
    ::close(descriptor_);
    fail("{} is in use: another program that is running holds '{}'", what, path.string());
  }
  // Some network file systems have no locks; a run there is worth more than the check.
  spdlog::warn("cannot lock '{}': {}", path.string(), std::strerror(reason));
}

FileLock::~FileLock() { ::close(descriptor_); }

}  // namespace tessera
