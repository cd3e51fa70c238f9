// Measures how long the phases of a step take.
#pragma once

#include <vector>

#include "base/stopwatch.h"
#include "device/cuda.h"

namespace tessera {

/// Holds the seconds that each phase of a step takes. The head's backward runs with its forward, chunk by chunk, and
/// counts as forward.
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

/// Measures phases where they run. On a CPU it reads a stopwatch. On a GPU the host runs ahead, so it records events on
/// the stream. Every launch of a recorded graph passes these events again.
class PhaseClock {
 public:
  /// `stream` is the GPU's stream. Null measures on the CPU.
  explicit PhaseClock(const cuda::Stream* stream = nullptr) : stream_(stream) {}

  /// Forgets all measurements.
  void reset();
  void begin();
  /// Counts the work since begin() as this phase.
  void end(double PhaseSeconds::*phase);
  /// Returns the sums since reset(). On a GPU they are of the latest pass of the stream's events, all of which the
  /// stream must have passed.
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
