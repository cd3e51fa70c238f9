// What a GPU's steps need besides the computation: recorded graphs, and the times at which steps ended.
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <vector>

#include "device/cuda_graph.h"
#include "device/phase_clock.h"

namespace tessera {

/// Names who reads the training state beside a step. Each has an event, since both may read at the same time.
enum class StateReader : std::uint8_t { kMemoryCopy, kCheckpoint };
inline constexpr std::size_t kNumStateReaders = 2;

class GpuSteps {
 public:
  using Clock = std::chrono::steady_clock;

  /// Describes what a recorded graph depends on besides the numbers in memory.
  struct GraphKey {
    double per_token = 0.0;
    std::vector<const void*> batches;
    bool operator==(const GraphKey&) const = default;
  };
  struct Recorded {
    GraphKey key;
    bool has_run = false;
    cuda::Graph graph;  // undefined before the key was met twice
    PhaseClock clock;
  };

  /// Keeps as many graphs as steps may be started.
  explicit GpuSteps(std::size_t max_graphs) : max_graphs_(max_graphs) {}

  /// Returns the graph of this key, or a new one in the place of the one that was met least recently.
  Recorded& recorded(const GraphKey& key, const cuda::Stream& stream);
  bool has_recorded() const { return !recorded_.empty(); }

  /// Starts the measurement of times. Must be called before a step is started while no other step is in flight.
  void start_idle(const cuda::Stream& stream);
  /// Ends the oldest step, whose event `done` has passed. Returns the time at which that was. `done` gets another
  /// event.
  Clock::time_point end(cuda::Event& done);

  /// Returns the events, by StateReader, that a GPU waits for before a step changes the training state.
  std::array<cuda::Event, kNumStateReaders>& state_read_done() { return state_read_done_; }

 private:
  std::size_t max_graphs_;
  std::list<Recorded> recorded_;  // the one met last first
  // The end of the step that was finished last, or the point of the stream that the first step in flight follows.
  cuda::Event last_end_;
  // The time at which the GPU passed last_end_.
  Clock::time_point last_ended_;
  std::array<cuda::Event, kNumStateReaders> state_read_done_;
};

}  // namespace tessera
