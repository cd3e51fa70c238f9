// Serves measurements to Prometheus over HTTP, in its text format (prometheus.io, "Exposition formats").
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/measurement.h"

namespace tessera {

class MetricsServer {
 public:
  /// Listens on "HOST:PORT" and answers GET /metrics. Port 0 means any free port. `prefix` goes in front of all names.
  /// Anyone who can reach the address can read the measurements, and nothing else. Throws Error if it cannot listen
  /// there.
  MetricsServer(const std::string& address, std::string prefix);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;
  /// Replaces all measurements at once, so that no answer mixes old and new ones. It does not wait for readers. Of two
  /// measurements with the same name and labels, the last one counts.
  void publish(const std::vector<Measurement>& measurements);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
