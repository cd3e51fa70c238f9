#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>

#include "app/cli/commands.h"
#include "app/cli/config_arguments.h"
#include "app/cli/on_ranks.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "comm/transport/mpi_transport.h"
#include "run/trainer.h"

namespace tessera {
namespace {

volatile std::sig_atomic_t stop_signal = 0;
std::atomic<std::int64_t> current_step = 0;  // 0: training has not begun
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "read in a signal handler");

/// What the signal handler says. It is set before training begins.
struct {
  bool is_of_many = false, is_first_rank = false, on_terminal = false;
  std::string_view next = "; again to stop now\n";  // says what follows the present step
  std::string_view next_in_haste = next;            // replaces `next` if mpirun will send SIGKILL after the signal
} announcement;

/// Says when Open MPI's mpirun kills a rank that still saves after Ctrl-C. Returns "" if another program starts the
/// ranks.
std::string mpirun_haste(const JobConfig& config) {
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr || !config.job.node_folder.empty()) return {};
  const char* seconds = std::getenv("OMPI_MCA_odls_base_sigkill_timeout");
  return fmt::format(
      ", then saving, if that is done before mpirun kills its ranks in {} s. `pkill -USR1 mpirun` in "
      "place of Ctrl-C leaves time to save\n",
      seconds == nullptr ? "1" : seconds);
}

void set_announcement(const JobConfig& config, const Ranks& ranks) {
  announcement = {
      .is_of_many = launched_by_mpi(), .is_first_rank = ranks.rank() == 0, .on_terminal = stderr_is_terminal()};
  if (!config.checkpoint.enable) return;
  static const std::string haste = mpirun_haste(config);  // a signal's handler must not allocate
  announcement.next = ", then saving; again to stop now\n";
  announcement.next_in_haste = haste.empty() ? announcement.next : haste;
}

/// Announces the stop. It calls only what a signal handler may call.
void announce_stop(int signal, std::int64_t step) {
  std::array<char, 256> text;
  char* end = text.data();
  const auto put = [&](std::string_view part) {
    const auto room = static_cast<std::size_t>(text.data() + text.size() - end);
    end = std::ranges::copy(part.substr(0, room), end).out;
  };
  if (announcement.on_terminal) put("\r\033[K");  // overwrites the progress bar
  put("finishing step ");
  end = std::to_chars(end, text.data() + text.size(), step).ptr;
  put(signal == SIGUSR1 ? announcement.next : announcement.next_in_haste);
  const int error = errno;
  static_cast<void>(!::write(STDERR_FILENO, text.data(), static_cast<std::size_t>(end - text.data())));
  errno = error;
}

/// Handles a signal. The first one asks for an orderly end and says so at once; a second one of its kind ends the
/// program. Before training begins there is nothing to save, so the first one ends it. When a rank has died, mpirun
/// sends SIGTERM to the others. They live for one more second, in which one of them reports the death.
void on_signal(int signal) {
  std::signal(signal, SIG_DFL);
  const std::int64_t step = current_step;
  if (step == 0 && signal == SIGTERM && announcement.is_of_many) {
    stop_signal = signal;
    std::signal(SIGALRM, [](int) { std::raise(static_cast<int>(stop_signal)); });
    alarm(1);
    return;
  }
  if (step == 0) {
    std::raise(signal);
    return;
  }
  if (stop_signal == 0 && announcement.is_first_rank) announce_stop(signal, step);
  stop_signal = signal;
}

struct TrainOptions {
  bool print_config = false;
  bool list_keys = false;
};

void print_keys() {
  JobConfig config;
  std::string section;
  for (const auto& entry : config_table(config).describe()) {
    const std::string this_section = entry.key.substr(0, entry.key.rfind('.'));
    if (this_section != section) {
      section = this_section;
      std::cout << fmt::format("\n## [{}]\n\n| key | values | default | meaning |\n| --- | --- | --- | --- |\n",
                               section);
    }
    std::cout << fmt::format("| `{}` | {} | `{}` | {} |\n", entry.key.substr(section.size() + 1), entry.type,
                             entry.value, entry.help);
  }
  std::cout << "\n## TorchTitan's keys without a counterpart\n\n| key | | why |\n| --- | --- | --- |\n";
  for (const auto& entry : config_table(config).describe_foreign()) {
    std::cout << fmt::format("| `{}` | {} | {} |\n", entry.key, entry.type,
                             entry.type == "refused" ? entry.help + " is not built" : entry.help);
  }
}

int exit_status_for(int signal) { return signal == 0 ? 0 : static_cast<int>(ExitStatus::kSignal) + signal; }

}  // namespace

void add_train_command(CLI::App& app, int& status) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a model");
  const auto config_arguments = std::make_shared<ConfigArguments>(command);
  command->add_flag("--print-config", options->print_config, "Print the whole configuration as TOML and exit");
  command->add_flag("--list-keys", options->list_keys, "Print every key with its default and meaning, and exit");
  command->footer(
      "Any key of the configuration can be set as --section.key=value, for example\n"
      "  tessera train configs/debugmodel.toml --training.steps=100 --optimizer.lr=4e-4\n"
      "A run resumes by itself from the newest checkpoint in its folder. SIGINT, SIGTERM,\n"
      "SIGHUP and SIGUSR1 finish the step, save and exit with 130, 143, 129 or 138; a second\n"
      "one of the same kind ends the run at once. mpirun gives its ranks one second after\n"
      "SIGINT and SIGTERM; SIGUSR1 it passes on.");
  command->callback([config_arguments, options, &status] {
    if (options->list_keys) return print_keys();
    if (options->print_config) {
      JobConfig printed = config_arguments->read();
      std::cout << config_table(printed).to_toml();
      return;
    }
    announcement.is_of_many = launched_by_mpi();
    handle_stop_signals(on_signal);
    std::signal(SIGUSR1, on_signal);
    status = run_on_ranks(
        [&] { return config_arguments->read(); },
        [](const JobConfig& config, Ranks& ranks) {
          Trainer trainer(config, &ranks);
          if (!config.checkpoint.enable && ranks.rank() == 0) {
            spdlog::info("checkpoint.enable is false: this run saves nothing, and cannot be resumed");
          }
          ranks.set_timeout(Progress::Seconds(config.comm.train_timeout_seconds), "comm.train_timeout_seconds");
          set_announcement(config, ranks);
          return ranks.end_where_it_fails([&] { return exit_status_for(trainer.run(stop_signal, &current_step)); });
        });
  });
}

}  // namespace tessera
