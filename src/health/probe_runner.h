// Runs probes that may hang. Each has its own thread and a time limit. A probe's own failure is reported, and never
// makes the node bad.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "health/probe.h"

namespace tessera {

class ProbeRunner {
 public:
  /// `limit` is the number of seconds that a probe may take.
  ProbeRunner(std::vector<std::unique_ptr<Probe>> probes, double limit);
  /// Does not wait for probes that hang. Their threads stay behind.
  ~ProbeRunner();
  ProbeRunner(const ProbeRunner&) = delete;
  ProbeRunner& operator=(const ProbeRunner&) = delete;

  struct Outcome {
    std::string probe = {};  // the probe's name
    ProbeResult result = {};
    std::string failure = {};  // reason why it could not look; empty: it could
    double seconds = 0.0;      // time that it took
  };
  /// Lets all probes look once, at the same time. A probe that still hangs since an earlier call is not asked again.
  /// `now` is seconds on a monotonic clock. If `forgets`, an active check has passed since the last call, so that
  /// earlier events no longer count.
  std::vector<Outcome> look(double now, bool forgets = false);

 private:
  struct Worker;
  double limit_;
  std::vector<std::shared_ptr<Worker>> workers_;
};

}  // namespace tessera
