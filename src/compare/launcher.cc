#include "compare/launcher.h"

#include <algorithm>
#include <charconv>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "config/resolve_recipes.h"
#include "run/record/run_files.h"
#include "run/record/run_info.h"
#include "step/training_step.h"
#include "system/progress_bar.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A run that will be started.
struct PlannedRun {
  SideSpec* side;
  RunRecord expected;  // configuration and data; `folder` is what was asked for
  fs::path folder;     // where the run is written
};

/// Returns the configuration as the trainer sees it, so that run.json can be compared with it. Throws Error if a run
/// could not start.
JobConfig config_of(const SideSpec& spec) {
  JobConfig config = load_job_config(spec.config, spec.overrides);
  config.validate();
  constexpr int kRanks = 1;  // of each run that is started here
  config.validate_on(resolve(config.mesh_degrees(), kRanks));
  config.metrics.log_freq = 1;  // a step that is not logged cannot count for the verdict
  set_document_end(config);
  Model model(config.model.args, model_options(config));  // only for its shapes
  model.parameters().allocate_meta(config.training.mixed_precision_param);
  resolve_recipes(config.recipes(), model.parameters());
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
  require(config.debug.seed <= std::numeric_limits<std::int64_t>::max() - options.num_seeds,
          "debug.seed is {}, and {} seeds after it are too large; expected a smaller one", config.debug.seed,
          options.num_seeds);
  for (std::int64_t i = 1; i <= options.num_seeds; ++i) seeds.push_back(config.debug.seed + i);
  return seeds;
}

std::vector<PlannedRun> plan_side(const std::vector<SideSpec>& specs, SideSpec& spec, const LaunchOptions& options) {
  JobConfig config = config_of(spec);
  config.training.global_batch_size = config.sequences_per_step();
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

/// Plans the runs of all sides, seed by seed.
std::vector<PlannedRun> plan_runs(std::vector<SideSpec>& specs, const LaunchOptions& options) {
  std::vector<std::vector<PlannedRun>> per_side;
  std::vector<Side> sides;
  for (SideSpec& spec : specs) {
    Side& side = sides.emplace_back(Side{spec.label, {}});
    if (!spec.is_started()) {
      side = read_side(spec);  // reads it in full, to refuse before hours of training what cannot be compared
    } else {
      for (const PlannedRun& run : per_side.emplace_back(plan_side(specs, spec, options))) {
        side.runs.push_back(run.expected);
      }
    }
    std::sort(side.runs.begin(), side.runs.end(),
              [](const RunRecord& a, const RunRecord& b) { return a.seed() < b.seed(); });
  }
  if (!specs.front().is_started()) require_sound_baseline(sides.front());
  require_comparable(sides);
  std::vector<PlannedRun> runs;
  for (std::size_t seed_idx = 0; !per_side.empty() && seed_idx < per_side[0].size(); ++seed_idx) {
    for (const auto& of_side : per_side) runs.push_back(of_side[seed_idx]);
  }
  return runs;
}

/// Returns the run in the folder, or as much of it as exists; nullopt if there is none. Throws Error if it is another
/// run.
std::optional<RunRecord> found_run(const PlannedRun& run) {
  if (!fs::exists(run.folder / kRunInfoName)) return {};
  const RunRecord info = read_run_info(run.folder);
  require_same_run(info, run.expected);
  require_unchanged(info);
  return fs::exists(run.folder / kMetricsName) ? read_run(run.folder) : info;
}

bool is_baseline(const PlannedRun& run, const std::vector<SideSpec>& specs) { return run.side == &specs.front(); }

/// Returns the run if it has ended, so that it needs no training. Throws Error if its content makes the comparison
/// impossible.
std::optional<RunRecord> ended_run(const PlannedRun& run, const std::vector<SideSpec>& specs) {
  std::optional<RunRecord> found = found_run(run);
  if (!found || !found->ended()) return {};
  if (is_baseline(run, specs)) require_sound_baseline({run.side->label, {*found}});
  return found;
}

/// Throws Error if a folder is on two sides, or a run would be started in a side's folder: it would be compared with
/// itself.
void require_distinct_folders(const std::vector<SideSpec>& specs) {
  std::map<fs::path, const SideSpec*> owners;
  for (const SideSpec& spec : specs) {
    for (const fs::path& run : spec.runs) {
      const auto [owner, is_new] = owners.emplace(fs::weakly_canonical(run), &spec);
      require(is_new || owner->second == &spec, "the run in '{}' is on two sides, '{}' and '{}'", run.string(),
              owner->second->label, spec.label);
    }
  }
}

std::string last_lines(const fs::path& path) {
  constexpr std::size_t kLines = 12;
  std::deque<std::string> lines;
  std::istringstream stream(read_text_file(path));
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) lines.push_back(line);
    if (lines.size() > kLines) lines.pop_front();
  }
  std::string text;
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

/// Returns the last step that a run has logged; 0 if there is none yet.
std::int64_t last_logged_step(const fs::path& run) {
  constexpr std::streamoff kTail = 1 << 20;  // longer than any line
  std::ifstream metrics(run / kMetricsName);
  metrics.seekg(0, std::ios::end);
  metrics.seekg(std::max<std::streamoff>(0, metrics.tellg() - kTail));
  std::int64_t step = 0;
  constexpr std::string_view kStep = "{\"step\":";
  for (std::string line; std::getline(metrics, line);) {
    if (line.starts_with(kStep)) std::from_chars(line.data() + kStep.size(), line.data() + line.size(), step);
  }
  return step;
}

/// Returns whether a run that a signal stops goes on later from there.
bool saves(const PlannedRun& run) { return run.expected.config.at("checkpoint.enable") == "true"; }

/// Trains a run. If its loss becomes not finite, the run fails, but that is a result of the comparison and not its end.
void train(const PlannedRun& run, const std::vector<SideSpec>& specs, const LaunchOptions& options,
           const volatile StopRequest& stop) {
  create_folder(run.folder);
  const fs::path log = run.folder / "train.log";
  std::vector<std::string> arguments = {"train", run.side->config};
  arguments.insert(arguments.end(), run.side->overrides.begin(), run.side->overrides.end());
  arguments.push_back(fmt::format("--debug.seed={}", run.expected.seed()));
  arguments.emplace_back("--metrics.log_freq=1");
  arguments.push_back("--job.dump_folder=" + run.folder.string());
  arguments.emplace_back("--job.run_id=compare");  // another start after an interruption is an attempt of the same run
  // Steps of an earlier start are not counted: they say nothing about how fast this one is.
  const std::int64_t before = last_logged_step(run.folder);
  ProgressBar progress("training", static_cast<std::uint64_t>(run.expected.num_steps() - before), "steps");
  Stopwatch since_read;
  bool is_told = false;
  const int status = wait_for(spawn(options.program, arguments, {.log = log}), stop, [&] {
    if (stop.count > 0 && !std::exchange(is_told, true)) {
      spdlog::info("signal {}: the run {}ends; a second signal ends it at once", int{stop.signal},
                   saves(run) ? "saves and " : "");
    }
    if (since_read.seconds() < 0.5) return;
    progress.set(static_cast<std::uint64_t>(std::max<std::int64_t>(0, last_logged_step(run.folder) - before)));
    since_read = {};
  });
  progress.clear();
  if (stop.count != 0) return;
  if (status == static_cast<int>(ExitStatus::kNonFinite)) {
    const std::optional<RunRecord> ended = ended_run(run, specs);
    if (const auto broken = ended ? ended->broken() : std::nullopt) {
      spdlog::warn("the run of '{}' with debug.seed = {} broke down: its {} is not finite at step {}", run.side->label,
                   run.expected.seed(), broken->what, broken->step);
      return;
    }
  }
  require(status == 0, "the run of '{}' with debug.seed = {} failed with exit status {}; its log '{}' ends with{}",
          run.side->label, run.expected.seed(), status, log.string(), last_lines(log));
  require(ended_run(run, specs).has_value(), "the run in '{}' ended before step {}; its log '{}' ends with{}",
          run.folder.string(), run.expected.num_steps(), log.string(), last_lines(log));
}

}  // namespace

int train_missing_runs(std::vector<SideSpec>& specs, const LaunchOptions& options, const volatile StopRequest& stop) {
  require(options.num_seeds > 0 && options.num_seeds <= kMaxSeeds, "{} seeds; expected 1 to {}", options.num_seeds,
          kMaxSeeds);
  const std::vector<PlannedRun> runs = plan_runs(specs, options);
  for (const PlannedRun& run : runs) run.side->runs.push_back(run.folder);
  require_distinct_folders(specs);
  for (const PlannedRun& run : runs) ended_run(run, specs);  // throws Error now, and not when the run's turn comes
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const PlannedRun& run = runs[i];
    const std::string name =
        fmt::format("run {} of {}: {}, seed {}", i + 1, runs.size(), run.side->label, run.expected.seed());
    if (ended_run(run, specs)) {
      spdlog::info("{}: is there, in '{}'", name, run.folder.string());
      continue;
    }
    spdlog::info("{}: training, log in '{}'", name, (run.folder / "train.log").string());
    const Stopwatch watch;
    if (stop.count == 0) train(run, specs, options, stop);
    if (stop.count != 0) {
      const int signal = stop.signal;
      spdlog::warn("stopped by signal {} in {}; the same command {}", signal, name,
                   saves(run) ? "goes on from here" : "trains this run from step 1 again (checkpoint.enable is off)");
      return signal;
    }
    spdlog::info("{}: done in {:.0f} s", name, watch.seconds());
  }
  return stop.count != 0 ? stop.signal : 0;
}

Side read_side(const SideSpec& spec) {
  std::vector<RunRecord> runs;
  for (const fs::path& run : spec.runs) runs.push_back(read_run(run));
  return make_side(spec.label, std::move(runs));
}

std::vector<Side> read_sides(const std::vector<SideSpec>& specs) {
  std::vector<Side> sides;
  for (const SideSpec& spec : specs) sides.push_back(read_side(spec));
  return sides;
}

}  // namespace tessera
