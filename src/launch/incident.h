// What has happened to a run, for people and programs: <dump_folder>/incidents/N.json.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "launch/ladder.h"
#include "launch/watch/failure.h"

namespace tessera {

struct Incident {
  int number = 1;
  double noticed_at = 0.0;  // seconds of Unix time
  double lost_from = 0.0;   // when the run stood still: a launcher's loss is noticed long after that
  std::int64_t attempt = 1;
  Failure failure = {};
  Decision decision = {};
  std::string spare = {};  // in the place of the blamed node
  /// Once the run trains again; its first step then is resumed_step + 1.
  std::optional<std::int64_t> resumed_step = {};
  std::int64_t last_step = 0;  // the last one that all ranks had begun
  /// The time from lost_from until the run was as far as before, or failed again; none: it still heals.
  std::optional<double> seconds_lost = {};
};

nlohmann::ordered_json to_json(const Incident& incident);

/// One paragraph.
std::string describe(const Incident& incident);

}  // namespace tessera
