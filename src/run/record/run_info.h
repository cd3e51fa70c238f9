// run.json in a run's folder: what the run was, for programs that compare runs (docs/compare.md).
//
//   {"format": "tessera-run", "version": 1, "program": "0.1.0",
//    "run": {"id": "slurm-4711.0", "attempt": 1},   which run wrote this, and which process of it
//    (run/record/run_folder.h) "config": {"training.steps": "300", ...},      every key of the configuration, its value
//    as TOML "dataset": {"train": "0123456789abcdef", ...}, checksums of the tokens, not of the folder's name
//    "data_ranks": 1,                               ranks that have other sequences
//    "threads": 2, "processor": "AMD EPYC 9575F 64-Core Processor",
//    "gpus": ["NVIDIA H200", ...],                  of rank 0's machine, if the run computes on GPUs
//    "changed": {"optimizer.lr": ["0.0008", "0.0004 at step 101"]}}   if it was resumed with another configuration
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/job_config.h"
#include "run/record/run_folder.h"

namespace tessera {

/// Returns the processor's name, as the system gives it.
std::string processor_name();
/// Returns the memory of the whole machine, or what the process may take of it where it runs (a job of Slurm, a
/// container).
std::size_t machine_memory_bytes();

/// Every key of the configuration and its value, as TOML.
std::map<std::string, std::string> config_values(JobConfig config);

/// The keys that name datasets.
inline constexpr const char* kTrainDataKey = "training.dataset_path";
inline constexpr const char* kValidationDataKey = "validation.dataset_path";

/// Checksums of the tokens that the run trains on ("train") and, if it does, validates on ("val"), from the manifests.
std::map<std::string, std::string> dataset_identity(const JobConfig& config);

/// Sets which token ends a document, if the configuration leaves that to the data.
void set_document_end(JobConfig& config);

/// Whether a run that goes on with another value of the key is another run. Not so for folders, logs, checkpoints,
/// timeouts and validation. The data counts as "dataset.train", not as its folder.
bool makes_the_run(const std::string& key);

/// A start of the program, as run.json records it.
struct RunStart {
  RunIdentity run;
  JobConfig config;
  std::int64_t num_data_ranks = 1;
  std::int64_t first_step = 1;
  /// The configuration in the checkpoint that the run goes on from. It counts if the folder has no run.json.
  std::optional<JobConfig> saved = {};
  std::vector<std::string> gpus = {};  // names of those that the run computes on
};

/// Writes run.json to `folder`. At step 1, over what is there. A run that goes on with another configuration has it
/// under "changed"; one that is done already keeps its file. Throws Error.
void write_run_info(const std::filesystem::path& folder, const RunStart& start);

/// Which run has left its files in the folder, if its run.json says so.
std::optional<RunIdentity> read_run_identity(const std::filesystem::path& folder);

/// Says in the log what changes in a run that goes on at step `first_step`: every key, and, so that nobody misses it,
/// jumps of the learning rate and of the batch. Both configurations have training.global_batch_size resolved.
void tell_config_changes(const JobConfig& before, const JobConfig& now, std::int64_t first_step);

}  // namespace tessera
