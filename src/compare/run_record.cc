#include "compare/run_record.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/parse_number.h"
#include "base/text.h"
#include "compare/statistics.h"
#include "config/job_config.h"
#include "run/record/run_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Fields = JsonFields<json>;

constexpr std::uint64_t kMaxStep = 1'000'000'000'000;
constexpr std::uint64_t kMaxBytes = 1ULL << 62;

std::map<std::string, std::string> texts_of(const Fields& fields, const char* name) {
  const Fields object(fields.at(name), fields.place_of(name));
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : fields.at(name).items()) texts[key] = object.text(key.c_str());
  return texts;
}

void read_changed(const Fields& fields, RunRecord& run) {
  constexpr const char* kName = "changed";
  if (fields.find(kName) == nullptr) return;
  const Fields keys(fields.at(kName), fields.place_of(kName));
  for (const auto& [key, values] : fields.at(kName).items()) {
    for (const json& value : keys.array(key.c_str())) {
      require(value.is_string(), "{}: expected strings, got {}", keys.place_of(key.c_str()), describe_json(value));
      run.changed[key].push_back(value.get<std::string>());
    }
  }
}

void read_info(const fs::path& path, RunRecord& run) {
  require(fs::exists(path),
          "there is no '{}': the run is of a version that did not write it. Run `tessera train` again with the same "
          "configuration and job.dump_folder: a run that is finished and still has its last checkpoint only writes "
          "that file. "
          "Without the checkpoint it would be trained again, and its metrics lost",
          path.string());
  const std::string name = fmt::format("'{}'", path.string());
  const json info = parse_json(read_text_file(path), name);
  const Fields fields(info, name + ", $");
  require(fields.text("format") == "tessera-run" && fields.count("version") == 1,
          "{}: expected format \"tessera-run\", version 1, got {}, {}", name, describe_json(fields.at("format")),
          describe_json(fields.at("version")));
  run.config = texts_of(fields, "config");
  run.dataset = texts_of(fields, "dataset");
  read_changed(fields, run);
  run.program = fields.text("program");
  run.processor = fields.text("processor");
  run.threads = static_cast<std::int64_t>(fields.count("threads", std::numeric_limits<std::int32_t>::max()));
  if (fields.contains("data_ranks")) {
    run.num_data_ranks =
        static_cast<std::int64_t>(fields.count("data_ranks", std::numeric_limits<std::int32_t>::max()));
  }
  require(run.num_steps() > 0, "{}: training.steps is {}; expected a number above 0", name, run.num_steps());
  run.seed();  // throws Error if it is no number
}

/// Returns a number, or NaN for null, which stands for numbers that JSON does not have. The line must have `name`.
double number_or_nan(const Fields& fields, const json& line, const char* name) {
  if (line.contains(name) && line[name].is_null()) return std::numeric_limits<double>::quiet_NaN();
  return fields.number(name);
}

/// Returns a number, or NaN for null and for a missing `name`.
double optional_number(const Fields& fields, const json& line, const char* name) {
  return line.contains(name) ? number_or_nan(fields, line, name) : std::numeric_limits<double>::quiet_NaN();
}

void read_phases(const Fields& fields, RunRecord& run) {
  constexpr const char* kName = "seconds";
  const json none = json::object();
  const json* found = fields.find(kName);
  const json& phases = found == nullptr ? none : *found;
  const Fields phase_fields(phases, fields.place_of(kName));
  run.data_seconds.push_back(optional_number(phase_fields, phases, "data"));
  run.forward_seconds.push_back(optional_number(phase_fields, phases, "forward"));
  run.backward_seconds.push_back(optional_number(phase_fields, phases, "backward"));
  run.optimizer_seconds.push_back(optional_number(phase_fields, phases, "optimizer"));
}

void read_expert_loads(const Fields& fields, RunRecord& run) {
  constexpr const char* kName = "expert_load_per_layer";
  std::vector<double>& loads = run.expert_loads.emplace_back();
  if (fields.find(kName) == nullptr) return;
  for (const json& load : fields.array(kName)) {
    require(load.is_number() || load.is_null(), "{}: expected numbers, got {}", fields.place_of(kName),
            describe_json(load));
    loads.push_back(load.is_null() ? std::numeric_limits<double>::quiet_NaN() : load.get<double>());
  }
}

/// Returns n for "layers.<n>.…", and -1 for other names.
int layer_of(std::string_view site) {
  constexpr std::string_view kPrefix = "layers.";
  if (!site.starts_with(kPrefix)) return -1;
  const std::string_view rest = site.substr(kPrefix.size());
  return std::max(-1, parse_number<int>(rest.substr(0, rest.find('.'))).value_or(-1));
}

void read_sqnr(const Fields& fields, std::int64_t step, RunRecord& run) {
  constexpr const char* kName = "quantization_sqnr_db";
  const json* sites = fields.find(kName);
  if (sites == nullptr) return;
  const Fields site_fields(*sites, fields.place_of(kName));
  run.last_sqnr.clear();
  std::map<std::string, std::map<int, RunningMean>> means;
  for (const auto& [site, operands] : sites->items()) {
    if (operands.is_null()) continue;
    const Fields operand_fields(operands, site_fields.place_of(site.c_str()));
    for (const auto& [operand, value] : operands.items()) {
      if (value.is_null()) continue;  // nothing was quantized, or nothing was lost
      const double decibel = operand_fields.number(operand.c_str());
      run.last_sqnr[site][operand] = decibel;
      means[operand][layer_of(site)].add(decibel);
    }
  }
  SqnrPoint point{.step = step, .by_layer = {}};
  for (const auto& [operand, layers] : means) {
    for (const auto& [layer, mean] : layers) point.by_layer[operand][layer] = mean.mean();
  }
  if (!point.by_layer.empty()) run.sqnr.push_back(std::move(point));
}

void read_line(const std::string& text, const std::string& place, RunRecord& run) {
  const json line = parse_json(text, place);
  const Fields fields(line, place + ", $");
  const auto step = static_cast<std::int64_t>(fields.count("step", kMaxStep));
  if (line.contains("validation_loss")) run.validation_losses[step] = number_or_nan(fields, line, "validation_loss");
  if (line.contains("checkpoint_seconds")) {
    run.checkpoints.push_back({.step = step,
                               .stall_seconds = fields.number("checkpoint_stall_seconds"),
                               .seconds = fields.number("checkpoint_seconds")});
  }
  if (!line.contains("loss")) return;
  require(step > run.last_step(), "{}: step {} comes after step {}; expected ascending steps", place, step,
          run.last_step());
  run.steps.push_back(step);
  run.losses.push_back(number_or_nan(fields, line, "loss"));
  run.grad_norms.push_back(number_or_nan(fields, line, "grad_norm"));
  run.tokens_per_second.push_back(fields.number("tokens_per_second"));
  run.memory_bytes.push_back(static_cast<double>(fields.count("memory_bytes", kMaxBytes)));
  run.peak_memory_bytes = std::max(run.peak_memory_bytes, run.memory_bytes.back());
  run.mtp_losses.push_back(optional_number(fields, line, "mtp_loss"));
  run.learning_rates.push_back(optional_number(fields, line, "lr"));
  run.mfus.push_back(optional_number(fields, line, "mfu"));
  run.step_seconds.push_back(optional_number(fields, line, "step_seconds"));
  read_phases(fields, run);
  read_expert_loads(fields, run);
  read_sqnr(fields, step, run);
}

void read_metrics(const fs::path& path, RunRecord& run) {
  require(fs::exists(path), "there is no '{}': the run has not made a step", path.string());
  std::istringstream file(read_text_file(path));
  std::int64_t number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    const bool cut_off = file.eof() && !json::accept(text);
    if (!cut_off) read_line(text, fmt::format("'{}', line {}", path.string(), number), run);
  }
}

}  // namespace

std::optional<std::int64_t> RunRecord::find_integer(const std::string& key) const {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  const std::string& text = found->second;
  const std::optional<std::int64_t> value = parse_number<std::int64_t>(text);
  require(value.has_value(), "'{}': {} is '{}'; expected a whole number", (folder / kRunInfoName).string(), key,
          printable(text));
  return value;
}

std::int64_t RunRecord::integer(const std::string& key) const {
  const std::optional<std::int64_t> value = find_integer(key);
  require(value.has_value(), "'{}' has no {}", (folder / kRunInfoName).string(), key);
  return *value;
}

double RunRecord::tokens_per_step() const {
  const JobConfig defaults;
  const auto local = find_integer("training.local_batch_size").value_or(defaults.training.local_batch_size);
  const auto global = find_integer("training.global_batch_size").value_or(defaults.training.global_batch_size);
  const double sequences =
      global > 0 ? static_cast<double>(global) : static_cast<double>(local) * static_cast<double>(num_data_ranks);
  return sequences * static_cast<double>(find_integer("training.seq_len").value_or(defaults.training.seq_len));
}

std::int64_t RunRecord::warmup_steps() const {
  return find_integer("lr_scheduler.warmup_steps").value_or(JobConfig().lr_scheduler.warmup_steps);
}

std::optional<double> RunRecord::uniform_loss() const {
  const auto entries = find_integer("model.args.vocab_size");
  if (!entries || *entries < 2) return {};
  return std::log(static_cast<double>(*entries));
}

std::optional<double> RunRecord::gradient_clip() const {
  const auto found = config.find("training.max_norm");
  const std::optional<double> limit =
      found == config.end() ? JobConfig().training.max_norm : parse_number<double>(found->second);
  return limit && std::isfinite(*limit) && *limit > 0.0 ? limit : std::nullopt;
}

std::int64_t RunRecord::first_moe_layer() const {
  return find_integer("model.args.n_dense_layers").value_or(ModelConfig().n_dense_layers);
}

std::vector<ConfigChange> RunRecord::changes() const {
  constexpr std::string_view kAt = " at step ";
  std::vector<ConfigChange> result;
  for (const auto& [key, values] : changed) {
    std::string before = values.empty() ? "" : values.front();
    for (std::size_t i = 1; i < values.size(); ++i) {
      const std::size_t at = values[i].rfind(kAt);
      std::optional<std::int64_t> step;
      if (at != std::string::npos) step = parse_number<std::int64_t>(values[i].substr(at + kAt.size()));
      require(step.has_value(), "'{}', $.changed.{}: expected \"VALUE at step N\", got '{}'",
              (folder / kRunInfoName).string(), printable(key), printable(values[i]));
      const std::string after = values[i].substr(0, at);
      result.push_back({key, before, after, *step});
      before = after;
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const ConfigChange& a, const ConfigChange& b) { return a.step < b.step; });
  return result;
}

std::optional<Break> RunRecord::broken() const {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (!std::isfinite(losses[i])) return Break{steps[i], "loss"};
    if (!std::isfinite(grad_norms[i])) return Break{steps[i], "gradient norm"};
  }
  return {};
}

bool RunRecord::ended() const {
  return finished() || (!steps.empty() && !(std::isfinite(losses.back()) && std::isfinite(grad_norms.back())));
}

RunRecord read_run_info(const fs::path& folder) {
  RunRecord run;
  run.folder = folder;
  read_info(folder / kRunInfoName, run);
  return run;
}

RunRecord read_run(const fs::path& folder) {
  RunRecord run = read_run_info(folder);
  read_metrics(folder / kMetricsName, run);
  return run;
}

bool is_run(const fs::path& folder) {
  std::error_code unreadable;  // such as that of a lost+found, which is no run
  return fs::exists(folder / kRunInfoName, unreadable) || fs::exists(folder / kMetricsName, unreadable);
}

std::vector<fs::path> find_runs(const fs::path& path) {
  require(!fs::is_regular_file(path),
          "'{}' is no folder of runs; if it is a configuration, its name must end in .toml, and one with spaces needs "
          "double quotes within the side",
          path.string());
  require(fs::is_directory(path),
          "there is no folder '{}'; expected a run's folder, a folder of runs, or a configuration (.toml)",
          path.string());
  if (is_run(path)) return {path};
  std::vector<fs::path> runs;
  for (const auto& entry : fs::directory_iterator(path)) {
    std::error_code unreadable;
    if (entry.is_directory(unreadable) && is_run(entry.path())) runs.push_back(entry.path());
  }
  require(!runs.empty(), "'{}' holds no run: neither it nor a folder in it has a {}", path.string(), kMetricsName);
  std::sort(runs.begin(), runs.end());
  return runs;
}

}  // namespace tessera
