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

}  // namespace tessera
