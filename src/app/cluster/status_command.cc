#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <thread>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "base/unix_time.h"
#include "compare/run_record.h"
#include "launch/launch_files.h"
#include "launch/launch_state.h"
#include "run/record/run_files.h"
#include "system/progress_bar.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Seconds after which a launcher is called silent. It writes its state every second.
constexpr double kSilent = 10.0;

/// Returns what can be seen of a run from outside.
nlohmann::ordered_json status_of(const fs::path& folder) {
  nlohmann::ordered_json status = {{"folder", folder.string()}, {"launch", nullptr}, {"training", nullptr}};
  if (const std::optional<LaunchState> launch = read_launch_state(folder)) {
    status["launch"] = to_json(*launch);
    status["launch"]["silent_seconds"] = launch->has_ended() ? 0.0 : std::max(0.0, unix_time() - launch->time);
    status["launch"]["reports"] = nlohmann::ordered_json::array();
    for (int i = 1; i <= launch->incidents; ++i) {
      const fs::path path = folder / kIncidentsFolderName / fmt::format("{}.json", i);
      std::error_code unreadable;
      if (!fs::exists(path, unreadable)) continue;
      const std::string name = fmt::format("'{}'", path.string());
      const auto report = parse_json<nlohmann::ordered_json>(read_text_file(path), name);
      const JsonFields fields(report, name + ", $");
      fields.count("number");  // throws Error, as text() does, if describe() could not show the report
      fields.text("text");
      status["launch"]["reports"].push_back(report);
    }
  }
  std::error_code unreadable;
  if (fs::exists(folder / kMetricsName, unreadable) && fs::file_size(folder / kMetricsName, unreadable) > 0) {
    const RunRecord run = read_run(folder);
    if (!run.steps.empty()) {
      const double step_seconds = run.step_seconds.back();
      status["training"] = {
          {"step", run.last_step()},
          {"num_steps", run.num_steps()},
          {"loss", json_number(run.losses.back())},
          {"learning_rate", json_number(run.learning_rates.back())},
          {"tokens_per_second", json_number(run.tokens_per_second.back())},
          {"mfu", json_number(run.mfus.back())},
          {"step_seconds", json_number(step_seconds)},
          {"seconds_left", json_number(step_seconds * static_cast<double>(run.num_steps() - run.last_step()))}};
    }
  }
  require(!status["launch"].is_null() || !status["training"].is_null(),
          "'{}' holds no run: expected a folder (job.dump_folder) with {} or {}", folder.string(), kLaunchStateName,
          kMetricsName);
  return status;
}

std::string describe(const nlohmann::ordered_json& status) {
  std::string text;
  const nlohmann::ordered_json &launch = status["launch"], &training = status["training"];
  if (!training.is_null()) {
    const auto number = [&](const char* key) {
      return training[key].is_number() ? training[key].get<double>() : std::nan("");
    };
    text += fmt::format("step {} of {} ({:.0f} %)  loss {:.4f}  {:.0f} tokens/s per rank  {:.2f} s per step",
                        number("step"), number("num_steps"), 100.0 * number("step") / number("num_steps"),
                        number("loss"), number("tokens_per_second"), number("step_seconds"));
    if (training["mfu"].is_number()) text += fmt::format("  MFU {:.1f} %", 100.0 * number("mfu"));
    if (number("seconds_left") > 0.0) text += fmt::format("  ETA {}", format_duration(number("seconds_left")));
    text += '\n';
  }
  if (launch.is_null()) return text;
  text +=
      fmt::format("{}: run {}, attempt {}, engine {}, launcher on {} (process {})", launch["state"].get<std::string>(),
                  launch["run_id"].get<std::string>(), launch["attempt"].get<std::int64_t>(),
                  launch["engine"].get<std::string>(), launch["host"].get<std::string>(), launch["pid"].get<int>());
  if (const double silent = launch["silent_seconds"].get<double>(); silent > kSilent) {
    text += fmt::format(", which has been silent for {}", format_duration(silent));
  }
  text += '\n';
  for (const char* role : {"active", "spare", "lost", "drained"}) {
    std::vector<std::string> names;
    for (const auto& node : launch["nodes"]) {
      if (node["role"] == role) names.push_back(node["name"].get<std::string>());
    }
    if (!names.empty()) text += fmt::format("{}: {}\n", role, fmt::join(names, " "));
  }
  text += fmt::format("{} incidents, {:.1f} s lost, effective training time {:.1f} %\n", launch["incidents"].get<int>(),
                      launch["seconds_lost"].get<double>(), 100.0 * launch["effective_training_time"].get<double>());
  for (const auto& report : launch["reports"]) {
    text +=
        fmt::format("  {}. {}\n", report["number"].get<std::uint64_t>(), printable(report["text"].get<std::string>()));
  }
  return text;
}

}  // namespace

void add_status_command(CLI::App& app) {
  struct Options {
    std::string run;
    bool json = false;
    double watch = 0.0;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("status", "Show how a run is, from outside");
  command->add_option("run", options->run, "The run's folder (job.dump_folder)")->required();
  command->add_flag("--json", options->json, "As JSON, for scripts");
  command->add_option("--watch", options->watch, "Show it again every so many seconds, until Ctrl-C")
      ->check(is_number(0.01, 1e6));
  command->callback([options] {
    while (true) {
      const nlohmann::ordered_json status = status_of(options->run);
      std::cout << (options->json ? json_text(status, 2) + "\n" : describe(status)) << std::flush;
      if (options->watch <= 0.0) return;
      std::this_thread::sleep_for(std::chrono::duration<double>(options->watch));
      if (!options->json) std::cout << "\n";
    }
  });
}

}  // namespace tessera
