// The command line. Its exit statuses are those of base/exit_status.h.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "app/cli/arguments.h"
#include "app/cli/commands.h"
#include "base/error.h"
#include "base/log.h"
#include "base/version.h"

namespace {

/// Opens standard files that the caller has closed. Otherwise a run's file could get their numbers, and then messages
/// would end up in it.
void open_standard_files() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) < 0) open("/dev/null", O_RDWR);  // open() takes the lowest free number
  }
}

/// Handles a mapped file that became shorter, or shared memory without space: there is no error to return.
void on_bus_error(int signal) {
  constexpr char kMessage[] =
      "tessera: bus error: a file that was being read became shorter, or its disk failed, or /dev/shm is full\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  std::signal(signal, SIG_DFL);
  raise(signal);
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_files();
  // A file that outgrows a limit must cause an error with a message, like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);  // a caller may ignore it, and then children end without a status
  std::signal(SIGBUS, on_bus_error);
  tessera::init_logging();
  CLI::App app("Tessera: pre-training of DeepSeek-V3-class mixture-of-experts models", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", tessera::version());
  int status = 0;
  tessera::add_quickstart_command(app, status);
  tessera::add_train_command(app, status);
  tessera::add_launch_command(app, status);
  tessera::add_status_command(app);
  tessera::add_watch_command(app, status);
  tessera::add_undrain_command(app);
  tessera::add_health_commands(app, status);
  tessera::add_compare_command(app, status);
  tessera::add_report_command(app);
  tessera::add_bench_command(app, status);
  tessera::add_data_commands(app, status);
  tessera::add_convert_command(app, status);
  tessera::add_generate_command(app);
  tessera::add_plan_commands(app);
  tessera::add_doctor_command(app, status);
  tessera::add_completion_command(app);
  tessera::add_monitor_command(app, status);
  try {
    app.parse(tessera::checked_arguments(app, {argv + 1, argv + argc}));
    std::cout.flush();
    std::fflush(stdout);
    struct stat output {};
    const bool is_pipe = fstat(STDOUT_FILENO, &output) == 0 && (S_ISFIFO(output.st_mode) || S_ISSOCK(output.st_mode));
    // If it is a pipe, nobody reads it any more, and what the command does is done.
    if (!is_pipe && (!std::cout.good() || std::ferror(stdout) != 0)) {
      throw tessera::Error("the standard output cannot be written to its end: is its disk full?",
                           tessera::ExitStatus::kStorageFailed);
    }
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    spdlog::error("{}; `{} --help` says what is expected", error.what(), tessera::command_in_use(app));
    return static_cast<int>(tessera::ExitStatus::kWrongInput);
  } catch (const std::exception& error) {
    const tessera::ExitStatus failed = tessera::exit_status_of(error);
    const bool is_bug = failed == tessera::ExitStatus::kProgramError;
    spdlog::log(is_bug ? spdlog::level::critical : spdlog::level::err, "{}", error.what());
    return static_cast<int>(failed);
  }
  return status;
}
