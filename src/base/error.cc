#include "base/error.h"

#include <filesystem>
#include <string_view>

namespace tessera {

ExitStatus exit_status_of(const std::exception& error) {
  if (const auto* of_input = dynamic_cast<const Error*>(&error)) return of_input->status();
  const bool is_of_files = dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr;
  return is_of_files ? ExitStatus::kWrongInput : ExitStatus::kProgramError;
}

namespace detail {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::string_view place(file);
  if (const auto at = place.rfind("/src/"); at != std::string_view::npos) place.remove_prefix(at + 1);
  throw InternalError(
      fmt::format("{}:{}: check failed: {}{}{}", place, line, condition, message.empty() ? "" : ": ", message));
}

}  // namespace detail
}  // namespace tessera
