#include "launch/launch_record.h"

#include <fmt/format.h>

#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "base/unix_time.h"
#include "launch/launch_files.h"

namespace tessera {

void LaunchRecord::write_state(const std::string& name, std::vector<LaunchState::Node> nodes) {
  since_written_ = {};
  state_.state = name;
  state_.time = unix_time();
  state_.nodes = std::move(nodes);
  writer_.write(folder_ / kLaunchStateName, json_text(to_json(state_), 2) + "\n");
  if (server_) server_->publish(measurements_of(state_, incidents_by_kind_));
}

void LaunchRecord::write_incident(const Incident& incident) {
  if (counted_incident_ < incident.number) {
    counted_incident_ = incident.number;
    ++incidents_by_kind_[std::string(name_of(incident.failure.kind))];
  }
  writer_.write(folder_ / kIncidentsFolderName / fmt::format("{}.json", incident.number),
                json_text(to_json(incident), 2) + "\n");
}

}  // namespace tessera
