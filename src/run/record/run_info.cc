#include "run/record/run_info.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/version.h"
#include "data/dataset.h"
#include "run/record/run_files.h"
#include "system/control_groups.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string split_identity(const char* key, const std::filesystem::path& dataset, const std::string& split) {
  const data::Manifest manifest = data::read_for_key(key, [&] { return data::read_manifest(dataset); });
  return to_hex(data::split_checksum(manifest, split));
}

/// Returns the file's object. It is empty if the file is damaged, because that must not keep a run from going on.
ordered_json earlier_info(const std::filesystem::path& path) {
  const std::string text = read_text_file(path);
  try {
    auto info = parse_json<ordered_json>(text, path.string());
    if (info.is_object()) return info;
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
  }
  return ordered_json::object();
}

/// Returns the texts in an object of run.json whose keys make the run. The data's checksums are "dataset.<split>".
std::map<std::string, std::string> run_values(const ordered_json& info) {
  std::map<std::string, std::string> values;
  for (const auto& [member, prefix] : {std::pair{"config", ""}, {"dataset", "dataset."}}) {
    const auto found = info.find(member);
    if (found == info.end() || !found->is_object()) continue;
    for (const auto& [name, value] : found->items()) {
      if (value.is_string() && makes_the_run(prefix + name)) values[prefix + name] = value.get<std::string>();
    }
  }
  return values;
}

/// Returns {"key": ["old", "new at step n", ...]} with earlier changes before `first_step`, and the changes at
/// `first_step`. Steps from there on run again, so earlier changes at those steps are dropped.
ordered_json changes(const ordered_json& earlier, const ordered_json& now, std::int64_t first_step) {
  constexpr std::string_view kAt = " at step ";
  auto values = run_values(earlier);
  if (values.empty()) return ordered_json::object();
  ordered_json changed = ordered_json::object();
  const auto recorded = earlier.find("changed");
  if (recorded != earlier.end() && recorded->is_object()) {
    for (const auto& [key, entries] : recorded->items()) {
      ordered_json kept = ordered_json::array();
      for (const ordered_json& entry : entries) {
        if (!entry.is_string()) continue;
        const std::string text = entry.get<std::string>();
        const std::size_t at = kept.empty() ? std::string::npos : text.rfind(kAt);
        if (at != std::string::npos && std::strtoll(text.c_str() + at + kAt.size(), nullptr, 10) >= first_step) break;
        values[key] = text.substr(0, at);
        kept.push_back(text);
      }
      if (kept.size() > 1) changed[key] = kept;
    }
  }
  const auto defaults = config_values({});
  for (const auto& [key, value] : run_values(now)) {
    auto old = values.find(key);
    // The program that wrote the file did not know this key yet, so it did what the default does.
    if (old == values.end() && defaults.contains(key)) old = values.emplace(key, defaults.at(key)).first;
    if (old == values.end() || old->second == value) continue;
    if (!changed.contains(key)) changed[key] = ordered_json::array({old->second});
    changed[key].push_back(fmt::format("{}{}{}", value, kAt, first_step));
  }
  return changed;
}

/// Warns if the run goes on from a checkpoint that a run in another folder has saved.
void tell_other_folder(const JobConfig& before, const JobConfig& now) {
  const auto folder = [](const JobConfig& config) {
    std::error_code unreadable;
    const fs::path path = fs::weakly_canonical(config.job.dump_folder, unreadable);
    return unreadable ? fs::path(config.job.dump_folder) : path;
  };
  if (folder(before) == folder(now)) return;
  const std::int64_t keep = now.checkpoint.keep_latest_k;
  warn_in_frame(
      fmt::format("THIS RUN GOES ON FROM A CHECKPOINT OF THE RUN IN '{}'", before.job.dump_folder),
      fmt::format("Its own folder is '{}' (job.dump_folder). It saves beside that run's checkpoints{}. That is "
                  "right if the folder was moved. Else stop, and give another checkpoint.folder.",
                  now.job.dump_folder, keep == 0 ? "" : fmt::format(", of which the newest {} stay", keep)));
}

}  // namespace

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t value = line.find(": ");
    if (line.starts_with("model name") && value != std::string::npos) return line.substr(value + 2);
  }
  return "unknown";
}

std::size_t machine_memory_bytes() {
  const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
  const std::size_t memory = pages * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
  return std::min(memory, control_group_limits().memory_bytes.value_or(memory));
}

JobConfig recorded_config(JobConfig config, std::int64_t num_data_ranks) {
  config.training.global_batch_size = config.sequences_per_step(num_data_ranks);
  return config;
}

std::map<std::string, std::string> config_values(JobConfig config) {
  std::map<std::string, std::string> values;
  for (const auto& entry : config_table(config).describe()) values[entry.key] = entry.value;
  return values;
}

std::map<std::string, std::string> dataset_identity(const JobConfig& config) {
  const std::string& train = config.training.dataset_path;
  std::map<std::string, std::string> identity = {{"train", split_identity(kTrainDataKey, train, "train")}};
  if (config.validation.enable) {
    const std::string& validation = config.validation.dataset_path;
    identity["val"] = validation.empty() ? split_identity(kTrainDataKey, train, "val")
                                         : split_identity(kValidationDataKey, validation, "val");
  }
  return identity;
}

void set_document_end(JobConfig& config) {
  if (config.model.args.eos_id >= 0) return;
  const std::string& dataset = config.training.dataset_path;
  config.model.args.eos_id = data::read_for_key(kTrainDataKey, [&] { return data::read_manifest(dataset).eos_id; });
}

bool makes_the_run(const std::string& key) {
  for (const char* prefix : {"job.", "metrics.", "checkpoint.", "profiling.", "validation.", "comm.", "debug.nan_"}) {
    if (key.starts_with(prefix)) return false;
  }
  for (const char* name : {"training.num_threads", "training.dataset", "training.dataset_path", "model.hf_assets_path",
                           "model.print_after_conversion", "dataset.val"}) {
    if (key == name) return false;
  }
  return true;
}

std::optional<RunIdentity> read_run_identity(const std::filesystem::path& folder) {
  const fs::path path = folder / kRunInfoName;
  if (!path_exists(path)) return std::nullopt;
  const ordered_json info = earlier_info(path);
  const auto run = info.find("run");
  if (run == info.end() || !run->is_object() || !run->value("id", ordered_json()).is_string()) return std::nullopt;
  const ordered_json attempt = run->value("attempt", ordered_json());
  return RunIdentity{.id = (*run)["id"].get<std::string>(),
                     .attempt = attempt.is_number_integer() ? attempt.get<std::int64_t>() : 1};
}

void tell_config_changes(const JobConfig& before, const JobConfig& now, std::int64_t first_step) {
  tell_other_folder(before, now);
  auto old = config_values(before);
  for (const auto& [key, value] : config_values(now)) {
    const bool names_a_start =
        key == "job.run_id" || key == "job.attempt" || key == "job.overwrite" || key == "job.node_folder";
    if (!names_a_start && old[key] != value) {
      spdlog::info("from step {} on {} is {}, before {}", first_step, key, value, old[key]);
    }
  }
  // No schedule changes by this factor from one step to the next, except in its first steps and at its end.
  constexpr double kJump = 3.0;
  const auto warn_of_jump = [&](std::string_view what, double last, double next, std::string_view keys) {
    if (std::max(last, next) <= kJump * std::min(last, next)) return;
    warn_in_frame(
        fmt::format("THE {} JUMPS AT STEP {}: {:.4g} BEFORE, {:.4g} FROM HERE ON", what, first_step, last, next),
        fmt::format("If this is not what you want, stop and give the keys the values that they had ({}).", keys));
  };
  const auto rate = [](const JobConfig& config, std::int64_t step) {
    return config.optimizer.lr * config.lr_scheduler.factor(step - 1, config.training.steps);
  };
  const auto tokens = [](const JobConfig& config) {
    return static_cast<double>(config.training.global_batch_size * config.training.seq_len);
  };
  if (rate(before, first_step) != rate(now, first_step)) {
    warn_of_jump("LEARNING RATE", rate(before, first_step - 1), rate(now, first_step),
                 "optimizer.lr, lr_scheduler.*, training.steps");
  }
  warn_of_jump("NUMBER OF TOKENS PER STEP", tokens(before), tokens(now),
               "training.global_batch_size, local_batch_size, seq_len, the number of ranks");
}

void write_run_info(const std::filesystem::path& folder, const RunStart& start) {
  const std::filesystem::path path = folder / kRunInfoName;
  const bool exists = path_exists(path);
  const JobConfig config = recorded_config(start.config, start.num_data_ranks);
  if (start.first_step > config.training.steps && exists) return;
  ordered_json info = {{"format", "tessera-run"},
                       {"version", 1},
                       {"program", version()},
                       {"run", {{"id", start.run.id}, {"attempt", start.run.attempt}}},
                       {"config", config_values(config)},
                       {"dataset", dataset_identity(config)},
                       {"data_ranks", start.num_data_ranks},
                       {"threads", num_threads()},
                       {"processor", processor_name()}};
  if (!start.gpus.empty()) info["gpus"] = start.gpus;
  if (start.first_step > 1 && (exists || start.saved)) {
    const ordered_json earlier = exists ? earlier_info(path) : ordered_json{{"config", config_values(*start.saved)}};
    ordered_json changed = changes(earlier, info, start.first_step);
    if (!changed.empty()) info["changed"] = std::move(changed);
  }
  write_whole_file(path, json_text(info, 2) + "\n");
}

}  // namespace tessera
