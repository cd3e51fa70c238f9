// Copies of the training state in the memory of nodes (job.node_folder, on tmpfs), taken every
// checkpoint.memory_interval steps. A run that has lost a node resumes from the latest copies, and need not go back to
// a checkpoint on disk.
//
// Two nodes hold every rank's state: the rank's own node, and that of another replica or of a partner rank that
// receives a copy (CopyPlacement). Two copies alternate, so that one is always complete. Files (CopyFolder) begin with
// a header (MemoryCopyHeader) of kMemoryCopyHeaderBytes. The header has the owner's checksum of the bytes. A file is
// complete if its bytes have this checksum, which those of a half written or half sent file do not have. No attempt
// writes to a file of another attempt. docs/checkpoints.md describes how a run uses the copies.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "data/loader.h"
#include "run/record/run_folder.h"
#include "run/state/checkpoint_reader.h"
#include "run/state/copy_folder.h"
#include "run/state/copy_placement.h"
#include "run/state/training_state.h"

namespace tessera {

/// Describes a copy. run, attempt, step, identity, loader and config are the same in all ranks' copies of a step.
struct MemoryCopyHeader {
  std::string run;
  std::int64_t attempt = 0, step = 0;
  std::int64_t rank = 0;   // the rank whose state it is
  std::int64_t shard = 0;  // ranks with the same shard have the same state
  std::string identity;    // checksum of mesh, dataset, seed, and of what may not change in the model
  data::LoaderState loader;
  std::string config;               // as TOML
  std::uint64_t payload_bytes = 0;  // size of the state after the header
  std::uint64_t checksum = 0;       // checksum_of_pieces() of that state
};

/// The size of a copy's header, which the state follows.
inline constexpr std::size_t kMemoryCopyHeaderBytes = std::size_t{64} << 10;

/// Writes the header to the first kMemoryCopyHeaderBytes of a copy.
void write_memory_copy_header(const MemoryCopyHeader& header, std::byte* target);
/// Reads the header of a copy and compares the checksums. Returns nullopt if no copy was ever completed in the file.
/// Throws Error, which names the file `name`, if it is damaged.
std::optional<MemoryCopyHeader> read_memory_copy(std::span<const std::byte> file, const std::string& name);

class MemoryCopies {
 public:
  /// All arguments must outlive the object. Finds the ranks that share a node: those whose job.node_folder is the same
  /// folder. `state_read_done` is TrainingStep's on GPUs, and null on CPUs. All ranks must call it together.
  MemoryCopies(const JobConfig& config, Ranks& ranks, const Mesh& mesh, TrainingState& state,
               cuda::Event* state_read_done);
  ~MemoryCopies();
  MemoryCopies(const MemoryCopies&) = delete;
  MemoryCopies& operator=(const MemoryCopies&) = delete;

  /// Returns how much of its node's memory this rank's copies, and those that it keeps for others, take.
  std::size_t num_bytes() const;

  // All ranks must call the functions below together.

  /// Searches for copies that earlier attempts of `run` have left. With checkpoint.load_step it takes none. If nothing
  /// counts the attempts, the copies get a number that no earlier start has used. Throws Error if the nodes' folders
  /// have no room for this attempt's copies or cannot be read, or if a later attempt has begun.
  void open(const RunIdentity& run, const data::LoaderState& loader);
  /// Returns the step of the newest copies with every rank's state intact on some node, or nullopt if there are none.
  std::optional<std::int64_t> newest_step() const;
  /// Loads these copies: the state and the loader's position. A rank whose node does not have its copy receives it.
  ResumedFrom load(data::Loader& loader);
  /// Takes the memory. Deletes what earlier attempts have left. Copies that were loaded are deleted only when a new
  /// copy is complete.
  void allocate();

  /// Returns whether a copy should be taken after `step`. It is the same on all ranks.
  bool is_due(std::int64_t step) const { return is_postponed_ || step % config_.checkpoint.memory_interval == 0; }
  using Compare = std::function<void(const TrainingState::Checksums&)>;
  /// Copies the state and starts to send the copy. No step may change the state meanwhile. `compare` gets the state's
  /// checksums before the copy counts, and may throw. If the copy before is still being sent after a second, this one
  /// is postponed to the next step, and the function returns false. Throws Error if a later attempt of the run has
  /// begun on this node. A GPU's state is copied while the next step runs, and compared in advance(), unless
  /// `compares_now`.
  bool take(std::int64_t step, const data::LoaderState& loader, Compare compare, bool compares_now);
  /// Returns whether this rank's copy has left its GPU and waits for advance().
  bool ready() const { return under_way_.has_left_gpu(); }
  /// Calls `compare` and starts to send the copy. Call it when all ranks are ready(). No step may be under way.
  void advance();
  /// Waits until the last copy is complete.
  void finish();
  /// Deletes this attempt's copies, after the end of the run.
  void remove();

 private:
  class File;
  /// Describes a complete copy that is on the node of some rank.
  struct StoredCopy {
    std::int64_t attempt = 0, step = 0, shard = 0, owner = 0, slot = 0;
    std::uint64_t checksum = 0;
    int holder = 0;  // a rank of that node, which has read it
  };
  struct Slot {
    std::unique_ptr<File> own;                  // null if another rank of the node has the same state
    std::vector<std::unique_ptr<File>> others;  // in the order of CopyPlacement::sources
  };
  /// Holds the files of two copies, which alternate.
  struct Slots {
    std::array<Slot, 2> both;
    std::size_t next_idx = 0;

    Slot& next() { return both[next_idx]; }
  };

  std::filesystem::path path_of(const StoredCopy& held) const;
  std::size_t file_bytes(int rank) const;
  void require_room(std::size_t leftovers) const;
  /// Reads this rank's share of the files on its node. Returns the intact copies.
  std::vector<StoredCopy> read_files() const;
  void choose(const std::vector<StoredCopy>& all);
  /// Returns `run`. If nothing counts its attempts, its attempt is above all that have a folder on some node.
  RunIdentity after_earlier_starts(RunIdentity run);
  void delete_leftovers(bool with_chosen) const;
  void allocate(std::size_t slot_idx);
  /// Waits until the copy under way is complete on all ranks. Returns false if that takes longer than `seconds`.
  bool settle(double seconds);
  /// Waits until `is_done` is true on all ranks. Returns false if that takes longer than `seconds`.
  bool wait_for_all(const std::function<bool()>& is_done, double seconds);

  /// Holds a copy that was taken but is not being sent yet.
  struct Taken {
    MemoryCopyHeader header;  // without the checksum
    Compare compare;
    std::future<TrainingState::Checksums> checksums;
  };
  struct CopyUnderWay {
    std::optional<Taken> taken;
    bool is_being_sent = false;  // the same on all ranks, whether they have works or not
    std::vector<Work> works;     // messages with this rank's copy, and with those that it keeps
    double stall_seconds = 0.0;  // time that training has waited for this copy

    /// Returns whether the copy was taken and has left its GPU.
    bool has_left_gpu() const;
    /// Returns whether the messages have ended.
    bool has_arrived();
    void wait();
  };

  const JobConfig& config_;
  Ranks& ranks_;
  const Mesh& mesh_;
  TrainingState& state_;
  cuda::Event* state_read_done_;
  CopyPlacement placement_;
  CopyFolder folder_;               // of this attempt once open() has run
  MemoryCopyHeader header_;         // of this rank's copies, without step, loader and checksum
  std::vector<StoredCopy> chosen_;  // the newest whole copies of an earlier attempt
  bool has_leftovers_ = false;
  Slots slots_;
  bool is_postponed_ = false, told_time_ = false;
  CopyUnderWay under_way_;  // last, because its thread and messages use the files
};

}  // namespace tessera
