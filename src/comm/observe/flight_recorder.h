// Records the latest operations between ranks that this rank has started, in memory that outlives the rank
// (comm/observe/rank_file.h). After a failure, the records of all ranks together show which rank did not take part in
// which operation (comm/observe/flight_analysis.h).
//
// It records
// - collective operations and messages on CPUs, from their start to their end,
// - waits for other ranks' stores into a window, from begin to end,
// - operations on a GPU's stream, at the time when the host puts them there. The host does not learn when they end, so
//   `end_ns` stays 0. A step that is replayed as a graph puts nothing there and records nothing.
//
// Recording an event takes about 50 ns, most of it for reading the clock twice.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "comm/observe/shared_text.h"

namespace tessera {

enum class FlightKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kSend,
  kReceive,
  kWindowWait,
};
std::string_view name_of(FlightKind kind);
/// Returns whether all ranks of the group take part. Then the ranks' sequence numbers in the group can be compared.
constexpr bool is_collective(FlightKind kind) { return kind < FlightKind::kSend; }

/// The numbers of groups and of events that a log has room for.
inline constexpr std::size_t kMaxFlightGroups = 64;
inline constexpr std::size_t kMaxFlightEvents = 1024;

/// Describes a group that this rank belongs to. Zeroed memory is an unused entry.
struct FlightGroup {
  std::atomic<std::uint64_t> id;        // the same on all ranks of the group, and different for all other groups
  std::atomic<std::uint64_t> sequence;  // number of collective operations that this rank has started in the group
  std::atomic<std::int32_t> rank, size;
  SharedText<40> axis;
};

/// Describes an operation. Readers may read it while it is written. It is complete if `number` and `check` are equal
/// and not 0.
struct alignas(64) FlightEvent {
  std::atomic<std::uint64_t> number;           // counts the rank's events from 1; written last
  std::atomic<std::uint64_t> sequence;         // counts the group's collective operations from 1; 0: not collective
  std::atomic<std::uint64_t> bytes;            // size of the tensor that this rank sends or, for receives, gets
  std::atomic<std::int64_t> begin_ns, end_ns;  // CLOCK_MONOTONIC; 0: not ended
  std::atomic<std::int32_t> peer;    // world rank: peer of a message or window; else the first whose message is missing
  std::atomic<std::uint16_t> group;  // index into the groups
  std::atomic<FlightKind> kind;
  std::atomic<std::uint8_t> on_gpu;  // 0 or 1
  std::atomic<std::uint64_t> check;  // equal to `number`; written first
};

struct FlightLog {
  std::atomic<std::uint64_t> num_events;
  std::array<FlightGroup, kMaxFlightGroups> groups;
  std::array<FlightEvent, kMaxFlightEvents> events;  // number n is at (n - 1) % kMaxFlightEvents
};

/// Writes a rank's log. A recorder without a log records nothing. Any thread may call begin(), end() and set_peer().
/// One thread at a time may call add_group().
class FlightRecorder {
 public:
  FlightRecorder() = default;
  /// `log` must be zeroed and outlive the recorder.
  explicit FlightRecorder(FlightLog* log) : log_(log) {}

  struct NewEvent {
    FlightKind kind;
    std::size_t bytes;
    int peer = -1;  // world rank
    bool on_gpu = false;
  };
  /// The index of groups that do not fit into the log. Their operations are not recorded.
  static constexpr std::uint16_t kNoGroup = kMaxFlightGroups;

  /// Adds a group of this rank and returns its index.
  std::uint16_t add_group(std::uint64_t id, std::string_view axis, int rank, int size);
  /// Returns the event's number, or 0 if nothing is recorded.
  std::uint64_t begin(std::uint16_t group, const NewEvent& event);
  void end(std::uint64_t event);
  void set_peer(std::uint64_t event, int peer);

 private:
  FlightEvent* find(std::uint64_t event);

  FlightLog* log_ = nullptr;
};

}  // namespace tessera
