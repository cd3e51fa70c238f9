#include "train/run_info.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "data/dataset.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t value = line.find(": ");
    if (line.starts_with("model name") && value != std::string::npos) return line.substr(value + 2);
  }
  return "unknown";
}

std::string split_identity(const std::filesystem::path& dataset, const std::string& split) {
  return fmt::format("{:016x}", data::split_checksum(data::read_manifest(dataset), split));
}

}  // namespace

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

void write_run_info(const std::filesystem::path& folder, const JobConfig& config) {
  const nlohmann::ordered_json info = {{"format", "tessera-run"},
                                       {"version", 1},
                                       {"program", TESSERA_VERSION},
                                       {"config", config_values(config)},
                                       {"dataset", dataset_identity(config)},
                                       {"threads", num_threads()},
                                       {"processor", processor_name()}};
  AtomicFile file(folder / kRunInfoName);
  file.write(info.dump(2) + "\n");
  file.commit();
}

}  // namespace tessera
