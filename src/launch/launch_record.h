// What a launcher tells while it works: launch.json, a file per incident, and numbers for Prometheus.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/stopwatch.h"
#include "launch/incident.h"
#include "launch/launch_state.h"
#include "launch/watch/background_writer.h"
#include "system/metrics_server.h"

namespace tessera {

class LaunchRecord {
 public:
  /// `folder` is the run's (job.dump_folder).
  explicit LaunchRecord(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Returns the state that write_state() writes.
  LaunchState& state() { return state_; }
  const LaunchState& state() const { return state_; }

  /// Serves the numbers at this address, "HOST:PORT". Throws Error if it is in use.
  void serve(const std::string& address) { server_.emplace(address, "tessera_launch_"); }
  /// Sets the state's name, time and nodes, and writes and publishes it.
  void write_state(const std::string& name, std::vector<LaunchState::Node> nodes);
  /// Returns whether the state should be written again, although nothing has happened.
  bool is_old() const { return since_written_.seconds() > 1.0; }
  /// Writes the incident's file, or writes it again.
  void write_incident(const Incident& incident);

 private:
  std::filesystem::path folder_;
  LaunchState state_;
  Stopwatch since_written_;
  std::optional<MetricsServer> server_;
  std::map<std::string, int> incidents_by_kind_;  // counted by this launcher
  int counted_incident_ = 0;
  BackgroundWriter writer_;  // last, so that it ends first, while everything else exists
};

}  // namespace tessera
