// launch.json in a run's folder: what the launcher does, for `tessera status` and for the next launcher of the run.
//
//   {"format": "tessera-launch", "version": 1, "run_id": "...", "attempt": 3, "state": "training",
//    "host": "head", "pid": 4711, "engine": "slurm", "endpoint": "tcp://head:40001",
//    "job": {"id": "4711", "restarts": 0}, "time": 1764000000.0, "begin": 1763990000.0,
//    "step": 120, "num_steps": 300, "step_seconds": 0.5,
//    "nodes": [{"name": "n1", "role": "active", "silent_seconds": 0.2}, ...],
//    "incidents": 2, "seconds_lost": 17.5, "exit_status": null}
//
// launcher-lost.json beside it: who watches launchers from outside notes when it requeued the job of a lost one.
//
//   {"format": "tessera-launcher-lost", "version": 1, "job": {"id": "4711", "restarts": 0}, "noticed_at": 1764000012.0}
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/measurement.h"

namespace tessera {

struct LaunchState {
  struct Node {
    std::string name;
    std::string role;  // "active", "spare", "lost", "drained"
    double silent_seconds = 0.0;
  };
  /// The scheduler's job that the launcher runs in.
  struct Job {
    std::string id;
    int restarts = 0;  // how often it had been requeued when this launcher began
    bool operator==(const Job&) const = default;
  };

  std::string run_id;
  std::int64_t attempt = 0;
  std::string state = {};  // "starting", "training", "recovering", "done", "stopped"
  std::string host = {}, engine = {};
  std::string endpoint = {};    // where the launcher listens
  std::optional<Job> job = {};  // none: there is no scheduler
  int pid = 0;
  double time = 0.0, begin = 0.0;  // Unix time, seconds: when it was written, and when the launch began
  std::int64_t step = 0, num_steps = 0;
  double step_seconds = 0.0;
  std::vector<Node> nodes = {};
  int incidents = 0;
  double seconds_lost = 0.0;  // by all incidents
  std::optional<int> exit_status = {};

  /// The share of the time since the launch began in which the run got on.
  double effective_training_time() const { return time > begin ? 1.0 - seconds_lost / (time - begin) : 1.0; }
  bool has_ended() const { return state == "done" || state == "stopped"; }
};

nlohmann::ordered_json to_json(const LaunchState& state);

/// For Prometheus, behind "tessera_launch_". `incidents_by_kind`: by name_of(FailureKind).
std::vector<Measurement> measurements_of(const LaunchState& state, const std::map<std::string, int>& incidents_by_kind);

/// None if the folder has no such file. Throws Error if it is damaged.
std::optional<LaunchState> read_launch_state(const std::filesystem::path& folder);

/// Leaves word for the next launcher that the one which wrote `lost`, and has a job, was noticed to be lost.
void write_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost, double noticed_at);
/// When that was, as Unix time; none if nobody noticed it. Throws Error if the file is damaged.
std::optional<double> read_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost);

}  // namespace tessera
