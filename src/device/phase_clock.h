// How long the phases of a step take.
#pragma once

#include <vector>

#include "base/stopwatch.h"
#include "device/cuda.h"

namespace tessera {

/// Where a step's time goes. The head's backward runs with its forward, chunk by chunk, and counts there.
struct PhaseSeconds {
  double data = 0.0, forward = 0.0, backward = 0.0, optimizer = 0.0;

  PhaseSeconds& operator+=(const PhaseSeconds& other) {
    data += other.data, forward += other.forward, backward += other.backward, optimizer += other.optimizer;
    return *this;
  }
  PhaseSeconds operator/(double count) const {
    return {
        .data = data / count, .forward = forward / count, .backward = backward / count, .optimizer = optimizer / count};
  }
};

/// Measures phases where they run: on a CPU as they pass; on a GPU, where the host is ahead, by marks on the stream,
/// which a recorded graph passes again with every launch.
class PhaseClock {
 public:
  /// Null: on the CPU.
  explicit PhaseClock(const cuda::Stream* stream = nullptr) : stream_(stream) {}

  /// Forgets what was measured.
  void reset();
  void begin();
  /// What was put there since begin() counts as this phase.
  void end(double PhaseSeconds::*phase);
  /// Sums of what was measured since reset(); on a GPU of the last passing of the marks, all of which it must have
  /// passed.
  PhaseSeconds seconds() const;

 private:
  struct Mark {
    double PhaseSeconds::*phase;
    cuda::Event begin, end;
  };
  const cuda::Stream* stream_;
  Stopwatch watch_;
  PhaseSeconds seconds_;
  std::vector<Mark> marks_;
};

}  // namespace tessera
