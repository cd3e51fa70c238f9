// What a probe of a node's health is. A probe looks at one subject (GPUs, disks, links) and says what is wrong with it,
// with numbers. Whether the node is sick follows from all findings together (health/verdict.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/measurement.h"

namespace tessera {

/// How much a finding says by itself.
enum class EvidenceKind : std::uint8_t {
  kHard,   // alone enough to call the node bad: an XID, a lost link
  kSoft,   // calls the node bad only together with another signal that agrees: link errors that rise
  kAlert,  // is told to people, and never drains a node: thermal throttling
};

/// Something that is wrong with a part of the node.
struct Finding {
  std::string signal = {};  // "gpuXid": letters and digits, as in a drain's reason, "[node_problem] gpuXid: GPU 3 ..."
  std::string part = {};    // "GPU 3", "mlx5_0 port 1", "/dev/shm"; empty: the whole node
  EvidenceKind evidence = EvidenceKind::kSoft;
  double value = 0.0, limit = 0.0;  // what was seen, and what is allowed
  std::string unit = {};
  std::string detail = {};  // a sentence for people
};

struct ProbeResult {
  std::vector<Finding> findings = {};          // none: all is well
  std::vector<Measurement> measurements = {};  // in Prometheus tessera_node_<name>
};

/// Keeps what it saw before, where only a difference means something.
class Probe {
 public:
  Probe() = default;
  virtual ~Probe() = default;
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  /// "gpu".
  virtual std::string_view name() const = 0;
  /// Looks once. `now`: seconds on a clock that only goes on. Throws Error if it cannot look at all; that is a failure
  /// of the probe, which never makes a node bad. A part that does not exist or is not supported here is no error.
  virtual ProbeResult look(double now) = 0;
  /// An active check has passed: events that were seen before it (an XID, a line of the kernel's log) are told no more.
  virtual void forget() {}
};

}  // namespace tessera
