// A probe looks at one subject of a node's health (GPUs, disks, links) and reports with numbers what is wrong with it.
// Whether the node is bad follows from all findings together (health/judge.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/measurement.h"

namespace tessera {

/// Says how much a finding proves by itself.
enum class EvidenceKind : std::uint8_t {
  kHard,   // alone enough to call the node bad: an XID, a lost link
  kSoft,   // makes the node bad only together with another signal that agrees: link errors that rise
  kAlert,  // is reported to people, and never drains a node: thermal throttling
};

/// Describes something that is wrong with a part of the node.
struct Finding {
  std::string signal = {};  // "gpuXid": letters and digits, as in a drain's reason, "[node_problem] gpuXid: GPU 3 ..."
  std::string part = {};    // "GPU 3", "mlx5_0 port 1", "/dev/shm"; empty: the whole node
  EvidenceKind evidence = EvidenceKind::kSoft;
  double value = 0.0, limit = 0.0;  // the value that was seen, and the one that is allowed
  std::string unit = {};
  std::string detail = {};  // a sentence for people
};

struct ProbeResult {
  std::vector<Finding> findings = {};          // empty: all is well
  std::vector<Measurement> measurements = {};  // named tessera_node_<name> in Prometheus
};

/// Probes one subject. It remembers what it saw before, if only a difference means something.
class Probe {
 public:
  Probe() = default;
  virtual ~Probe() = default;
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  /// Returns the probe's name: "gpu".
  virtual std::string_view name() const = 0;
  /// Looks once. `now` is seconds on a monotonic clock. Throws Error if it cannot look at all. That is a failure of the
  /// probe, which never makes a node bad. A part that does not exist or is not supported here is no error.
  virtual ProbeResult look(double now) = 0;
  /// Forgets earlier events (an XID, a line of the kernel's log), because an active check has passed.
  virtual void forget() {}
};

}  // namespace tessera
