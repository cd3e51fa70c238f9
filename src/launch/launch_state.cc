#include "launch/launch_state.h"

#include <algorithm>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "launch/launch_files.h"
#include "launch/watch/failure.h"

namespace tessera {
namespace {

constexpr const char* kFormat = "tessera-launch";
constexpr const char* kLossFormat = "tessera-launcher-lost";
constexpr std::uint64_t kVersion = 1;

nlohmann::ordered_json to_json(const LaunchState::Job& job) { return {{"id", job.id}, {"restarts", job.restarts}}; }

LaunchState::Job job_from_json(const JsonFields<>& parent) {
  const JsonFields<> fields(parent.at("job"), parent.place_of("job"));
  return {.id = fields.text("id"),
          .restarts = static_cast<int>(fields.count("restarts", std::numeric_limits<int>::max()))};
}

nlohmann::ordered_json to_json(const LaunchBegin& begin) {
  nlohmann::ordered_json left_behind = nlohmann::ordered_json::array();
  for (const auto& [step, manifest] : begin.left_behind) {
    left_behind.push_back({{"step", step}, {"manifest", to_hex(manifest)}});
  }
  return {{"step", begin.load_step}, {"left_behind", left_behind}, {"has_trained", begin.has_trained}};
}

LaunchBegin begin_from_json(const JsonFields<>& parent) {
  const JsonFields<> fields(parent.at("load_step"), parent.place_of("load_step"));
  LaunchBegin begin{.load_step = static_cast<std::int64_t>(fields.count("step", INT64_MAX)),
                    .has_trained = fields.flag("has_trained")};
  for (const auto& checkpoint : fields.array("left_behind")) {
    const JsonFields<> of_checkpoint(checkpoint, fields.place_of("left_behind"));
    const auto step = static_cast<std::int64_t>(of_checkpoint.count("step", INT64_MAX));
    begin.left_behind[step] = of_checkpoint.hex("manifest");
  }
  return begin;
}

}  // namespace

nlohmann::ordered_json to_json(const LaunchState& state) {
  nlohmann::ordered_json nodes = nlohmann::ordered_json::array();
  for (const LaunchState::Node& node : state.nodes) {
    nodes.push_back({{"name", node.name}, {"role", node.role}, {"silent_seconds", node.silent_seconds}});
  }
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"version", kVersion},
                                 {"run_id", state.run_id},
                                 {"attempt", state.attempt},
                                 {"state", state.state},
                                 {"host", state.host},
                                 {"pid", state.pid},
                                 {"engine", state.engine},
                                 {"endpoint", state.endpoint},
                                 {"job", nullptr},
                                 {"time", state.time},
                                 {"begin", state.begin},
                                 {"step", state.step},
                                 {"num_steps", state.num_steps},
                                 {"step_seconds", state.step_seconds},
                                 {"nodes", nodes},
                                 {"wanted_spares", state.wanted_spares},
                                 {"incidents", state.incidents},
                                 {"seconds_lost", state.seconds_lost},
                                 {"effective_training_time", state.effective_training_time()},
                                 {"exit_status", nullptr},
                                 {"load_step", nullptr}};
  if (state.job) json["job"] = to_json(*state.job);
  if (state.exit_status) json["exit_status"] = *state.exit_status;
  if (state.load_step) json["load_step"] = to_json(*state.load_step);
  return json;
}

std::vector<Measurement> measurements_of(const LaunchState& state,
                                         const std::map<std::string, int>& incidents_by_kind) {
  const double seconds = state.time - state.begin;
  std::vector<Measurement> numbers = {
      {"attempt", "Number of the attempt", {}, static_cast<double>(state.attempt)},
      {"is_training", "Whether the ranks train", {}, state.state == "training" ? 1.0 : 0.0},
      {"step", "Step that all ranks have begun", {}, static_cast<double>(state.step)},
      {"wanted_spares", "Spare nodes that were asked for", {}, static_cast<double>(state.wanted_spares)},
      {"lost_seconds_total", "Seconds that incidents have cost", {}, state.seconds_lost, true},
      {"effective_training_time_ratio",
       "Share of the time in which the run got on",
       {},
       state.effective_training_time()},
      {"time_seconds", "Unix time at which the launcher wrote this", {}, state.time}};
  if (state.incidents > 0) {
    numbers.push_back({"mtbf_seconds", "Mean time between incidents", {}, seconds / state.incidents});
    numbers.push_back(
        {"mttr_seconds", "Mean time that an incident has cost", {}, state.seconds_lost / state.incidents});
  }
  for (const char* role : {"active", "spare", "lost", "drained"}) {
    const auto count = std::ranges::count(state.nodes, role, &LaunchState::Node::role);
    numbers.push_back({"nodes", "Nodes by what they do", {{"role", role}}, static_cast<double>(count)});
  }
  // For Prometheus, a counter that begins at 1 has not risen. So each kind begins at 0.
  for (int kind = 0; kind <= static_cast<int>(FailureKind::kLauncherLost); ++kind) {
    const std::string name(name_of(static_cast<FailureKind>(kind)));
    const auto found = incidents_by_kind.find(name);
    numbers.push_back({"incidents_total",
                       "Incidents since the launcher began, by kind",
                       {{"kind", name}},
                       found == incidents_by_kind.end() ? 0.0 : found->second,
                       true});
  }
  return numbers;
}

std::optional<LaunchState> read_launch_state(const std::filesystem::path& folder) {
  const auto json = read_json_file(folder / kLaunchStateName, kFormat, kVersion);
  if (!json) return std::nullopt;
  const JsonFields<> fields(*json, fmt::format("'{}'", (folder / kLaunchStateName).string()));
  LaunchState state{.run_id = fields.text("run_id"),
                    .attempt = static_cast<std::int64_t>(fields.count("attempt")),
                    .state = fields.text("state"),
                    .host = fields.text("host"),
                    .engine = fields.text("engine"),
                    .endpoint = fields.contains("endpoint") ? fields.text("endpoint") : "",
                    .pid = static_cast<int>(fields.count("pid")),
                    .time = fields.number("time"),
                    .begin = fields.number("begin"),
                    .step = static_cast<std::int64_t>(fields.count("step")),
                    .num_steps = static_cast<std::int64_t>(fields.count("num_steps")),
                    .step_seconds = fields.number("step_seconds"),
                    .nodes = {},
                    .incidents = static_cast<int>(fields.count("incidents")),
                    .seconds_lost = fields.number("seconds_lost")};
  for (const auto& node : fields.array("nodes")) {
    const JsonFields<> of_node(node, fields.place_of("nodes"));
    state.nodes.push_back({of_node.text("name"), of_node.text("role"), of_node.number("silent_seconds")});
  }
  if (fields.contains("wanted_spares")) state.wanted_spares = static_cast<int>(fields.count("wanted_spares"));
  if (fields.find("job") != nullptr) state.job = job_from_json(fields);
  if (fields.find("exit_status") != nullptr) state.exit_status = static_cast<int>(fields.count("exit_status"));
  if (fields.find("load_step") != nullptr) state.load_step = begin_from_json(fields);
  return state;
}

void write_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost, double noticed_at) {
  const nlohmann::ordered_json json = {
      {"format", kLossFormat}, {"version", kVersion}, {"job", to_json(lost.job.value())}, {"noticed_at", noticed_at}};
  write_whole_file(folder / kLauncherLossName, json_text(json, 2) + "\n");
}

std::optional<double> read_launcher_loss(const std::filesystem::path& folder, const LaunchState& lost) {
  const auto json = read_json_file(folder / kLauncherLossName, kLossFormat, kVersion);
  if (!json) return std::nullopt;
  const JsonFields<> fields(*json, fmt::format("'{}'", (folder / kLauncherLossName).string()));
  if (lost.job != job_from_json(fields)) return std::nullopt;  // another launcher was lost
  return fields.number("noticed_at");
}

}  // namespace tessera
