// Log lines for people, on standard error: "[time] level message" (spdlog). Standard output is for the program's
// results.
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace tessera {

/// Sets the log's format and destination. Call it once, at the start of main.
void init_logging();

/// Returns whether standard error is a terminal. Only then may a progress bar be drawn.
bool stderr_is_terminal();

/// Logs a warning in a frame of '!' lines, so that nobody misses it.
void warn_in_frame(std::string_view title, std::string_view text);

}  // namespace tessera
