// The folders that a run writes to: who may write there, and what of an earlier run is there already.
#pragma once

#include <fmt/core.h>

#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "config/job_config.h"
#include "system/file_lock.h"

namespace tessera {

/// Which run this process belongs to. The processes that a launcher or a requeue starts one after another are the
/// attempts of one run.
struct RunIdentity {
  std::string id;
  std::int64_t attempt = 1;
  /// Whether job.attempt or Slurm says which attempt this is.
  bool is_counted = false;
  /// Whether no other process can have this id, because nobody gave it.
  bool is_new = false;

  std::string describe() const { return fmt::format("run {}, attempt {}", id, attempt); }
  /// Whether this process was started in the place of the other one.
  bool follows(const RunIdentity& other) const { return id == other.id && attempt > other.attempt; }
};

/// How often Slurm has requeued the job that this process belongs to; 0 without Slurm.
std::int64_t num_slurm_requeues();

/// From job.run_id and job.attempt; without job.run_id, from the Slurm job and step and the number of requeues; without
/// Slurm, a new id. `previous`: the run whose files are in the folder. An attempt that nobody counts follows that one.
RunIdentity identify_run(const JobConfig& config, const std::optional<RunIdentity>& previous);

/// Holds the folders of a run, for rank 0.
class RunFolder {
 public:
  /// Creates and locks job.dump_folder and, with checkpoint.enable, the folder of checkpoints. Throws Error if
  ///   - another program uses one of them; a later attempt of the same run takes them over from it;
  ///   - a later attempt of the same run has begun, which ends the program with ExitStatus::kTakenOver;
  ///   - the files of another run would be overwritten, unless job.overwrite is set;
  ///   - a folder cannot be written to.
  RunFolder(const JobConfig& config, const std::filesystem::path& checkpoints);

  const RunIdentity& run() const { return run_; }
  /// Throws Error once a later attempt of the run has taken a folder over.
  void require_held() const;

 private:
  /// Throws Error if this process was started before the other one, whose place it would take.
  void require_not_later(const RunIdentity& other) const;
  void lock(std::optional<FileLock>& its, const std::filesystem::path& folder, const char* key) const;

  std::filesystem::path folder_;
  RunIdentity run_;
  std::optional<FileLock> lock_, checkpoints_lock_;
};

}  // namespace tessera
