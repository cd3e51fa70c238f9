// Loads what a run starts from: the checkpoint that it resumes from, or initial weights.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/shards.h"
#include "comm/ranks.h"
#include "config/job_config.h"
#include "data/loader.h"
#include "params/parameters.h"

namespace tessera {

/// Describes the checkpoint that a run resumes from.
struct ResumedFrom {
  std::int64_t step = 0;
  /// The configuration that it was saved with, training.global_batch_size resolved. It is not set if this program
  /// cannot read it.
  std::optional<JobConfig> config;
};

/// Finds the checkpoint to resume from, checks it and loads it. The run may have had another mesh.
class CheckpointReader {
 public:
  /// All references must outlive the object. `folder` is that of the run's checkpoints.
  CheckpointReader(const JobConfig& config, Ranks& ranks, Parameters& parameters, std::filesystem::path folder)
      : config_(config), ranks_(ranks), parameters_(parameters), folder_(std::move(folder)) {}

  /// Does what Checkpointer::resume says. `saver` is the run and the attempt of this process.
  std::optional<ResumedFrom> resume(data::Loader& loader, const Saver& saver, std::optional<std::int64_t> in_memory);

  /// Returns the steps of checkpoints that resume() has passed over, because they are damaged or later than
  /// checkpoint.load_step. Only rank 0 knows the latter.
  const std::set<std::int64_t>& passed_over() const { return passed_over_; }
  /// Must be called when a checkpoint of this step is saved.
  void note_saved(std::int64_t step) { passed_over_.erase(step); }

 private:
  /// Describes a checkpoint to load.
  struct Stored {
    std::filesystem::path path;
    CheckpointManifest manifest = {};  // `files` lists only those that this rank verifies
    bool has_optimizer = false;
  };
  std::optional<std::int64_t> choose_step(const Saver& saver);
  /// Returns the step of the newest checkpoint's folder below `limit`.
  std::optional<std::int64_t> newest_below(std::int64_t limit);
  // Only a file that is missing or has a wrong content is damaged. If one cannot be read, the functions that check
  // files throw Error: the file may be whole.

  /// Reads the manifest on rank 0, which tells the others. Returns what is wrong with it, or nullopt if nothing is.
  std::optional<std::string> read_manifest(Stored& stored);
  /// Checks the files, which the ranks share among themselves. Returns what is wrong with them, or nullopt if nothing
  /// is.
  std::optional<std::string> check_files(const Stored& stored);
  /// Loads this rank's numbers.
  void load_numbers(const Stored& stored);
  /// Throws Error, which names the damage and the newest other checkpoint, or copy in memory, that is intact.
  [[noreturn]] void fail_damaged(std::int64_t step, const std::string& damage, std::optional<std::int64_t> in_memory);
  /// Logs a framed warning about the checkpoints that were passed over, if there are any.
  void tell_what_was_passed_over(std::int64_t step, std::int64_t newest, const std::string& passed_over) const;
  bool is_first_rank() const { return ranks_.rank() == 0; }

  const JobConfig& config_;
  Ranks& ranks_;
  Parameters& parameters_;
  std::filesystem::path folder_;
  std::set<std::int64_t> passed_over_;
};

/// Returns whether a key of the model may change in the course of a run. DeepSeek-V3 trained its last tokens with other
/// values.
bool is_of_schedule(std::string_view key);

/// Returns the keys that define the model and the numbers that it computes, with their values.
nlohmann::json model_identity(JobConfig config);

/// Loads the weights that a run starts from, from a checkpoint or from Hugging Face files. Returns false if the
/// configuration names none.
bool load_initial_weights(const JobConfig& config, Ranks& ranks, Parameters& parameters);

}  // namespace tessera
