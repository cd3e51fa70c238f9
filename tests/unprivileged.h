// Lets tests see what users without root's rights see.
#pragma once

#include <unistd.h>

#include "base/error.h"

namespace tessera {

/// While it lives, a process of root has the rights of the user "nobody", who owns no file.
class Unprivileged {
 public:
  Unprivileged() { TESSERA_CHECK(!is_root_ || seteuid(65534) == 0); }
  ~Unprivileged() {
    if (is_root_ && seteuid(0) != 0) std::terminate();
  }
  Unprivileged(const Unprivileged&) = delete;
  Unprivileged& operator=(const Unprivileged&) = delete;

 private:
  const bool is_root_ = geteuid() == 0;
};

}  // namespace tessera
