#include "compare/launcher.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "data/dataset.h"
#include "train/run_info.h"

extern char** environ;

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxSeeds = 1000;

bool is_label_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
}

/// "debugmodel-quantize.linear.mx": the file's name and the values of the overrides.
std::string label_of_config(const std::string& config, const std::vector<std::string>& overrides) {
  std::string label = fs::path(config).stem().string();
  for (const std::string& override_text : overrides) {
    const std::size_t equals = override_text.find('=');
    label += "-" + override_text.substr(equals == std::string::npos ? 2 : equals + 1);
  }
  std::replace_if(
      label.begin(), label.end(), [](char c) { return !is_label_character(c); }, '-');
  return label;
}

/// The folder's name; of several, their parent's.
std::string label_of_folders(const std::vector<std::string>& folders) {
  fs::path path = fs::absolute(folders.front()).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return (folders.size() > 1 ? path.parent_path() : path).filename().string();
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

/// A run that is to be started.
struct PlannedRun {
  SideSpec* side;
  RunRecord expected;  // configuration and data; `folder` says what was asked for
  fs::path folder;     // where it goes
};

JobConfig config_of(const SideSpec& spec) {
  JobConfig config = load_job_config(spec.config, spec.overrides);
  config.validate();
  config.metrics.log_freq = 1;  // a step that is not logged is lost to the verdict
  // As the trainer does, so that run.json can be compared with this.
  if (config.model.args.eos_id < 0) {
    config.model.args.eos_id = data::read_manifest(config.training.dataset_path).eos_id;
  }
  return config;
}

std::vector<std::int64_t> seeds_to_start(const std::vector<SideSpec>& specs, const LaunchOptions& options,
                                         const JobConfig& config) {
  std::vector<std::int64_t> seeds;
  for (const SideSpec& spec : specs) {
    if (spec.is_started()) continue;
    for (const fs::path& run : spec.runs) seeds.push_back(read_run_info(run).seed());
    return seeds;
  }
  for (std::int64_t i = 1; i <= options.num_seeds; ++i) seeds.push_back(config.debug.seed + i);
  return seeds;
}

std::vector<PlannedRun> plan_side(const std::vector<SideSpec>& specs, SideSpec& spec, const LaunchOptions& options) {
  JobConfig config = config_of(spec);
  const auto dataset = dataset_identity(config);
  std::vector<PlannedRun> runs;
  for (const std::int64_t seed : seeds_to_start(specs, options, config)) {
    config.debug.seed = seed;
    PlannedRun& run = runs.emplace_back(PlannedRun{.side = &spec, .expected = {}, .folder = {}});
    run.folder = options.folder / spec.label / fmt::format("seed-{}", seed);
    run.expected.folder = spec.text;
    run.expected.config = config_values(config);
    run.expected.dataset = dataset;
  }
  return runs;
}

/// Seed by seed, all sides'.
std::vector<PlannedRun> plan_runs(std::vector<SideSpec>& specs, const LaunchOptions& options) {
  std::vector<std::vector<PlannedRun>> per_side;
  std::vector<Side> sides;
  for (SideSpec& spec : specs) {
    Side& side = sides.emplace_back(Side{spec.label, {}});
    if (!spec.is_started()) {
      for (const fs::path& run : spec.runs) side.runs.push_back(read_run_info(run));
    } else {
      for (const PlannedRun& run : per_side.emplace_back(plan_side(specs, spec, options))) {
        side.runs.push_back(run.expected);
      }
    }
    std::sort(side.runs.begin(), side.runs.end(),
              [](const RunRecord& a, const RunRecord& b) { return a.seed() < b.seed(); });
  }
  require_comparable(sides);
  std::vector<PlannedRun> runs;
  for (std::size_t seed_idx = 0; !per_side.empty() && seed_idx < per_side[0].size(); ++seed_idx) {
    for (const auto& of_side : per_side) runs.push_back(of_side[seed_idx]);
  }
  return runs;
}

/// True if the run's folder holds this run, whole.
bool is_finished(const PlannedRun& run) {
  if (!fs::exists(run.folder / kRunInfoName)) return false;
  require_same_run(read_run_info(run.folder), run.expected);
  return fs::exists(run.folder / "metrics.jsonl") && read_run(run.folder).finished();
}

std::string last_lines(const fs::path& path) {
  constexpr std::size_t kLines = 12;
  std::vector<std::string> lines = split(read_text_file(path), '\n');
  if (lines.size() > kLines) lines.erase(lines.begin(), lines.end() - kLines);
  std::string text;
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

/// Starts the program in a process group of its own, so that a terminal's Ctrl-C reaches it through us, once: a second
/// signal would keep it from saving. Standard output and error are appended to `log`.
pid_t spawn(const std::string& program, const std::vector<std::string>& arguments, const fs::path& log) {
  std::vector<char*> argv = {const_cast<char*>("tessera")};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  constexpr mode_t kMode = 0666;  // less the user's mask
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, kMode);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  pid_t process = 0;
  const int error = posix_spawn(&process, program.c_str(), &files, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  require(error == 0, "cannot start '{}' with its output to '{}': {}", program, log.string(), std::strerror(error));
  return process;
}

/// Waits for the process and hands it the signal that came meanwhile. Returns its exit status, or 128 + signal.
int wait_for(pid_t process, const volatile std::sig_atomic_t& stop_signal) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  bool told = false;
  for (;;) {
    int status = 0;
    const pid_t ended = waitpid(process, &status, WNOHANG);
    require(ended >= 0 || errno == EINTR, "cannot wait for process {}: {}", process, std::strerror(errno));
    if (ended == process) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (stop_signal != 0 && !told) {
      kill(process, stop_signal);
      told = true;
    }
    std::this_thread::sleep_for(kPause);
  }
}

void train(const PlannedRun& run, const LaunchOptions& options, const volatile std::sig_atomic_t& stop_signal) {
  create_folder(run.folder);
  const fs::path log = run.folder / "train.log";
  std::vector<std::string> arguments = {"train", run.side->config};
  arguments.insert(arguments.end(), run.side->overrides.begin(), run.side->overrides.end());
  arguments.push_back(fmt::format("--debug.seed={}", run.expected.seed()));
  arguments.push_back("--metrics.log_freq=1");
  arguments.push_back("--job.dump_folder=" + run.folder.string());
  const int status = wait_for(spawn(options.program, arguments, log), stop_signal);
  if (stop_signal != 0) return;
  require(status == 0, "the run of '{}' with debug.seed = {} failed with exit status {}; its log '{}' ends with{}",
          run.side->label, run.expected.seed(), status, log.string(), last_lines(log));
  require(is_finished(run), "the run in '{}' ended before step {}; its log '{}' ends with{}", run.folder.string(),
          run.expected.num_steps(), log.string(), last_lines(log));
}

}  // namespace

SideSpec parse_side(const std::string& text) {
  SideSpec spec{.label = {}, .text = text, .runs = {}, .config = {}, .overrides = {}};
  const std::size_t label_end = text.find('=');
  const bool labelled =
      label_end != std::string::npos && label_end > 0 && !fs::exists(text) &&
      std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(label_end), is_label_character);
  if (labelled) {
    spec.label = text.substr(0, label_end);
    spec.text = text.substr(label_end + 1);
  }
  require(spec.label != "." && spec.label != "..", "'{}' is no name for a side", spec.label);
  std::istringstream stream(spec.text);
  const std::vector<std::string> words(std::istream_iterator<std::string>(stream), {});
  require(!words.empty(), "'{}' names no runs; expected a folder, or a configuration (.toml)", text);
  if (words[0].ends_with(".toml")) {
    spec.config = words[0];
    spec.overrides.assign(words.begin() + 1, words.end());
    for (const std::string& word : spec.overrides) {
      require(word.starts_with("--"), "side '{}': unexpected '{}'; expected --section.key=value", spec.text, word);
    }
    if (!labelled) spec.label = label_of_config(spec.config, spec.overrides);
    return spec;
  }
  const std::vector<std::string> folders =
      fs::exists(spec.text) ? std::vector<std::string>{spec.text} : split(spec.text, ',');
  for (const std::string& folder : folders) {
    for (const fs::path& run : find_runs(folder)) spec.runs.push_back(run);
  }
  if (!labelled) spec.label = label_of_folders(folders);
  return spec;
}

int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options,
                       const volatile std::sig_atomic_t& stop_signal) {
  require(options.num_seeds > 0 && options.num_seeds <= kMaxSeeds, "{} seeds; expected 1 to {}", options.num_seeds,
          kMaxSeeds);
  const std::vector<PlannedRun> runs = plan_runs(specs, options);
  for (const PlannedRun& run : runs) run.side->runs.push_back(run.folder);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const PlannedRun& run = runs[i];
    const std::string name =
        fmt::format("run {} of {}: {}, seed {}", i + 1, runs.size(), run.side->label, run.expected.seed());
    if (is_finished(run)) {
      spdlog::info("{}: is there, in '{}'", name, run.folder.string());
      continue;
    }
    spdlog::info("{}: training, log in '{}'", name, (run.folder / "train.log").string());
    const Stopwatch watch;
    train(run, options, stop_signal);
    if (stop_signal != 0) {
      spdlog::warn("stopped by signal {} in {}; the same command goes on from here", static_cast<int>(stop_signal),
                   name);
      return stop_signal;
    }
    spdlog::info("{}: done in {:.0f} s", name, watch.seconds());
  }
  return 0;
}

std::vector<Side> read_sides(const std::vector<SideSpec>& specs) {
  std::vector<Side> sides;
  for (const SideSpec& spec : specs) {
    std::vector<RunRecord> runs;
    for (const fs::path& run : spec.runs) runs.push_back(read_run(run));
    sides.push_back(make_side(spec.label, std::move(runs)));
  }
  return sides;
}

}  // namespace tessera
