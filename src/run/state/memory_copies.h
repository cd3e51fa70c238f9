// Copies of the training state in the memory of nodes (job.node_folder, on tmpfs), every checkpoint.memory_interval
// steps: a run that has lost a node goes on from the last of them, and need not go back to a checkpoint on disk.
//
// Every rank's state is held by two nodes: its own, and that of another replica, or of a partner rank that it is sent
// to. Two copies alternate, so that one is always whole. Files are named
//   <node folder>/memory/<run id>/attempt-<attempt>/rank-<owner's rank>.<0 or 1>
// and begin with a header (MemoryCopyHeader) of kMemoryCopyHeaderBytes. The owner's checksum is in the header, so a
// file is whole if its bytes have this checksum: one that was being written, or sent, has not. No attempt writes to a
// file of another one. docs/checkpoints.md describes what a run does with them.
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
#include "run/state/checkpointer.h"
#include "run/state/training_state.h"

namespace tessera {

/// What a copy is of. All but `rank` and `shard` is the same on all ranks of a step's copies.
struct MemoryCopyHeader {
  std::string run;
  std::int64_t attempt = 0, step = 0;
  std::int64_t rank = 0;   // whose state it is
  std::int64_t shard = 0;  // ranks with the same one have the same state
  std::string identity;    // checksum of model, mesh, dataset and seed
  data::LoaderState loader;
  std::string config;               // TOML
  std::uint64_t payload_bytes = 0;  // behind the header
  std::uint64_t checksum = 0;       // checksum_of_pieces() of these
};

inline constexpr std::size_t kMemoryCopyHeaderBytes = std::size_t{64} << 10;

/// Writes the header to the first kMemoryCopyHeaderBytes of a copy.
void write_memory_copy_header(const MemoryCopyHeader& header, std::byte* target);
/// Reads the header of a copy and compares the checksums. Nothing if a copy was never finished there. Throws Error,
/// naming the file `name`, if it is damaged.
std::optional<MemoryCopyHeader> read_memory_copy(std::span<const std::byte> file, const std::string& name);

class MemoryCopies {
 public:
  /// All of these must stay. Finds out which ranks share a node: those whose job.node_folder is the same one.
  /// `state_is_read`: on GPUs, TrainingStep's; null on CPUs. Together with all ranks.
  MemoryCopies(const JobConfig& config, Ranks& ranks, const Mesh& mesh, TrainingState& state,
               cuda::Event* state_is_read);
  ~MemoryCopies();
  MemoryCopies(const MemoryCopies&) = delete;
  MemoryCopies& operator=(const MemoryCopies&) = delete;

  /// What this rank's copies, and those that it keeps for others, take of its node's memory.
  std::size_t num_bytes() const;

  // All ranks must call the functions below together.

  /// Looks for copies that earlier attempts of `run` have left. Throws Error if the nodes' folders have no room for
  /// this attempt's, or if a later attempt was there.
  void open(const RunIdentity& run, const data::LoaderState& loader);
  /// The step of the newest copies of which every rank's state is whole on some node; none if there are no such copies.
  std::optional<std::int64_t> newest_step() const;
  /// Loads them: state and loader's position. Ranks whose node does not have theirs receive it.
  ResumedFrom load(data::Loader& loader);
  /// Takes the memory. Deletes what earlier attempts have left; what was loaded, only when a new copy is whole.
  void allocate();

  /// Whether a copy is to be taken after `step`. The same on all ranks.
  bool is_due(std::int64_t step) const { return is_postponed_ || step % config_.checkpoint.memory_interval == 0; }
  using Compare = std::function<void(const TrainingState::Checksums&)>;
  /// Copies the state, which no step may be changing, and starts to send it. `compare` gets its checksums before the
  /// copy counts, and may throw. Waits for the copy before, up to a second: if that is still on its way, this one is
  /// postponed to the next step. Returns false then. Throws Error if a later attempt of the run has begun on this node.
  /// A GPU's state leaves it beside the next step, and is compared in advance(), unless `compares_now`.
  bool take(std::int64_t step, const data::LoaderState& loader, Compare compare, bool compares_now);
  /// Whether this rank's copy has left its GPU, and waits for advance().
  bool ready() const;
  /// When all ranks are ready(): calls `compare`, and starts to send the copy. No step may be under way.
  void advance();
  /// Waits until the last copy is whole.
  void finish();
  /// Deletes this attempt's copies, after the run's end.
  void remove();

 private:
  class File;
  /// A whole copy that a node of some rank holds.
  struct Held {
    std::int64_t attempt = 0, step = 0, shard = 0, owner = 0, slot = 0;
    std::uint64_t checksum = 0;
    int holder = 0;  // a rank of the node, which read it
  };
  struct Slot {
    std::unique_ptr<File> own;                  // null if another rank of the node has the same state
    std::vector<std::unique_ptr<File>> others;  // in the order of sources_
  };

  std::filesystem::path run_folder() const;
  std::filesystem::path attempt_folder(std::int64_t attempt) const;
  std::filesystem::path path_of(const Held& held) const;
  std::size_t file_bytes(int rank) const;
  void find_partners();
  void require_room(std::size_t leftovers) const;
  /// Numbers of the attempts that have a folder on this node.
  std::vector<std::int64_t> attempts() const;
  void require_no_later_attempt() const;
  /// This rank's share of the files on its node.
  std::vector<Held> read_files() const;
  void choose(const std::vector<Held>& all);
  void delete_leftovers(bool with_chosen) const;
  void allocate(Slot& slot);
  /// True when the copy under way is whole on all ranks; false if that takes longer than `seconds`.
  bool settle(double seconds);
  /// Whether `is_done` becomes true on all ranks within `seconds`.
  bool wait_for_all(const std::function<bool()>& is_done, double seconds);

  /// A copy that was taken and is not sent yet.
  struct Taken {
    MemoryCopyHeader header;  // without the checksum
    Compare compare;
    std::future<TrainingState::Checksums> checksums;
  };
  struct Place {
    std::uint64_t node = 0;
    std::int64_t shard = 0;
    std::size_t state_bytes = 0;
    bool keeps = false;  // its own state, on its node
    int partner = -1;    // the rank on another node that keeps it as well; -1: a replica does, or nobody
  };
  const Place& place() const { return places_[static_cast<std::size_t>(ranks_.rank())]; }

  const JobConfig& config_;
  Ranks& ranks_;
  const Mesh& mesh_;
  TrainingState& state_;
  cuda::Event* state_is_read_;
  std::vector<Place> places_;  // by rank
  std::vector<int> sources_;   // ranks whose copies this one keeps
  int num_nodes_ = 1;
  RunIdentity run_;
  std::string identity_, config_toml_;  // of headers
  std::vector<Held> chosen_;            // the newest whole copies of an earlier attempt
  bool has_leftovers_ = false;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  bool is_postponed_ = false, is_being_sent_ = false, told_time_ = false;
  double stall_seconds_ = 0.0;  // in which training waited for the copy under way
  std::optional<Taken> taken_;
  std::vector<Work> works_;  // of the copy under way
};

}  // namespace tessera
