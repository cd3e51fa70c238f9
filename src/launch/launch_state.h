// launch.json in a run's folder says what the launcher does, for `tessera status` and for the run's next launcher.
//
//   {"format": "tessera-launch", "version": 1, "run_id": "...", "attempt": 3, "state": "training",
//    "host": "head", "pid": 4711, "engine": "slurm", "endpoint": "tcp://head:40001",
//    "job": {"id": "4711", "restarts": 0}, "time": 1764000000.0, "begin": 1763990000.0,
//    "step": 120, "num_steps": 300, "step_seconds": 0.5,
//    "nodes": [{"name": "n1", "role": "active", "silent_seconds": 0.2}, ...], "wanted_spares": 1,
//    "incidents": 2, "seconds_lost": 17.5, "effective_training_time": 0.99, "exit_status": null,
//    "load_step": null}
//
// A launch that began at checkpoint.load_step has a "load_step" with the later checkpoints that it left behind:
//
//   {"step": 15, "left_behind": [{"step": 20, "manifest": "0123456789abcdef"}, ...], "has_trained": true}
//
// launcher-lost.json beside it records when the job of a lost launcher was requeued. A watcher outside of the job
// writes it.
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
#include "run/restart_step.h"

namespace tessera {

struct LaunchState {
  struct Node {
    std::string name;
    std::string role;  // "active", "spare", "lost", "drained"
    double silent_seconds = 0.0;
  };
  /// Identifies the scheduler's job that the launcher runs in.
  struct Job {
    std::string id;
    int restarts = 0;  // number of times that it had been requeued when this launcher began
    bool operator==(const Job&) const = default;
  };

  std::string run_id;
  std::int64_t attempt = 0;
  std::string state = {};  // "starting", "training", "recovering", "done", "stopped"
  std::string host = {}, engine = {};
  std::string endpoint = {};    // address at which the launcher listens
  std::optional<Job> job = {};  // not set: there is no scheduler
  int pid = 0;
  double time = 0.0, begin = 0.0;  // Unix times: when this was written, and when the launch began
  std::int64_t step = 0, num_steps = 0;
  double step_seconds = 0.0;
  std::vector<Node> nodes = {};
  int wanted_spares = 0;  // --spares
  int incidents = 0;
  double seconds_lost = 0.0;  // through all incidents
  std::optional<int> exit_status = {};
  std::optional<LaunchBegin> load_step = {};  // not set: the launch has no checkpoint.load_step, or has not begun

  /// Returns the part of the time since the launch began in which the run made progress.
  double effective_training_time() const { return time > begin ? 1.0 - seconds_lost / (time - begin) : 1.0; }
  bool has_ended() const { return state == "done" || state == "stopped"; }
};

nlohmann::ordered_json to_json(const LaunchState& state);

/// Returns the numbers for Prometheus, whose names get "tessera_launch_" in front. `incidents_by_kind` is keyed by
/// name_of(FailureKind).
std::vector<Measurement> measurements_of(const LaunchState& state, const std::map<std::string, int>& incidents_by_kind);

/// Returns the state, or nullopt if the folder has no such file. Throws Error if it is damaged.
std::optional<LaunchState> read_launch_state(const std::filesystem::path& folder);

/// Records for the next launcher when the loss of the one that wrote `lost` was noticed. That launcher must have a job.
void write_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost, double noticed_at);
/// Returns the time at which it was noticed, as Unix time, or nullopt if nobody noticed the loss. Throws Error if the
/// file is damaged.
std::optional<double> read_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost);

}  // namespace tessera
