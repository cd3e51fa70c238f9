// The incidents of a run, for people and programs. Each incident is a file <dump_folder>/incidents/N.json.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "launch/ladder.h"
#include "launch/watch/failure.h"

namespace tessera {

/// Describes an incident.
struct Incident {
  int number = 1;
  double noticed_at = 0.0;  // Unix time in seconds
  double lost_from = 0.0;   // Unix time of the end of its progress; a launcher's loss is noticed long after that
  std::int64_t attempt = 1;
  Failure failure = {};
  Decision decision = {};
  std::string spare = {};  // the node that replaces the blamed one
  /// The step that the run resumed from. Its first step then is resumed_step + 1. It is set once the run trains again.
  std::optional<std::int64_t> resumed_step = {};
  std::int64_t last_step = 0;  // the last step that all ranks had begun
  /// The time from lost_from until the run was as far as before, or failed again. It is not set while the run still
  /// heals.
  std::optional<double> seconds_lost = {};
};

nlohmann::ordered_json to_json(const Incident& incident);

/// Describes the incident in one paragraph.
std::string describe(const Incident& incident);

}  // namespace tessera
