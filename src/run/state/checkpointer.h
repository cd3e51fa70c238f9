// A run's checkpoints: saving while training waits or continues, and resuming on any mesh.
//
// A save has two phases. In the first, every rank of the first replica writes its shards. The second begins when all
// ranks have reported that they are done: rank 0 writes the manifest and gives the folder its name. Ranks agree between
// the phases, so all ranks see the failure of one, and no background thread communicates. While training goes on, files
// are written from a copy of the numbers (run/state/snapshot.h).
#pragma once

#include <array>
#include <functional>
#include <future>
#include <limits>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>

#include "base/stopwatch.h"
#include "checkpoint/checkpoint.h"
#include "comm/ranks.h"
#include "config/job_config.h"
#include "data/loader.h"
#include "data/tokenizers/tokenizer.h"
#include "params/parameters.h"
#include "run/state/checkpoint_reader.h"
#include "run/state/shard_pieces.h"
#include "run/state/snapshot.h"

namespace tessera {

/// Describes a save that is committed.
struct SavedCheckpoint {
  std::int64_t step = 0;
  double stall_seconds = 0.0;  // time that training waited for it
  double seconds = 0.0;        // time until it was committed
};

class Checkpointer {
 public:
  /// All arguments must outlive the object.
  Checkpointer(const JobConfig& config, Ranks& ranks, const Mesh& mesh, Parameters& parameters,
               const data::Tokenizer& tokenizer);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Returns the most memory of the host that a save takes for the copy that it writes from, in bytes. It is 0 if files
  /// are written without one.
  std::size_t snapshot_bytes() const;
  /// Prepares the copies that saves write from (Snapshot). Must be called before save(). `state_read_done` is
  /// TrainingStep's on GPUs, and null on CPUs.
  void prepare_snapshot(cuda::Event* state_read_done);
  /// Returns how much of that memory is taken now, in bytes, for tests. It is 0 unless a save is under way.
  std::size_t snapshot_bytes_held() const { return snapshot_ ? snapshot_->num_held_bytes() : 0; }
  /// Sets a function that is called after each save is committed.
  void set_on_saved(std::function<void(const SavedCheckpoint&)> on_saved) { on_saved_ = std::move(on_saved); }

  /// Sets the run and the attempt that save. Must be called before resume().
  void set_saver(Saver saver) { saver_ = std::move(saver); }

  /// Sets a function that rank 0 calls before a save gets its name. If it throws Error, the save fails.
  void set_before_commit(std::function<void()> before_commit) { before_commit_ = std::move(before_commit); }

  const std::filesystem::path& folder() const { return folder_; }

  // All ranks must call the functions below together. They throw Error on all ranks if they fail on one.

  /// Loads masters, moments, buffers and the loader's position from the checkpoint that the configuration asks for, or
  /// else from the newest one. Returns that checkpoint, or nullopt if there is none. Throws Error if it is damaged.
  /// With checkpoint.fallback it throws only if all are damaged. `in_memory` is the step of intact copies in memory. If
  /// no newer checkpoint is intact, it loads nothing and returns nullopt, and the caller should load the copies.
  std::optional<ResumedFrom> resume(data::Loader& loader, std::optional<std::int64_t> in_memory = {});

  /// Throws Error if a rank that will write cannot write, or if the storage has no room for a checkpoint.
  void require_writable();

  /// Starts a save, after it has ended a save that is under way. If saving is not asynchronous, it returns when all is
  /// on the disk. A save that is not the run's last one is skipped with a warning if the storage is full, fails, or
  /// still hangs in the save before. Training then continues, and the next save is tried.
  void save(std::int64_t step, const data::LoaderState& loader, bool is_last);
  /// Returns false while this rank writes. Ranks may return different values.
  bool ready() const;
  /// Goes on to the next phase if a save is under way. Call it when all ranks are ready.
  void advance();
  /// Waits for the end of a save that is under way.
  void finish() { finish_within(std::numeric_limits<double>::infinity()); }

 private:
  enum class Phase : std::uint8_t { kIdle, kWriting, kCommitting };
  /// Describes the save that is under way, unless `phase` is kIdle.
  struct Save {
    Phase phase = Phase::kIdle;
    bool is_last = false;                                      // it is the run's last
    CheckpointManifest manifest = {};                          // complete on rank 0
    std::array<WrittenFile, kShardKinds.size()> written = {};  // this rank's shards, by kind
    SavedCheckpoint result = {};
    Stopwatch since_start = {};
  };

  /// Returns the pieces that this rank writes.
  ShardPieces pieces_to_write() const;
  /// Returns the size of the numbers in those pieces, in bytes.
  std::size_t num_bytes_to_write() const;
  bool is_writer() const { return mesh_.place.dp_replicate == 0; }
  bool is_first_rank() const { return ranks_.rank() == 0; }
  /// Returns the kinds of shards that a save of this step writes.
  std::span<const std::string_view> kinds_at(std::int64_t step) const;
  /// Returns whether files are written from a copy in host memory.
  bool takes_snapshot() const;
  /// Starts the copy, if there is one, and the thread that writes this rank's shards.
  void start_writing();
  void write_shards(const ShardPieces& pieces);
  /// Gathers in the manifest what all ranks have written.
  void gather_files();
  void commit();
  /// Ends a save that is under way. Returns false if that takes longer than `seconds`.
  bool finish_within(double seconds);

  const JobConfig& config_;
  Ranks& ranks_;
  const Mesh& mesh_;
  Parameters& parameters_;
  const data::Tokenizer& tokenizer_;
  std::filesystem::path folder_;
  Saver saver_;
  std::function<void(const SavedCheckpoint&)> on_saved_;
  std::function<void()> before_commit_;
  CheckpointReader reader_;
  std::optional<Snapshot> snapshot_;  // if this rank's files are written from a copy
  Save save_;
  std::stop_source stop_;
  std::future<void> task_;  // last, so that its end is waited for before the other members are destroyed
};

}  // namespace tessera
