#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "base/error.h"
#include "base/exit_status.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "launch/engines/slurm.h"
#include "launch/launch_files.h"
#include "launch/launch_state.h"
#include "launch/launcher_watch.h"
#include "launch/watch/channel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr milliseconds kBetweenLooks(500);
/// How long a launcher may take to answer.
constexpr milliseconds kAnswer(2000);
/// Seconds between two questions to Slurm about a launcher that is silent.
constexpr double kBetweenQuestions = 5.0;

class WatchedRun {
 public:
  WatchedRun(fs::path folder, const LauncherWatchOptions& options) : folder_(std::move(folder)), watch_(options) {
    std::error_code unreadable;
    require(fs::is_directory(folder_, unreadable),
            "'{}' is no folder: expected that of a run (job.dump_folder), with {} once it is launched",
            folder_.string(), kLaunchStateName);
  }

  /// Watches until the run is over. Then status() says how.
  void watch() {
    for (look(); !status_ && !watch_.is_over(); look()) std::this_thread::sleep_for(kBetweenLooks);
  }

  ExitStatus status() const { return status_.value_or(ExitStatus::kDone); }

 private:
  /// Looks once. If storage or Slurm fails, it logs a warning and tries again at the next look.
  void look() {
    try {
      const std::optional<LaunchState> state = read_launch_state(folder_);
      if (!state) return say(fmt::format("waiting for {}", kLaunchStateName));
      say(watch_.look(*state, now()));
      if (watch_.is_over()) return;
      if (!state->job) return give_up(*state);
      if (watch_.wants_contact()) contact(*state);
      if (!watch_.is_suspect() || now() < next_question_) return;
      next_question_ = now() + kBetweenQuestions;
      judge(*state);
    } catch (const Error& error) {
      say(error.what(), spdlog::level::warn);
    }
  }

  /// Logs the text, unless it is the text that was logged last.
  void say(const std::string& text, spdlog::level::level_enum level = spdlog::level::info) {
    if (text.empty() || text == said_) return;
    spdlog::log(level, "'{}': {}", folder_.string(), text);
    said_ = text;
  }

  void give_up(const LaunchState& state) {
    say(fmt::format(
            "its launcher on {} (engine {}) runs in no job of Slurm that could be requeued, and is not watched. "
            "If it is lost, start the same `tessera launch` again",
            state.host, state.engine),
        spdlog::level::err);
    status_ = ExitStatus::kWrongInput;
  }

  void contact(const LaunchState& state) {
    const bool answers = is_launcher_at(state.endpoint, kAnswer);
    watch_.set_reachable(answers);
    if (answers) return;
    say(fmt::format("its launcher cannot be reached at {} from here, so only Slurm can tell that it is lost",
                    state.endpoint),
        spdlog::level::warn);
  }

  void judge(const LaunchState& state) {
    const SlurmJob job = find_slurm_job(state.job->id);
    const bool answers = is_launcher_at(state.endpoint, kAnswer);
    const LauncherWatch::Verdict verdict = watch_.judge(job, answers, now());
    const double noticed_at = unix_time();
    say(verdict.text, spdlog::level::warn);
    if (watch_.is_over() && !state.has_ended()) status_ = ExitStatus::kProgramError;
    if (!verdict.requeue) return;
    if (!verdict.again) {
      try {
        write_launcher_loss(folder_, state, noticed_at);
      } catch (const Error& error) {
        say(error.what(), spdlog::level::warn);  // the next launcher then knows less, but is needed all the same
      }
    }
    requeue_slurm_job(state.job->id);
  }

  double now() const { return clock_.seconds(); }

  Stopwatch clock_;
  fs::path folder_;
  LauncherWatch watch_;
  std::string said_;
  double next_question_ = 0.0;
  std::optional<ExitStatus> status_;  // set if watching ends before the run does
};

int run_watch(const std::vector<std::string>& folders, const LauncherWatchOptions& options) {
  std::vector<WatchedRun> runs;
  for (const std::string& folder : folders) runs.emplace_back(folder, options);
  try {
    output_of("scontrol --version");
  } catch (const Error& error) {
    fail(
        "tessera watch requeues jobs by Slurm's scontrol, which does not work here: start it on a login node of the "
        "cluster. {}",
        error.what());
  }
  {
    std::vector<std::jthread> threads;  // one for each run: storage of another one may hang
    for (WatchedRun& run : runs) threads.emplace_back([&run] { run.watch(); });
  }
  const auto failed = std::ranges::find_if(runs, [](const auto& run) { return run.status() != ExitStatus::kDone; });
  return static_cast<int>(failed == runs.end() ? ExitStatus::kDone : failed->status());
}

}  // namespace

void add_watch_command(CLI::App& app, int& status) {
  struct Options {
    std::vector<std::string> folders;
    LauncherWatchOptions watch;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("watch", "Requeue the jobs of runs whose launcher is lost (Slurm)");
  command->add_option("runs", options->folders, "The runs' folders (job.dump_folder)")->required();
  command
      ->add_option("--silent", options->watch.silent_seconds,
                   "Seconds without a new launch.json after which a launcher is suspected; default: 10")
      ->check(is_number(0.1, 1e6));
  command->add_option("--requeues-per-hour", options->watch.requeues_per_hour, "Of each run, at most; default: 3")
      ->transform(as_count());
  command->footer(
      "Runs outside of the jobs, as on a login node, until all runs have ended:\n"
      "  tessera watch outputs\n"
      "docs/resilience.md says which jobs it requeues, and when.");
  command->callback([options, &status] { status = run_watch(options->folders, options->watch); });
}

}  // namespace tessera
