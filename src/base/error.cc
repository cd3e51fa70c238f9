#include "base/error.h"

#include <string_view>

namespace tessera::detail {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::string_view place(file);
  if (const auto at = place.rfind("/src/"); at != std::string_view::npos) place.remove_prefix(at + 1);
  throw InternalError(
      fmt::format("{}:{}: check failed: {}{}{}", place, line, condition, message.empty() ? "" : ": ", message));
}

}  // namespace tessera::detail
