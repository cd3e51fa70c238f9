#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <unistd.h>

namespace tessera {

void init_logging() {
  auto logger = spdlog::stderr_color_mt("tessera");
  logger->set_pattern("[%H:%M:%S] %^%l%$ %v");
  spdlog::set_default_logger(std::move(logger));
}

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

void warn_in_frame(std::string_view title, std::string_view text) {
  const std::string line(100, '!');
  for (const std::string_view part : {std::string_view(line), title, text, std::string_view(line)}) {
    spdlog::warn("{}", part);
  }
}

}  // namespace tessera
