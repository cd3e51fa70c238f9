// For tests that set how many threads CPU operators use.
#pragma once

#include "tensor/parallel.h"

namespace tessera {

/// At its end, the number of threads is again what it was before it. One that only keeps that number takes none.
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
