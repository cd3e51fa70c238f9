// Errors. Two kinds, because they ask for different things of whoever sees them:
//  * Error: the input (a config, a file, an argument, the machine) cannot work. Its message says what was given,
//    what was expected and where. The command line prints it and exits with status 2, unless the error has another one.
//  * InternalError: a broken promise between two parts of Tessera, thrown by TESSERA_CHECK. Exit status 1.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "base/exit_status.h"

namespace tessera {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitStatus status = ExitStatus::kWrongInput)
      : std::runtime_error(message), status_(status) {}

  /// The exit status of a program that this error ends.
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// The exit status of a program that an exception ends: that of an Error, 2 for std::filesystem_error, otherwise 1.
ExitStatus exit_status_of(const std::exception& error);

/// Throws Error with a formatted message.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws Error with a formatted message unless `condition` holds.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(format, std::forward<Args>(args)...);
}

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);
}

}  // namespace tessera

/// TESSERA_CHECK(condition, "format", values...): throws InternalError naming place, condition and values.
#define TESSERA_CHECK(condition, ...)                                                               \
  do {                                                                                              \
    if (!(condition)) [[unlikely]]                                                                  \
      ::tessera::detail::check_failed(__FILE__, __LINE__, #condition, fmt::format("" __VA_ARGS__)); \
  } while (false)
