#include "compare/report/run_report.h"

#include <fmt/chrono.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/error.h"
#include "base/median.h"
#include "compare/curve.h"
#include "compare/report/html.h"
#include "compare/report/run_figures.h"
#include "compare/statistics.h"
#include "run/record/metrics.h"
#include "run/record/run_files.h"
#include "run/record/run_info.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using TableRows = std::vector<std::vector<std::string>>;

/// The configuration, with defaults for keys that the run's program did not know yet.
class Settings {
 public:
  explicit Settings(const RunRecord& run) : values_(run.config), defaults_(config_values({})) {
    values_.insert(defaults_.begin(), defaults_.end());
  }
  /// Returns a key's value, a string without its quotes. Returns "" for an unknown key.
  std::string operator[](const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? "" : plain(found->second);
  }
  bool is(const std::string& key, const std::string& value) const { return (*this)[key] == value; }

  /// Returns a row for every key, with its value and, if that is another, its default.
  TableRows table() const {
    TableRows rows = {{"Key", "Value", "Default, if another"}};
    for (const auto& [key, value] : values_) {
      const auto found = defaults_.find(key);
      const bool same = found != defaults_.end() && found->second == value;
      rows.push_back({key, value, same ? "" : found == defaults_.end() ? "(none)" : found->second});
    }
    return rows;
  }

 private:
  static std::string plain(const std::string& value) {
    const bool quoted = value.size() >= 2 && value.front() == '"' && value.back() == '"';
    return quoted ? value.substr(1, value.size() - 2) : value;
  }
  std::map<std::string, std::string> values_, defaults_;
};

/// Returns a count as text. From 10,000 on it has three digits: 1234567 is "1.23M".
std::string count_text(double count) {
  constexpr double kThousand = 1000.0, kShort = 9999.5;
  if (!(count >= kShort)) return fmt::format("{:.0f}", count);
  std::size_t power = 0;
  for (; count >= 999.5 && power < 4; ++power) count /= kThousand;
  const int decimals = count < 10.0 ? 2 : count < 100.0 ? 1 : 0;
  return fmt::format("{:.{}f}{}", count, decimals, std::string_view(" kMBT").substr(power, 1));
}

/// Returns the time of all steps. The mean in each logged line stands for the steps since the line before.
double training_seconds(const RunRecord& run) {
  double seconds = 0.0;
  std::int64_t before = run.steps.front() - 1;
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    if (std::isfinite(run.step_seconds[i])) {
      seconds += run.step_seconds[i] * static_cast<double>(run.steps[i] - before);
    }
    before = run.steps[i];
  }
  return seconds;
}

std::string loss_text(double loss) { return std::isfinite(loss) ? fmt::format("{:.4f}", loss) : "not finite"; }

std::string tiles(const RunRecord& run) {
  std::string html = "<div class=\"tiles\">";
  const auto window = static_cast<std::size_t>(smoothing_window(run.losses.size()));
  html += html_tile("Loss", loss_text(mean(std::span(run.losses).last(window))),
                    fmt::format("{}at first {:.4f}", window > 1 ? fmt::format("mean of {} lines; ", window) : "",
                                run.losses.front()));
  if (!run.validation_losses.empty()) {
    const auto& [step, loss] = *run.validation_losses.rbegin();
    html += html_tile("Validation loss", loss_text(loss), fmt::format("at step {}", step));
  }
  html += html_tile("Tokens", count_text(run.tokens_per_step() * static_cast<double>(run.last_step())),
                    fmt::format("{} per step", count_text(run.tokens_per_step())));
  html += html_tile("Tokens/s per rank", count_text(median(run.tokens_per_second)), "median");
  const std::vector<double> mfus = finite_of(run.mfus), step_seconds = finite_of(run.step_seconds);
  if (!mfus.empty()) html += html_tile("MFU", fmt::format("{:.1f} %", 100.0 * median(mfus)), "median");
  html += html_tile("Memory", format_gib(static_cast<std::size_t>(run.peak_memory_bytes)), "highest, of this rank");
  if (!step_seconds.empty()) {
    const double step = median(step_seconds), left = step * static_cast<double>(run.num_steps() - run.last_step());
    const bool goes_on = run_status(run).kind == RunStatus::Kind::kUnfinished;
    html += html_tile("Time in steps", duration_text(training_seconds(run)),
                      goes_on ? "about " + duration_text(left) + " left" : duration_text(step) + " per step");
  }
  return html + "</div>\n";
}

std::string status_box(const RunRecord& run, std::chrono::system_clock::time_point as_of) {
  const RunStatus status = run_status(run);
  const char *tone = "better", *mark = "…";
  std::string text = fmt::format("The last line was written at {:%Y-%m-%d %H:%M} UTC. Make the page again to see more.",
                                 fmt::gmtime(std::chrono::system_clock::to_time_t(as_of)));
  if (status.kind == RunStatus::Kind::kFinished) {
    tone = "equivalent", mark = "✓";
    text = fmt::format("Finished at {:%Y-%m-%d %H:%M} UTC.", fmt::gmtime(std::chrono::system_clock::to_time_t(as_of)));
  } else if (status.kind == RunStatus::Kind::kBroken) {
    tone = "worse", mark = "!";
    text =
        "A run stops where its loss or gradient norm is no longer finite. A checkpoint, if there is one, is from "
        "before.";
  }
  const double part = std::clamp(static_cast<double>(run.last_step()) / static_cast<double>(run.num_steps()), 0.0, 1.0);
  return html_box(tone, mark, "<b>" + html_escape(status.text) + "</b>",
                  fmt::format("{}</p><div class=\"bar\"><i style=\"width:{:.1f}%\"></i></div><p>", text, 100.0 * part));
}

std::string changes_section(const RunRecord& run) {
  const std::vector<ConfigChange> changes = run.changes();
  if (changes.empty()) return "";
  TableRows rows = {{"Key", "From step", "Before", "After"}};
  for (const ConfigChange& change : changes) {
    rows.push_back({change.key, std::to_string(change.step), change.before, change.after});
  }
  return "<h2>Changed on resume</h2>\n" + html_table(rows);
}

/// Returns how the model and the data are split: "data 8, pipeline 2".
std::string parallelism_text(const RunRecord& run, const Settings& settings) {
  std::vector<std::string> parts;
  if (run.num_data_ranks > 1) parts.push_back(fmt::format("data {}", run.num_data_ranks));
  for (const auto& [key, name] : {std::pair{"data_parallel_replicate", "replicas"},
                                  {"data_parallel_shard", "FSDP"},
                                  {"pipeline_parallel", "pipeline"},
                                  {"tensor_parallel", "tensor"},
                                  {"context_parallel", "context"},
                                  {"expert_parallel", "experts"},
                                  {"expert_tensor_parallel", "experts' tensors"}}) {
    const std::string degree = settings[fmt::format("parallelism.{}_degree", key)];
    if (degree != "1" && degree != "-1") parts.push_back(fmt::format("{} {}", name, degree));
  }
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

TableRows summary_rows(const RunRecord& run, const Settings& settings) {
  TableRows rows = {{"", ""}};
  rows.push_back({"Folder", run.folder.string()});
  if (!settings["job.description"].empty()) rows.push_back({"Description", settings["job.description"]});
  rows.push_back(
      {"Model", fmt::format("{} {}: {} layers, dimension {}, {} experts of which a token goes to {}, "
                            "vocabulary {}",
                            settings["model.name"], settings["model.flavor"], settings["model.args.n_layers"],
                            settings["model.args.dim"], settings["model.args.num_experts"],
                            settings["model.args.top_k"], settings["model.args.vocab_size"])});
  rows.push_back({"Data", settings["training.dataset_path"]});
  const std::string length = settings["training.seq_len"];
  rows.push_back({"Step", fmt::format("{:.0f} tokens in sequences of {}", run.tokens_per_step(), length)});
  const std::string beta = fmt::format("betas {} and {}", settings["optimizer.beta1"], settings["optimizer.beta2"]);
  rows.push_back(
      {"Optimizer", fmt::format("{}, {}, weight decay {}, gradients clipped at {}", settings["optimizer.name"], beta,
                                settings["optimizer.weight_decay"], settings["training.max_norm"])});
  rows.push_back(
      {"Learning rate",
       fmt::format("{} after {} steps of warm-up, {} decay to {} times that", settings["optimizer.lr"],
                   run.warmup_steps(), settings["lr_scheduler.decay_type"], settings["lr_scheduler.min_lr_factor"])});
  const std::string converters = settings["model.converters"];
  rows.push_back({"Precision", settings["training.mixed_precision_param"] +
                                   (converters.empty() || converters == "[]" ? "" : ", " + converters)});
  rows.push_back({"Parallelism", parallelism_text(run, settings)});
  rows.push_back({"Seed", settings["debug.seed"]});
  const std::string threads = run.threads == 1 ? "1 thread" : fmt::format("{} threads", run.threads);
  rows.push_back({"Machine", fmt::format("{}, {}, tessera {}", run.processor, threads, run.program)});
  return rows;
}

std::string configuration_section(const RunRecord& run) {
  const Settings settings(run);
  const TableRows rows = settings.table();
  return "<h2>Configuration</h2>\n" + html_table(summary_rows(run, settings)) +
         fmt::format("<details><summary>All {} keys</summary>{}</details>\n", rows.size() - 1, html_table(rows));
}

}  // namespace

void require_run(const fs::path& folder) {
  require(fs::is_directory(folder), "there is no folder '{}'; expected a run's folder, its job.dump_folder",
          folder.string());
  require(is_run(folder), "'{}' holds no run: it has no {}. Expected a run's folder, its job.dump_folder",
          folder.string(), kMetricsName);
}

RunStatus run_status(const RunRecord& run) {
  if (const auto broken = run.broken()) {
    return {RunStatus::Kind::kBroken, fmt::format("Broke down: the {} is not finite at step {} of {}", broken->what,
                                                  broken->step, run.num_steps())};
  }
  if (run.last_step() >= run.num_steps()) {
    return {RunStatus::Kind::kFinished, fmt::format("Finished: all {} steps", run.num_steps())};
  }
  const double percent = 100.0 * static_cast<double>(run.last_step()) / static_cast<double>(run.num_steps());
  return {RunStatus::Kind::kUnfinished,
          fmt::format("Step {} of {} ({:.0f} %)", run.last_step(), run.num_steps(), std::floor(percent))};
}

std::string run_report_html(const RunRecord& run, std::chrono::system_clock::time_point as_of) {
  require(!run.steps.empty(),
          "'{}' has no line of a step; expected one at least. If the run has just started, wait for its first step",
          (run.folder / kMetricsName).string());
  const fs::path folder = fs::absolute(run.folder).lexically_normal();
  const fs::path last = folder.has_filename() ? folder : folder.parent_path();
  const std::string name = (last.parent_path().filename() / last.filename()).string();  // "mxfp8/seed-1"
  std::string body = status_box(run, as_of) + tiles(run);
  body += "<h2>Curves</h2>\n" + run_figures_html(run) + changes_section(run) + configuration_section(run);
  return html_page(name, "report", std::move(body));
}

}  // namespace tessera
