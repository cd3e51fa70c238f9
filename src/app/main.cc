// The command line. Exit status: 0 done, 1 a bug or a failure of the machine, 2 input that cannot work,
// 130/143 stopped by SIGINT/SIGTERM after saving.
#include <CLI/CLI.hpp>

#include "app/commands.h"
#include "base/error.h"
#include "base/log.h"

int main(int argc, char** argv) {
  tessera::init_logging();
  CLI::App app("Tessera: pre-training of DeepSeek-V3-class mixture-of-experts models", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  int status = 0;
  tessera::add_train_command(app, status);
  tessera::add_bench_command(app);
  tessera::add_data_commands(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const tessera::Error& error) {
    spdlog::error("{}", error.what());
    return 2;
  } catch (const std::exception& error) {
    spdlog::critical("{}", error.what());
    return 1;
  }
  return status;
}
