// The check that all tests of bad input use.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace tessera {

/// Runs `action`, expects an Error whose message has all of `parts`, and returns the message.
template <typename Action>
std::string expect_error(Action&& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
    }
    return message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected an Error, got: " << error.what();
    return {};
  }
  ADD_FAILURE() << "expected an Error, got none";
  return {};
}

}  // namespace tessera
