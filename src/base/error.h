// The two kinds of errors that Tessera throws. They differ in what the person who sees them should do:
//  * Error: the input (a config, a file, an argument, the machine) cannot work. Its message says what was given, what
//    was expected and where. The command line prints it and exits with status 2, unless the error carries another
//    status.
//  * InternalError: one part of Tessera broke a promise to another. TESSERA_CHECK throws it. The exit status is 1.
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

  /// Returns the status that the program exits with when this error ends it.
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Returns the status that the program exits with when `error` ends it. It is the status of an Error. A
/// std::filesystem::filesystem_error has that of its code, and any other exception has 1.
ExitStatus exit_status_of(const std::exception& error);

/// Returns the status for an error code of the system: 74 if it says that storage is full or broken. Other codes mean
/// that the request was wrong, and have 2.
ExitStatus exit_status_of_reason(int reason);

namespace detail {
// They take type-erased arguments, so that each call compiles to little code.
[[noreturn]] void fail(fmt::string_view format, fmt::format_args args);
[[noreturn]] void fail_check(const char* file, int line, const char* condition, fmt::string_view format,
                             fmt::format_args args);

template <typename... Args>
[[noreturn]] void check_failed(const char* file, int line, const char* condition, fmt::format_string<Args...> format,
                               Args&&... args) {
  fail_check(file, line, condition, format, fmt::make_format_args(args...));
}
}  // namespace detail

/// Throws Error with a formatted message.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  detail::fail(format, fmt::make_format_args(args...));
}

/// Throws Error with a formatted message unless `condition` holds.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) detail::fail(format, fmt::make_format_args(args...));
}

}  // namespace tessera

/// TESSERA_CHECK(condition, "format", values...) throws InternalError unless `condition` holds. The message names the
/// place in the source, the condition and the values.
#define TESSERA_CHECK(condition, ...)                                                  \
  do {                                                                                 \
    if (!(condition)) [[unlikely]]                                                     \
      ::tessera::detail::check_failed(__FILE__, __LINE__, #condition, "" __VA_ARGS__); \
  } while (false)
