// Serves numbers to Prometheus, over HTTP in its text format (prometheus.io, "Exposition formats").
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/measurement.h"

namespace tessera {

class MetricsServer {
 public:
  /// Listens on "HOST:PORT" and answers GET /metrics; port 0 is any that is free. Names get `prefix` in front. Anyone
  /// who reaches the address can read the numbers, and nothing else. Throws Error if nobody can listen there.
  MetricsServer(const std::string& address, std::string prefix);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;
  /// Replaces what is answered, all at once: no answer mixes old and new numbers. Does not wait for readers.
  void publish(const std::vector<Measurement>& measurements);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
