// Lets a test set the number of threads of CPU operators.
#pragma once

#include "tensor/parallel.h"

namespace tessera {

/// Sets the number of threads, and restores the previous number at its end. Without an argument it only restores the
/// number.
class ThreadsScope {
 public:
  explicit ThreadsScope(int count = num_threads()) { set_num_threads(count); }
  ~ThreadsScope() { set_num_threads(before_); }
  ThreadsScope(const ThreadsScope&) = delete;
  ThreadsScope& operator=(const ThreadsScope&) = delete;

 private:
  int before_ = num_threads();
};

}  // namespace tessera
