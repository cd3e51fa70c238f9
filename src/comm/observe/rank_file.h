// The file in which a rank records what it does, for the ranks of its node and for a monitor. Its path is
// <job.node_folder>/attempt-K/rank-NNNNN. It has a fixed size and is mapped into the rank's memory, so its content
// outlives the rank, however the rank ends. It should lie on a tmpfs: there a write is just a store to memory.
//
// The rank writes the file, and any process of the same user may read it at any time. It holds the rank's entry on the
// rank board (comm/rank_board.h) and its flight recorder (comm/observe/flight_recorder.h).
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

/// Names the section of a run that a rank is in. Time in a section counts from its begin. Each step begins a new
/// section.
enum class Section : std::uint8_t { kStarting, kLoading, kStep, kValidation, kCheckpoint, kEnded };
std::string_view name_of(Section section);

/// Holds what a rank reports about itself, in memory that others read. Zeroed memory is the entry of a rank that has
/// not arrived yet.
struct RankEntry {
  std::atomic<std::int32_t> world_rank_plus_1;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint64_t> process_start;  // from start_of_process()
  std::atomic<std::int64_t> first_step;      // the first step that it runs; 0: none yet
  std::atomic<std::int64_t> step;
  std::atomic<Section> section;
  std::atomic<std::int64_t> section_since_ns;
  SharedText<96> operation;
  std::atomic<std::int64_t> operation_since_ns;
  std::atomic<std::int64_t> wait_begin_ns;  // begin of its present wait for other ranks or its GPU; 0: it does not wait
  std::atomic<std::int64_t> wait_seen_ns;   // the time at which it last reported that it waits
  std::atomic<std::int64_t> idle_ns;  // total of its ended waits in steps and of its ended sections other than steps
  std::atomic<std::uint64_t> awaited_event;  // event of the flight recorder that it waits for; 0: none that is recorded
  std::atomic<std::int64_t> stopped_from_ns,
      stopped_until_ns;                   // last time that its process did not run for a second or more
  std::atomic<std::int32_t> exit_status;  // valid once its section is kEnded
  SharedText<1024> end_message;           // message of the error that ended it
};

/// Records how the rank will end. Only the first call counts.
void set_end(RankEntry& entry, int exit_status, std::string_view message);

struct RankFileContent;

/// Owns the file of this rank, mapped into memory.
class RankFile {
 public:
  /// Creates <folder>/attempt-<attempt>/rank-<world_rank> and missing folders, and replaces a file of that name. Throws
  /// Error if it cannot.
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

/// Returns the entry in the mapped file of another rank of this node.
const RankEntry& entry_in(std::span<const std::byte> file);

/// Holds a copy of the content of a rank's file at the time when it was read.
struct RankState {
  int world_rank = 0;
  int world_size = 0;  // 0: the rank did not know it yet
  std::int64_t attempt = 0;
  pid_t pid = 0;
  std::uint64_t process_start = 0;
  ProcessState process = ProcessState::kUnknown;
  std::int64_t read_ns = 0;  // time of reading; all times here are CLOCK_MONOTONIC of the rank's machine

  std::int64_t first_step = 0;
  std::int64_t step = 0;
  Section section = Section::kStarting;
  std::int64_t section_since_ns = 0;
  std::string operation;
  std::int64_t operation_since_ns = 0;
  std::int64_t wait_begin_ns = 0;   // begin of its present wait for other ranks or its GPU; 0: it does not wait
  std::int64_t idle_ns = 0;         // total of its ended waits in steps and of its ended sections other than steps
  std::uint64_t awaited_event = 0;  // event that it waits for; 0: none, or not recorded

  bool is_waiting() const { return wait_begin_ns != 0; }
  /// Returns the time until `read_ns` that the rank spent outside of steps or waiting in steps. The rest it computed.
  std::int64_t all_idle_ns() const {
    if (section != Section::kStep) return idle_ns + read_ns - section_since_ns;
    return idle_ns + (is_waiting() ? read_ns - wait_begin_ns : 0);
  }

  /// The begin and the end of the last time in which its process did not run for a second or more. It was then stopped
  /// and continued. 0 means that there was no such time.
  std::int64_t stopped_from_ns = 0, stopped_until_ns = 0;

  struct End {
    int exit_status = 0;
    std::string message;  // empty for status 0
  };
  std::optional<End> end;  // nullopt: it runs, or was killed

  struct Group {
    std::uint64_t id = 0;
    std::string axis;
    int rank = 0, size = 1;
    std::uint64_t sequence = 0;  // of the last collective operation that it started there; 0: none
  };
  std::vector<Group> groups;
  struct Event {
    std::uint64_t number = 0;
    FlightKind kind = {};
    std::size_t group = 0;       // index into groups
    std::uint64_t sequence = 0;  // 0: not a collective operation
    std::uint64_t bytes = 0;
    int peer = -1;  // world rank; -1: none, or no rank is known to be missing
    std::int64_t begin_ns = 0, end_ns = 0;
    bool on_gpu = false;
  };
  std::vector<Event> events;  // the latest ones, oldest first

  /// Returns the event with that number, or null if `events` does not hold it.
  const Event* find_event(std::uint64_t number) const;
};

/// Returns the path of a rank's file.
std::filesystem::path rank_file_path(const std::filesystem::path& folder, std::int64_t attempt, int world_rank);

/// Reads a rank's state from the bytes of its file. Another machine may have sent them, so `process` stays unknown and
/// `read_ns` 0. `name` is for messages. Throws Error if the bytes are not such a file, or if another version of this
/// program wrote it.
RankState parse_rank_file(std::span<const std::byte> bytes, const std::string& name);

/// Reads a file of this machine, which its rank may be writing, and checks whether the rank's process lives.
RankState read_rank_file(const std::filesystem::path& path);

}  // namespace tessera
