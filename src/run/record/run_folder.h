// The folders that a run writes to: they are locked for one process, and files of another run are protected.
#pragma once

#include <fmt/core.h>

#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "config/job_config.h"
#include "system/file_lock.h"

namespace tessera {

/// Identifies the run and the attempt of this process. The processes that a launcher or a requeue starts one after
/// another are the attempts of one run.
struct RunIdentity {
  std::string id;
  std::int64_t attempt = 1;
  /// True if job.attempt or Slurm gives the number of this attempt.
  bool is_counted = false;
  /// True if this process has made the id, so that no other process can have it.
  bool is_new = false;

  std::string describe() const { return fmt::format("run {}, attempt {}", id, attempt); }
  /// Returns whether this process was started to replace the other one.
  bool follows(const RunIdentity& other) const { return id == other.id && attempt > other.attempt; }
};

/// Returns how often Slurm has requeued this process's job. Returns 0 without Slurm.
std::int64_t num_slurm_requeues();

/// Identifies the run by job.run_id and job.attempt. Without job.run_id it uses the Slurm job, its step and the number
/// of requeues. Without Slurm it makes a new id. `previous` is the run whose files are in the folder. If nothing counts
/// the attempts, this one gets the number after that of `previous`, if that has the same id.
RunIdentity identify_run(const JobConfig& config, const std::optional<RunIdentity>& previous);

/// Creates the folder, and a file in it for a moment. Throws Error that names `key` if this process cannot do that.
/// Processes that try at the same time need different `probe`s, which name the file.
void require_writable_folder(const std::filesystem::path& folder, const char* key, const std::string& probe);

/// Locks the folders of a run, for rank 0.
class RunFolder {
 public:
  /// Creates and locks job.dump_folder and, with checkpoint.enable, the folder of checkpoints. Throws Error if
  /// - another program uses one of them, unless that is an earlier attempt of the same run, which then loses the
  ///   folders,
  /// - a later attempt of the same run has begun, which ends the program with ExitStatus::kTakenOver,
  /// - the files of another run would be overwritten, unless job.overwrite is set,
  /// - a folder cannot be written to.
  RunFolder(const JobConfig& config, const std::filesystem::path& checkpoints);

  const RunIdentity& run() const { return run_; }
  /// Throws Error if a later attempt of the run has taken a folder over, and SystemError if the system cannot tell.
  void require_held() const;

 private:
  /// Throws Error if the other process is a later attempt of this run.
  void require_not_later(const RunIdentity& other) const;
  /// Creates the folder if it is not there, and locks it. `key` names it in errors.
  void lock(std::optional<FileLock>& lock, const std::filesystem::path& folder, const char* key) const;

  std::filesystem::path folder_;
  RunIdentity run_;
  std::optional<FileLock> lock_, checkpoints_lock_;
};

}  // namespace tessera
