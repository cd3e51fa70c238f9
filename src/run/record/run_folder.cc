#include "run/record/run_folder.h"

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <span>

#include "base/file.h"
#include "checkpoint/checkpoint.h"
#include "run/record/run_files.h"
#include "run/record/run_info.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Returns the number that the text begins with, or 0 if it does not begin with digits.
std::int64_t number_in(std::string_view text) {
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

/// Returns an id that no other process has.
std::string new_run_id() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return fmt::format("{:x}-{:x}", std::chrono::duration_cast<std::chrono::microseconds>(now).count(), ::getpid());
}

/// Parses the owner of a lock, which RunIdentity::describe() has written.
std::optional<RunIdentity> parse_owner(std::string_view owner) {
  constexpr std::string_view kRun = "run ", kAttempt = ", attempt ";
  const std::size_t at = owner.rfind(kAttempt);
  if (!owner.starts_with(kRun) || at == owner.npos) return std::nullopt;
  return RunIdentity{.id = std::string(owner.substr(kRun.size(), at - kRun.size())),
                     .attempt = number_in(owner.substr(at + kAttempt.size()))};
}

bool has_metrics(const fs::path& folder) {
  std::error_code missing;
  const std::uintmax_t size = fs::file_size(folder / kMetricsName, missing);
  return !missing && size > 0;
}

/// Throws Error if the run begins at step 1 in a folder where another run has left its metrics.
void require_nothing_is_lost(const JobConfig& config, const fs::path& folder, const fs::path& checkpoints,
                             const RunIdentity& run, const std::optional<RunIdentity>& previous) {
  if (previous && run.follows(*previous)) return;
  const std::vector<std::int64_t> steps = steps_of_folders(checkpoints);
  const bool resumes = config.checkpoint.enable && !steps.empty();  // or reports why it cannot
  if (config.job.overwrite && resumes) {
    fail(
        "job.overwrite begins at step 1, but '{}' holds the checkpoint of step {}, from which this run would go on; "
        "expected a folder without checkpoints. Leave job.overwrite out to go on, move the checkpoints away, or give "
        "another --checkpoint.folder",
        checkpoints.string(), steps.back());
  }
  if (config.job.overwrite || resumes || !has_metrics(folder)) return;
  const std::string go_on =
      steps.empty() ? "" : fmt::format(", --checkpoint.enable to go on from step {}", steps.back());
  fail(
      "the folder '{}' (job.dump_folder) holds the metrics of another run{}, and this run begins at step 1; expected a "
      "folder without a run. Give another --job.dump_folder{}, or --job.overwrite to replace {} and {}",
      folder.string(), steps.empty() ? " without checkpoints" : "", go_on, kMetricsName, kRunInfoName);
}

}  // namespace

std::int64_t num_slurm_requeues() { return number_in(variable("SLURM_RESTART_COUNT")); }

RunIdentity identify_run(const JobConfig& config, const std::optional<RunIdentity>& previous) {
  RunIdentity run{.id = config.job.run_id, .attempt = config.job.attempt, .is_counted = config.job.attempt > 0};
  const std::string slurm_job = variable("SLURM_JOB_ID");
  if (run.id.empty() && !slurm_job.empty()) {
    const std::string step = variable("SLURM_STEP_ID");
    // A job may hold several runs. Each has a folder, which a requeued job finds again.
    const std::string folder = fs::absolute(config.job.dump_folder).lexically_normal().string();
    const auto of_folder = static_cast<std::uint32_t>(checksum(std::as_bytes(std::span(folder))));
    run.id = fmt::format("slurm-{}.{}-{:08x}", slurm_job, step.empty() ? "batch" : step, of_folder);
    if (!run.is_counted) run.attempt = 1 + num_slurm_requeues();
    run.is_counted = true;
  }
  run.is_new = run.id.empty();
  if (run.is_new) run.id = new_run_id();
  if (!run.is_counted) run.attempt = previous && previous->id == run.id ? previous->attempt + 1 : 1;
  return run;
}

void require_writable_folder(const fs::path& folder, const char* key, const std::string& probe) {
  try {
    create_folder(folder);
    const AtomicFile removed_at_once(folder / probe);
  } catch (const Error& error) {
    throw Error(fmt::format("nothing can be written to '{}' ({}): {}; expected a folder that this user may write to",
                            folder.string(), key, error.what()),
                error.status());
  }
}

RunFolder::RunFolder(const JobConfig& config, const fs::path& checkpoints) : folder_(config.job.dump_folder) {
  const std::optional<RunIdentity> previous = read_run_identity(folder_);
  run_ = identify_run(config, previous);
  if (previous) require_not_later(*previous);
  lock(lock_, folder_, "job.dump_folder");
  if (config.checkpoint.enable) {
    std::error_code missing;  // a folder that is not there is another one, and lock() makes it
    if (!fs::equivalent(checkpoints, folder_, missing)) lock(checkpoints_lock_, checkpoints, "checkpoint.folder");
  }
  require_nothing_is_lost(config, folder_, checkpoints, run_, previous);
}

void RunFolder::require_not_later(const RunIdentity& other) const {
  if (!other.follows(run_)) return;
  throw Error(
      fmt::format("{}: a later attempt, {}, has begun in the folder '{}' (job.dump_folder); this process writes "
                  "nothing. Give a higher job.attempt to start the run once more",
                  run_.describe(), other.attempt, folder_.string()),
      ExitStatus::kTakenOver);
}

void RunFolder::lock(std::optional<FileLock>& lock, const fs::path& folder, const char* key) const {
  const auto is_earlier_attempt = [&](const std::string& owner) {
    const std::optional<RunIdentity> holder = parse_owner(owner);
    if (holder) require_not_later(*holder);
    return run_.is_counted && holder && run_.follows(*holder);
  };
  require_writable_folder(folder, key, "probe");
  lock.emplace(folder / kRunLockName, fmt::format("the folder '{}' ({})", folder.string(), key),
               FileLock::Options{.owner = run_.describe(), .takes_over = is_earlier_attempt});
}

void RunFolder::require_held() const {
  for (const std::optional<FileLock>* lock : {&lock_, &checkpoints_lock_}) {
    if (!*lock || (*lock)->is_held()) continue;
    throw Error(fmt::format("{}: a later attempt has taken over the folder '{}', or its {} was deleted; this process "
                            "writes nothing more",
                            run_.describe(), folder_.string(), kRunLockName),
                ExitStatus::kTakenOver);
  }
}

}  // namespace tessera
