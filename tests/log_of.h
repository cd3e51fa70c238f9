// What the program logs while something runs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace tessera {

/// Standard output and standard error of body().
inline std::string log_of(const std::function<void()>& body) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const auto captured = [] { return testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr(); };
  try {
    body();
  } catch (...) {
    captured();
    throw;
  }
  return captured();
}

}  // namespace tessera
