#include "comm/observe/flight_recorder.h"

#include "comm/observe/shared_text.h"

namespace tessera {

std::string_view name_of(FlightKind kind) {
  switch (kind) {
    case FlightKind::kAllGather:
      return "all-gather";
    case FlightKind::kReduceScatter:
      return "reduce-scatter";
    case FlightKind::kAllReduce:
      return "all-reduce";
    case FlightKind::kAllToAll:
      return "all-to-all";
    case FlightKind::kBroadcast:
      return "broadcast";
    case FlightKind::kSend:
      return "send";
    case FlightKind::kReceive:
      return "receive";
    case FlightKind::kWindowWait:
      return "wait for a window";
  }
  return "unknown operation";
}

std::uint16_t FlightRecorder::add_group(std::uint64_t id, std::string_view axis, int rank, int size) {
  if (log_ == nullptr) return kNoGroup;
  std::uint16_t index = 0;
  while (index < kMaxFlightGroups && log_->groups[index].id.load(kRelaxed) != 0) ++index;
  if (index == kMaxFlightGroups) return kNoGroup;
  FlightGroup& group = log_->groups[index];
  put_text(axis, group.axis);
  group.rank.store(rank, kRelaxed);
  group.size.store(size, kRelaxed);
  group.id.store(id, std::memory_order_release);
  return index;
}

std::uint64_t FlightRecorder::begin(std::uint16_t group, const NewEvent& event) {
  if (group == kNoGroup) return 0;
  FlightGroup& issuer = log_->groups[group];
  const std::uint64_t sequence = is_collective(event.kind) ? issuer.sequence.fetch_add(1, kRelaxed) + 1 : 0;
  const std::uint64_t number = log_->num_events.fetch_add(1, kRelaxed) + 1;
  FlightEvent& slot = log_->events[(number - 1) % kMaxFlightEvents];
  slot.check.store(number, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.sequence.store(sequence, kRelaxed);
  slot.bytes.store(event.bytes, kRelaxed);
  slot.begin_ns.store(monotonic_ns(), kRelaxed);
  slot.end_ns.store(0, kRelaxed);
  slot.peer.store(event.peer, kRelaxed);
  slot.group.store(group, kRelaxed);
  slot.kind.store(event.kind, kRelaxed);
  slot.on_gpu.store(event.on_gpu ? 1 : 0, kRelaxed);
  slot.number.store(number, std::memory_order_release);
  return number;
}

FlightEvent* FlightRecorder::find(std::uint64_t event) {
  if (event == 0) return nullptr;
  FlightEvent& slot = log_->events[(event - 1) % kMaxFlightEvents];
  return slot.number.load(kRelaxed) == event ? &slot : nullptr;  // null: a later event has taken the slot
}

void FlightRecorder::end(std::uint64_t event) {
  if (FlightEvent* slot = find(event)) slot->end_ns.store(monotonic_ns(), kRelaxed);
}

void FlightRecorder::set_peer(std::uint64_t event, int peer) {
  if (FlightEvent* slot = find(event)) slot->peer.store(peer, kRelaxed);
}

}  // namespace tessera
