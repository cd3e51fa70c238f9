// The last operations between ranks that this rank has started, in memory that outlives it (comm/observe/rank_file.h):
// after a failure the rings of all ranks together show who did not come to which operation
// (comm/observe/flight_analysis.h).
//
// What is recorded:
//   - collective operations and messages on CPUs: from their start to their end;
//   - waits for other ranks' stores into a window: from begin to end;
//   - operations that the host puts on a GPU's stream: when it put them there; the host does not learn when they end,
//     so `end_ns` stays 0. A step that is replayed as a graph puts nothing there and records nothing.
//
// An event takes about 50 ns, most of it two looks at the clock.
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
/// Whether all ranks of the group take part, so that sequence numbers of one group can be compared.
constexpr bool is_collective(FlightKind kind) { return kind < FlightKind::kSend; }

inline constexpr std::size_t kMaxFlightGroups = 64;
inline constexpr std::size_t kMaxFlightEvents = 1024;

/// A group that this rank belongs to. Zeroed memory is an unused one.
struct FlightGroup {
  std::atomic<std::uint64_t> id;        // the same on all ranks of the group, another one for every other group
  std::atomic<std::uint64_t> sequence;  // number of collective operations that this rank has started in it
  std::atomic<std::int32_t> rank, size;
  SharedText<40> axis;
};

/// An operation. A reader may come while it is written: it is whole if both numbers are the same and not 0.
struct alignas(64) FlightEvent {
  std::atomic<std::uint64_t> number;           // of the rank's events, from 1 on; written last
  std::atomic<std::uint64_t> sequence;         // of the group's collective operations, from 1 on; 0 if this is none
  std::atomic<std::uint64_t> bytes;            // of the tensor that this rank gives or, for receives, gets
  std::atomic<std::int64_t> begin_ns, end_ns;  // CLOCK_MONOTONIC; 0: not ended
  std::atomic<std::int32_t> peer;    // in the world: of a message or window; else the first whose message is missing
  std::atomic<std::uint16_t> group;  // index into the groups
  std::atomic<FlightKind> kind;
  std::atomic<std::uint8_t> on_gpu;  // 0 or 1
  std::atomic<std::uint64_t> check;  // the number; written first
};

struct FlightLog {
  std::atomic<std::uint64_t> num_events;
  std::array<FlightGroup, kMaxFlightGroups> groups;
  std::array<FlightEvent, kMaxFlightEvents> events;  // number n is at (n - 1) % kMaxFlightEvents
};

/// Writes a rank's log. Without one, nothing is recorded. Any thread may call it.
class FlightRecorder {
 public:
  FlightRecorder() = default;
  /// `log` must stay; zeroed.
  explicit FlightRecorder(FlightLog* log) : log_(log) {}

  struct NewEvent {
    FlightKind kind;
    std::size_t bytes;
    int peer = -1;  // in the world
    bool on_gpu = false;
  };
  /// What is recorded of the groups that do not fit: nothing.
  static constexpr std::uint16_t kNoGroup = kMaxFlightGroups;

  /// A group of this rank; returns its index.
  std::uint16_t add_group(std::uint64_t id, std::string_view axis, int rank, int size);
  /// Returns the event's number; 0 if nothing is recorded.
  std::uint64_t begin(std::uint16_t group, const NewEvent& event);
  void end(std::uint64_t event);
  void set_peer(std::uint64_t event, int peer);

 private:
  FlightEvent* find(std::uint64_t event);

  FlightLog* log_ = nullptr;
};

}  // namespace tessera
