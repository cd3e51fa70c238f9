// Captures what the program logs while a function runs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace tessera {

/// Runs `body` and returns what it wrote to standard output and standard error.
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
