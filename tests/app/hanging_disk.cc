// Stands in for storage that hangs. A program that loads it first (LD_PRELOAD) waits forever when it flushes a file of
// an unfinished checkpoint.
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

extern "C" int fsync(int descriptor) {
  char link[64], path[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t size = readlink(link, path, sizeof path);
  while (size > 0 &&
         std::string_view(path, static_cast<std::size_t>(size)).find(".partial") != std::string_view::npos) {
    pause();
  }
  return static_cast<int>(syscall(SYS_fsync, descriptor));
}
