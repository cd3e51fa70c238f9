// Errors. Two kinds, because they ask for different things of whoever sees them:
//  * Error: the input (a config, a file, an argument, the machine) cannot work. Its message says what was given,
//    what was expected and where. The command line prints it and exits with status 2.
//  * InternalError: a broken promise between two parts of Tessera, thrown by TESSERA_CHECK. Exit status 1.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace tessera {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

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
