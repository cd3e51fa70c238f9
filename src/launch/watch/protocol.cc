#include "launch/watch/protocol.h"

#include "base/error.h"
#include "base/json.h"

namespace tessera {
namespace {

constexpr double kSecond = 1e9;  // nanoseconds

}  // namespace

RankReport report_of(const RankState& state) {
  RankReport report{.rank = state.world_rank,
                    .is_ended = state.process == ProcessState::kEnded,
                    .is_stopped = state.process == ProcessState::kStopped,
                    .first_step = state.first_step,
                    .step = state.step,
                    .section = std::string(name_of(state.section)),
                    .section_seconds = static_cast<double>(state.read_ns - state.section_since_ns) / kSecond,
                    .operation = state.operation,
                    .operation_seconds = static_cast<double>(state.read_ns - state.operation_since_ns) / kSecond,
                    .idle_seconds = static_cast<double>(state.all_idle_ns()) / kSecond};
  if (state.end) {
    report.exit_status = state.end->exit_status;
    report.end_message = state.end->message;
  }
  return report;
}

nlohmann::json to_json(const RankReport& report) {
  nlohmann::json json = {{"rank", report.rank},
                         {"ended", report.is_ended},
                         {"stopped", report.is_stopped},
                         {"first_step", report.first_step},
                         {"step", report.step},
                         {"section", report.section},
                         {"section_seconds", report.section_seconds},
                         {"operation", report.operation},
                         {"operation_seconds", report.operation_seconds},
                         {"idle_seconds", report.idle_seconds}};
  if (report.exit_status) {
    json["exit_status"] = *report.exit_status;
    json["message"] = report.end_message;
  }
  return json;
}

RankReport report_from_json(const nlohmann::json& json) {
  try {
    RankReport report{.rank = json.at("rank").get<int>(),
                      .is_ended = json.at("ended").get<bool>(),
                      .is_stopped = json.at("stopped").get<bool>(),
                      .first_step = json.at("first_step").get<std::int64_t>(),
                      .step = json.at("step").get<std::int64_t>(),
                      .section = json.at("section").get<std::string>(),
                      .section_seconds = json.at("section_seconds").get<double>(),
                      .operation = json.at("operation").get<std::string>(),
                      .operation_seconds = json.at("operation_seconds").get<double>(),
                      .idle_seconds = json.at("idle_seconds").get<double>()};
    if (json.contains("exit_status")) {
      report.exit_status = json.at("exit_status").get<int>();
      report.end_message = json.at("message").get<std::string>();
    }
    return report;
  } catch (const nlohmann::json::exception& error) {
    fail("a monitor's report of a rank is not understood: {}", json_problem(error));
  }
}

}  // namespace tessera
