#include "launch/launch_state.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "launch/launch_files.h"

namespace tessera {
namespace {

constexpr const char* kFormat = "tessera-launch";
constexpr std::uint64_t kVersion = 1;

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
                                 {"time", state.time},
                                 {"begin", state.begin},
                                 {"step", state.step},
                                 {"num_steps", state.num_steps},
                                 {"step_seconds", state.step_seconds},
                                 {"nodes", nodes},
                                 {"incidents", state.incidents},
                                 {"seconds_lost", state.seconds_lost},
                                 {"effective_training_time", state.effective_training_time()},
                                 {"exit_status", nullptr}};
  if (state.exit_status) json["exit_status"] = *state.exit_status;
  return json;
}

std::optional<LaunchState> read_launch_state(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kLaunchStateName;
  std::error_code unreadable;
  if (!std::filesystem::exists(path, unreadable)) return std::nullopt;
  const std::string name = fmt::format("'{}'", path.string());
  const auto json = parse_json(read_text_file(path), name);
  const JsonFields<> fields(json, name);
  require(fields.text("format") == kFormat && fields.count("version") == kVersion,
          "{}: expected format '{}', version {}, got '{}', version {}", name, kFormat, kVersion, fields.text("format"),
          fields.count("version"));
  LaunchState state{.run_id = fields.text("run_id"),
                    .attempt = static_cast<std::int64_t>(fields.count("attempt")),
                    .state = fields.text("state"),
                    .host = fields.text("host"),
                    .engine = fields.text("engine"),
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
  if (fields.find("exit_status") != nullptr) state.exit_status = static_cast<int>(fields.count("exit_status"));
  return state;
}

}  // namespace tessera
