#include "base/error.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace tessera {

ExitStatus exit_status_of(const std::exception& error) {
  if (const auto* of_input = dynamic_cast<const Error*>(&error)) return of_input->status();
  const auto* of_system = dynamic_cast<const std::system_error*>(&error);
  if (of_system == nullptr) return ExitStatus::kProgramError;
  const ExitStatus of_reason = exit_status_of_reason(of_system->code().value());
  // Threads throw such errors, too, and fmt where it cannot write.
  const bool is_of_files = dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr;
  return is_of_files || of_reason == ExitStatus::kStorageFailed ? of_reason : ExitStatus::kProgramError;
}

ExitStatus exit_status_of_reason(int reason) {
  constexpr std::array kOfStorage = {ENOSPC, EDQUOT,    EFBIG,     EIO,      ESTALE,    EROFS,       ENODEV,
                                     ENXIO,  ETIMEDOUT, EREMOTEIO, ENOTCONN, ESHUTDOWN, ECONNABORTED};
  const bool is_of_storage = std::ranges::find(kOfStorage, reason) != kOfStorage.end();
  return is_of_storage ? ExitStatus::kStorageFailed : ExitStatus::kWrongInput;
}

namespace detail {

void fail(fmt::string_view format, fmt::format_args args) { throw Error(fmt::vformat(format, args)); }

void fail_check(const char* file, int line, const char* condition, fmt::string_view format, fmt::format_args args) {
  const std::string message = fmt::vformat(format, args);
  std::string_view place(file);
  if (const auto at = place.rfind("/src/"); at != std::string_view::npos) place.remove_prefix(at + 1);
  throw InternalError(
      fmt::format("{}:{}: check failed: {}{}{}", place, line, condition, message.empty() ? "" : ": ", message));
}

}  // namespace detail
}  // namespace tessera
