// A run's checkpoints: saving while training waits or goes on, resuming on any mesh, initial weights.
//
// A save has two phases. In the first every rank of the first replica writes its shards; in the second, which begins
// when all have told that they are done, rank 0 writes the manifest and gives the folder its name. Ranks agree between
// the phases, so a failure of one is one of all, and no thread in the background communicates.
#pragma once

#include <array>
#include <functional>
#include <future>
#include <limits>
#include <optional>
#include <stop_token>
#include <utility>

#include "base/stopwatch.h"
#include "checkpoint/checkpoint.h"
#include "comm/ranks.h"
#include "config/job_config.h"
#include "data/loader.h"
#include "data/tokenizers/tokenizer.h"
#include "params/parameters.h"

namespace tessera {

/// A save that is committed.
struct SavedCheckpoint {
  std::int64_t step = 0;
  double stall_seconds = 0.0;  // training waited for it so long
  double seconds = 0.0;        // until it was committed
};

/// The checkpoint that a run goes on from.
struct ResumedFrom {
  std::int64_t step = 0;
  /// What it was saved with, training.global_batch_size resolved; none if this program cannot read it any more.
  std::optional<JobConfig> config;
};

class Checkpointer {
 public:
  /// All of these must stay.
  Checkpointer(const JobConfig& config, Ranks& ranks, const Mesh& mesh, Parameters& parameters,
               const data::Tokenizer& tokenizer);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Returns the bytes of the copy in the host's memory that saves write from; 0 if there is none.
  std::size_t snapshot_bytes() const;
  void allocate_snapshot();
  /// `on_saved` is told of every save when it is committed.
  void set_on_saved(std::function<void(const SavedCheckpoint&)> on_saved) { on_saved_ = std::move(on_saved); }

  /// Which attempt of which run saves; to be told before resume().
  void set_saver(Saver saver) { saver_ = std::move(saver); }

  /// Called by rank 0 before a save gets its name. If it throws Error, the save fails.
  void set_before_commit(std::function<void()> before_commit) { before_commit_ = std::move(before_commit); }

  const std::filesystem::path& folder() const { return folder_; }

  // All ranks must call the functions below together. They throw Error on all ranks if they fail on one.

  /// Loads masters, moments, buffers and the loader's position from the checkpoint that the configuration asks for, the
  /// newest if it does not say. Returns what it is, if there is one. Throws Error if that is damaged; with
  /// checkpoint.fallback, if all are. `in_memory`: the step of copies in memory that are whole. Where no newer
  /// checkpoint is whole, nothing is loaded and nothing returned: the copies are to be loaded.
  std::optional<ResumedFrom> resume(data::Loader& loader, std::optional<std::int64_t> in_memory = {});

  /// Throws Error if a rank that will write cannot.
  void require_writable();

  /// Starts to save; first ends a save that is under way. Not asynchronous: returns when all is on the disk. A save
  /// that is not the run's last one is left out, with a warning, where the storage is full, fails, or hangs in the save
  /// before: training goes on, and the next save is tried.
  void save(std::int64_t step, const data::LoaderState& loader, bool is_last);
  /// False while this rank writes. May differ between ranks.
  bool ready() const;
  /// When all ranks are ready: goes on to the next phase, if a save is under way.
  void advance();
  /// Ends a save that is under way.
  void finish() { finish_within(std::numeric_limits<double>::infinity()); }

 private:
  enum class Phase : std::uint8_t { kIdle, kWriting, kCommitting };
  /// This rank's numbers by kind of shard: of the model, of the optimizer.
  using Pieces = std::array<std::vector<TensorPiece>, 2>;

  /// All that this rank has.
  Pieces pieces() const;
  /// Returns the pieces that this rank writes.
  Pieces pieces_to_write() const;
  bool is_writer() const { return mesh_.place.dp_replicate == 0; }
  bool is_first_rank() const { return ranks_.rank() == 0; }
  /// Whether files are written from a copy in the host's memory.
  bool takes_snapshot() const;
  /// Copies the numbers and lets the pieces point to the copy.
  void take_snapshot(Pieces& pieces);
  void write_shards(const Pieces& pieces);
  /// Tells rank 0 what all ranks have written.
  void gather_files();
  void commit();
  /// False if the save under way does not end within so many seconds.
  bool finish_within(double seconds);

  /// A checkpoint that is to be loaded.
  struct Stored {
    std::filesystem::path path;
    CheckpointManifest manifest = {};
    std::vector<ShardFiles> shards = {};  // by kind
  };
  std::optional<std::int64_t> choose_step();
  /// The step of the newest folder below `limit`.
  std::optional<std::int64_t> newest_below(std::int64_t limit);
  /// Reads its manifest. What is wrong with it; none if nothing.
  std::optional<std::string> read_manifest(Stored& stored);
  /// Checks and maps its files. What is wrong with them; none if nothing.
  std::optional<std::string> open_files(Stored& stored);
  /// Throws Error with the damage and the newest other checkpoint, or copy in memory, that is whole.
  [[noreturn]] void fail_damaged(std::int64_t step, const std::string& damage, std::optional<std::int64_t> in_memory);
  /// In a framed warning, if anything was.
  void tell_what_was_passed_over(std::int64_t step, std::int64_t newest, const std::string& passed_over) const;

  const JobConfig& config_;
  Ranks& ranks_;
  const Mesh& mesh_;
  Parameters& parameters_;
  const data::Tokenizer& tokenizer_;
  std::filesystem::path folder_;
  Saver saver_;
  std::function<void(const SavedCheckpoint&)> on_saved_;
  std::function<void()> before_commit_;
  Buffer snapshot_;

  Phase phase_ = Phase::kIdle;
  bool is_last_ = false;                  // the save under way
  CheckpointManifest manifest_;           // of the save under way; whole on rank 0
  std::array<WrittenFile, 2> written_{};  // this rank's shards of it, by kind
  SavedCheckpoint saved_;
  Stopwatch since_start_;
  std::stop_source stop_;
  std::future<void> task_;  // the last member: it is waited for before the others go
};

/// The keys that make the model and the numbers that it computes, with their values.
nlohmann::json model_identity(JobConfig config);

/// Loads the weights that a run starts from, of a checkpoint or of Hugging Face files. False if the configuration names
/// none.
bool load_initial_weights(const JobConfig& config, Ranks& ranks, Parameters& parameters);

}  // namespace tessera
