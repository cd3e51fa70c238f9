// Texts of files in messages.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Returns a text for a message: bytes that are not printable ASCII as \xNN, and at most 200 of them, with "..." after
/// them if there are more. So nothing in a file can send control codes to a terminal.
std::string printable(std::string_view text);

}  // namespace tessera
