// run.json in a run's folder describes the run, for programs that compare runs (docs/compare.md).
//
//   {"format": "tessera-run", "version": 1, "program": "0.1.0",
//    "run": {"id": "slurm-4711.0-5f1c2a9e", "attempt": 1},   the run and its attempt that wrote this
//    (run/record/run_folder.h) "config": {"training.steps": "300", ...},      every key of the configuration, with its
//    value as TOML "dataset": {"train": "0123456789abcdef", ...}, checksums of the tokens, not of the folder's name
//    "data_ranks": 1,                               number of ranks that have different sequences
//    "threads": 2, "processor": "AMD EPYC 9575F 64-Core Processor",
//    "gpus": ["NVIDIA H200", ...],                  of rank 0's machine, if the run computes on GPUs
//    "changed": {"optimizer.lr": ["0.0008", "0.0004 at step 101"]}}   if it resumed with another configuration
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/job_config.h"
#include "run/record/run_folder.h"

namespace tessera {

/// Returns the processor's name, as the system reports it.
std::string processor_name();
/// Returns the memory of the machine, or the part of it that this process may take in a job of Slurm or a container.
std::size_t machine_memory_bytes();

/// Returns the configuration as run.json, checkpoints and copies in memory record it: training.global_batch_size is
/// resolved, so that it does not depend on the ranks of the next start.
JobConfig recorded_config(JobConfig config, std::int64_t num_data_ranks);

/// Returns every key of the configuration, with its value as TOML.
std::map<std::string, std::string> config_values(JobConfig config);

/// The keys that name datasets.
inline constexpr const char* kTrainDataKey = "training.dataset_path";
inline constexpr const char* kValidationDataKey = "validation.dataset_path";

/// Returns checksums, from the manifests, of the tokens that the run trains on ("train") and, if it does, validates on
/// ("val").
std::map<std::string, std::string> dataset_identity(const JobConfig& config);

/// Sets the token that ends a document, if the configuration leaves that to the data.
void set_document_end(JobConfig& config);

/// Returns whether a run that resumes with another value of the key is another run. Returns false for keys of folders,
/// logs, checkpoints, timeouts, threads and validation. The data counts as "dataset.train", not as its folder.
bool makes_the_run(const std::string& key);

/// Describes a start of the program, as run.json records it.
struct RunStart {
  RunIdentity run;
  JobConfig config;
  std::int64_t num_data_ranks = 1;
  std::int64_t first_step = 1;
  /// The configuration in the checkpoint that the run resumes from. It is used if the folder has no run.json.
  std::optional<JobConfig> saved = {};
  std::vector<std::string> gpus = {};  // names of the GPUs that the run computes on
};

/// Writes run.json to `folder`. At step 1 it replaces an existing file. If the run resumes with another configuration,
/// the changes are under "changed". If all steps are done, an existing file stays. Throws Error.
void write_run_info(const std::filesystem::path& folder, const RunStart& start);

/// Returns the run that has left its files in the folder, if its run.json names the run. Throws Error if it cannot be
/// read.
std::optional<RunIdentity> read_run_identity(const std::filesystem::path& folder);

/// Logs every key that changes in a run that resumes at step `first_step`. Jumps of the learning rate and of the batch
/// get a framed warning, so that nobody misses them. A checkpoint of a run in another folder gets one, too. Both
/// configurations must have training.global_batch_size resolved.
void tell_config_changes(const JobConfig& before, const JobConfig& now, std::int64_t first_step);

}  // namespace tessera
