// Log lines for people, on standard error: "[time] level message" (spdlog). The program's results go to standard
// output.
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace tessera {

/// Sets the log's format and sink. Call once, at the start of main.
void init_logging();

/// True if standard error is a terminal; then a progress bar may be drawn.
bool stderr_is_terminal();

/// A warning that one cannot miss.
void warn_in_frame(std::string_view title, std::string_view text);

}  // namespace tessera
