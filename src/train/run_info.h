// run.json in a run's folder: what the run was, for programs that compare runs (docs/compare.md).
//
//   {"format": "tessera-run", "version": 1, "program": "0.1.0",
//    "config": {"training.steps": "300", ...},      every key of the configuration, its value as TOML
//    "dataset": {"train": "0123456789abcdef", ...}, checksums of the tokens, not of the folder's name
//    "threads": 2, "processor": "AMD EPYC 9575F 64-Core Processor"}
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "train/job_config.h"

namespace tessera {

inline constexpr const char* kRunInfoName = "run.json";

/// Every key of the configuration and its value, as TOML.
std::map<std::string, std::string> config_values(JobConfig config);

/// Checksums of the tokens that the run trains on ("train") and, if it does, validates on ("val"), from the manifests.
std::map<std::string, std::string> dataset_identity(const JobConfig& config);

/// Writes run.json to `folder`, over one that is there. Throws Error.
void write_run_info(const std::filesystem::path& folder, const JobConfig& config);

}  // namespace tessera
