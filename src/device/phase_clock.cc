#include "device/phase_clock.h"

namespace tessera {

void PhaseClock::reset() {
  seconds_ = {};
  marks_.clear();
}

void PhaseClock::begin() {
  if (stream_ == nullptr) {
    watch_ = {};
    return;
  }
  marks_.emplace_back();
  marks_.back().begin.record(*stream_);
}

void PhaseClock::end(double PhaseSeconds::*phase) {
  if (stream_ == nullptr) {
    seconds_.*phase += watch_.seconds();
    return;
  }
  marks_.back().phase = phase;
  marks_.back().end.record(*stream_);
}

PhaseSeconds PhaseClock::seconds() const {
  PhaseSeconds all = seconds_;
  for (const Mark& mark : marks_) all.*mark.phase += mark.end.seconds_since(mark.begin);
  return all;
}

}  // namespace tessera
