// Stands in for a full disk: while it exists, no file of this process can grow beyond a size.
#pragma once

#include <sys/resource.h>

#include <csignal>

#include "base/error.h"

namespace tessera {

class FullDisk {
 public:
  explicit FullDisk(rlim_t max_file_bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    TESSERA_CHECK(getrlimit(RLIMIT_FSIZE, &old_limit_) == 0);
    struct rlimit limit = old_limit_;
    limit.rlim_cur = max_file_bytes;
    TESSERA_CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &old_limit_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  struct rlimit old_limit_ {};
  void (*old_handler_)(int);
};

}  // namespace tessera
