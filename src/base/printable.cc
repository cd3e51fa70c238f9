#include "base/printable.h"

#include <fmt/format.h>

namespace tessera {

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string shown;
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    shown += byte >= 0x20 && byte < 0x7F ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return text.size() > kMaxShown ? shown + "..." : shown;
}

}  // namespace tessera
