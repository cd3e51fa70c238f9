// Runs probes that may hang: each has a thread of its own and a time limit. A probe's own failure is told, and never
// makes the node bad.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "health/probe.h"

namespace tessera {

class ProbeRunner {
 public:
  /// `limit`: seconds that a probe may take.
  ProbeRunner(std::vector<std::unique_ptr<Probe>> probes, double limit);
  /// Threads of probes that hang stay behind.
  ~ProbeRunner();
  ProbeRunner(const ProbeRunner&) = delete;
  ProbeRunner& operator=(const ProbeRunner&) = delete;

  struct Outcome {
    std::string probe = {};  // its name
    ProbeResult result = {};
    std::string failure = {};  // why it could not look; empty: it has
    double seconds = 0.0;      // that it took
  };
  /// All probes look once, at the same time. One that still hangs since an earlier call is not asked anew. `now`:
  /// seconds on a clock that only goes on. `forgets`: an active check has passed since the last call, so that events
  /// of before count no more.
  std::vector<Outcome> look(double now, bool forgets = false);

 private:
  struct Worker;
  double limit_;
  std::vector<std::shared_ptr<Worker>> workers_;
};

}  // namespace tessera
