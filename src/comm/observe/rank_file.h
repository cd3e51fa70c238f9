// The file in which a rank says what it does: for the ranks of its node, and for a monitor. It is
// <job.node_folder>/attempt-K/rank-NNNNN, of a fixed size, and mapped into the rank, so what it says outlives the rank,
// however that ends. It should lie on a tmpfs: writing is storing into memory then.
//
// The rank writes, anyone reads at any time. It holds the rank's entry on the rank board (comm/rank_board.h) and its
// flight recorder (comm/observe/flight_recorder.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/observe/flight_recorder.h"
#include "comm/observe/process_state.h"
#include "comm/observe/shared_text.h"

namespace tessera {

/// What a rank is in. Time in a section is counted from its begin; each step begins its section anew.
enum class Section : std::uint8_t { kStarting, kLoading, kStep, kValidation, kCheckpoint, kEnded };
std::string_view name_of(Section section);

/// What a rank says of itself, in memory that others read. Zeroed memory is an entry of a rank that has not come yet.
struct RankEntry {
  std::atomic<std::int32_t> world_rank_plus_1;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint64_t> process_start;  // start_of_process()
  std::atomic<std::int64_t> first_step;      // that it makes; 0: it makes none yet
  std::atomic<std::int64_t> step;
  std::atomic<Section> section;
  std::atomic<std::int64_t> section_since_ns;
  SharedText<96> operation;
  std::atomic<std::int64_t> operation_since_ns;
  std::atomic<std::int64_t> wait_begin_ns;   // of the wait for other ranks that it is in; 0: in none
  std::atomic<std::int64_t> wait_seen_ns;    // when it said last that it waits
  std::atomic<std::int64_t> idle_ns;         // in all waits of steps, and in all sections but steps, that have ended
  std::atomic<std::uint64_t> awaited_event;  // of the flight recorder: what it waits for; 0: nothing that is recorded
  std::atomic<std::int64_t> stopped_from_ns,
      stopped_until_ns;                   // when its process last did not run for a second or more
  std::atomic<std::int32_t> exit_status;  // once its section is kEnded
  SharedText<1024> end_message;           // of the error that ended it
};

/// How the rank ends, before it does. The first call counts.
void set_end(RankEntry& entry, int exit_status, std::string_view message);

struct RankFileContent;

/// A rank's own file.
class RankFile {
 public:
  /// Creates <folder>/attempt-<attempt>/rank-<world_rank>, in place of one that is there, and folders that are missing.
  /// Throws Error if it cannot.
  RankFile(const std::filesystem::path& folder, std::int64_t attempt, int world_rank);
  ~RankFile();
  RankFile(const RankFile&) = delete;
  RankFile& operator=(const RankFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int world_rank() const { return world_rank_; }
  void set_world_size(int size);
  RankEntry& entry();
  FlightRecorder recorder();

 private:
  std::filesystem::path path_;
  int world_rank_;
  RankFileContent* content_ = nullptr;
};

/// The entry in another rank's file of this node, which is mapped.
const RankEntry& entry_in(std::span<const std::byte> file);

/// A copy of what a rank's file said when it was read.
struct RankState {
  int world_rank = 0;
  int world_size = 0;  // 0: the rank did not know it yet
  std::int64_t attempt = 0;
  pid_t pid = 0;
  std::uint64_t process_start = 0;
  ProcessState process = ProcessState::kUnknown;
  std::int64_t read_ns = 0;  // when it was read, on the clock of all times here (CLOCK_MONOTONIC of the rank's machine)

  std::int64_t first_step = 0;
  std::int64_t step = 0;
  Section section = Section::kStarting;
  std::int64_t section_since_ns = 0;
  std::string operation;
  std::int64_t operation_since_ns = 0;
  std::int64_t wait_begin_ns = 0;   // of the wait for other ranks, or for its GPU, that it is in; 0: in none
  std::int64_t idle_ns = 0;         // in steps' waits and in sections other than steps, before the present one
  std::uint64_t awaited_event = 0;  // number of the event that it waits for; 0: none, or not recorded

  bool is_waiting() const { return wait_begin_ns != 0; }
  /// The time until it was read in which it made no step, or waited in one. In the rest of its time it computes.
  std::int64_t all_idle_ns() const {
    if (section != Section::kStep) return idle_ns + read_ns - section_since_ns;
    return idle_ns + (is_waiting() ? read_ns - wait_begin_ns : 0);
  }

  /// When its process last did not run for a second or more: it was stopped and continued. 0: never.
  std::int64_t stopped_from_ns = 0, stopped_until_ns = 0;

  struct End {
    int exit_status = 0;
    std::string message;  // empty for status 0
  };
  std::optional<End> end;  // none: it runs, or was killed

  struct Group {
    std::uint64_t id = 0;
    std::string axis;
    int rank = 0, size = 1;
    std::uint64_t sequence = 0;  // of the last collective operation that it has started there; 0: none
  };
  std::vector<Group> groups;
  struct Event {
    std::uint64_t number = 0;
    FlightKind kind = {};
    std::size_t group = 0;       // index into groups
    std::uint64_t sequence = 0;  // 0: not a collective operation
    std::uint64_t bytes = 0;
    int peer = -1;  // in the world; -1: none, or none is known to be missing
    std::int64_t begin_ns = 0, end_ns = 0;
    bool on_gpu = false;
  };
  std::vector<Event> events;  // the last ones, oldest first

  /// The event of that number; null if it is not among them.
  const Event* find_event(std::uint64_t number) const;
};

/// Where a rank's file is.
std::filesystem::path rank_file_path(const std::filesystem::path& folder, std::int64_t attempt, int world_rank);

/// Reads a rank's state from the bytes of its file, which another machine may have sent: `process` stays unknown, and
/// `read_ns` 0. `name` is for messages. Throws Error if it is no such file, or one of another version of this program.
RankState parse_rank_file(std::span<const std::byte> bytes, const std::string& name);

/// Reads a file of this machine, of a rank that may be writing it, and looks whether its process lives.
RankState read_rank_file(const std::filesystem::path& path);

}  // namespace tessera
