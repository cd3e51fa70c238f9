#include "train/run_info.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "data/dataset.h"
#include "tensor/parallel.h"
#include "train/run_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string split_identity(const std::filesystem::path& dataset, const std::string& split) {
  return to_hex(data::split_checksum(data::read_manifest(dataset), split));
}

/// The file's object; empty if it is damaged, which must not keep a run from going on.
ordered_json earlier_info(const std::filesystem::path& path) {
  const ordered_json info = ordered_json::parse(read_text_file(path), nullptr, false);
  return info.is_object() ? info : ordered_json::object();
}

/// The texts of an object, the data's checksums as "dataset.<split>", of the keys that make the run.
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

/// {"key": ["old", "new at step n", ...]}: what changed before, up to `first_step`, and what changes there. Steps from
/// there on are run again, so what changed in them before is forgotten.
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
    // A key that the file's program did not know yet: it did what the default does.
    if (old == values.end() && defaults.contains(key)) old = values.emplace(key, defaults.at(key)).first;
    if (old == values.end() || old->second == value) continue;
    if (!changed.contains(key)) changed[key] = ordered_json::array({old->second});
    changed[key].push_back(fmt::format("{}{}{}", value, kAt, first_step));
  }
  return changed;
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
  return std::min(pages * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE)),
                  memory_limit_of_groups("/proc/self/cgroup", "/sys/fs/cgroup"));
}

std::size_t memory_limit_of_groups(const fs::path& groups, const fs::path& root) {
  std::size_t least = std::numeric_limits<std::size_t>::max();
  std::ifstream file(groups);  // lines of number:controllers:path
  for (std::string line; std::getline(file, line);) {
    const std::size_t name = line.find(':'), path = line.find(':', name + 1);
    if (name == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = line.substr(name + 1, path - name - 1);
    const bool is_version_2 = controllers.empty();
    if (!is_version_2 && controllers != "memory") continue;
    const fs::path mounted = is_version_2 ? root : root / "memory";
    const char* limit_file = is_version_2 ? "memory.max" : "memory.limit_in_bytes";
    for (fs::path group = line.substr(path + 1);; group = group.parent_path()) {
      std::size_t limit = 0;  // "max" is no number
      if (std::ifstream(mounted / group.relative_path() / limit_file) >> limit && limit > 0)
        least = std::min(least, limit);
      if (!group.has_relative_path()) break;
    }
  }
  return least;
}

std::map<std::string, std::string> config_values(JobConfig config) {
  std::map<std::string, std::string> values;
  for (const auto& entry : config_table(config).describe()) values[entry.key] = entry.value;
  return values;
}

std::map<std::string, std::string> dataset_identity(const JobConfig& config) {
  const std::string& train = config.training.dataset_path;
  std::map<std::string, std::string> identity = {{"train", split_identity(train, "train")}};
  if (config.validation.enable) {
    const std::string& validation = config.validation.dataset_path;
    identity["val"] = split_identity(validation.empty() ? train : validation, "val");
  }
  return identity;
}

void set_document_end(JobConfig& config) {
  if (config.model.args.eos_id < 0) config.model.args.eos_id = data::read_manifest(config.training.dataset_path).eos_id;
}

bool makes_the_run(const std::string& key) {
  for (const char* prefix : {"job.", "metrics.", "checkpoint.", "profiling.", "validation.", "comm."}) {
    if (key.starts_with(prefix)) return false;
  }
  for (const char* name :
       {"training.num_threads", "training.dataset_path", "model.print_after_conversion", "dataset.val"}) {
    if (key == name) return false;
  }
  return true;
}

void write_run_info(const std::filesystem::path& folder, JobConfig config, std::int64_t num_data_ranks,
                    std::int64_t first_step, const std::vector<std::string>& gpus) {
  const std::filesystem::path path = folder / kRunInfoName;
  config.training.global_batch_size = config.sequences_per_step(num_data_ranks);  // whatever the next start's ranks
  if (first_step > config.training.steps && std::filesystem::exists(path)) return;
  ordered_json info = {{"format", "tessera-run"},
                       {"version", 1},
                       {"program", TESSERA_VERSION},
                       {"config", config_values(config)},
                       {"dataset", dataset_identity(config)},
                       {"data_ranks", num_data_ranks},
                       {"threads", num_threads()},
                       {"processor", processor_name()}};
  if (!gpus.empty()) info["gpus"] = gpus;
  if (first_step > 1 && std::filesystem::exists(path)) {
    ordered_json changed = changes(earlier_info(path), info, first_step);
    if (!changed.empty()) info["changed"] = std::move(changed);
  }
  AtomicFile file(path);
  file.write(json_text(info, 2) + "\n");
  file.commit();
}

}  // namespace tessera
