#include "launch/incident.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {
namespace {

std::int64_t steps_lost(const Incident& incident) {
  return std::max<std::int64_t>(0, incident.last_step - 1 - incident.resumed_step.value_or(incident.last_step - 1));
}

}  // namespace

std::string describe(const Incident& incident) {
  const Failure& failure = incident.failure;
  std::string text = fmt::format("Attempt {}, step {}: {}.", incident.attempt, failure.step, name_of(failure.kind));
  for (const std::string& evidence : failure.evidence) text += fmt::format(" Evidence: {}.", evidence);
  if (failure.rank) {
    text += fmt::format(" Blamed: rank {} on {} ({}).", *failure.rank, failure.node, name_of(failure.sure));
  } else if (!failure.node.empty()) {
    text += fmt::format(" Blamed: {} ({}).", failure.node, name_of(failure.sure));
  } else {
    text += " Nobody can be blamed.";
  }
  text += fmt::format(" Action: {}{}, since {}.", name_of(incident.decision.action),
                      incident.spare.empty() ? "" : fmt::format(" ({} for {})", incident.spare, failure.node),
                      incident.decision.reason);
  if (incident.seconds_lost) {
    text += incident.resumed_step
                ? fmt::format(" The run went on from step {}; {} steps and {:.1f} s were lost.", *incident.resumed_step,
                              steps_lost(incident), *incident.seconds_lost)
                : fmt::format(" The run failed again before it trained; {:.1f} s were lost.", *incident.seconds_lost);
  }
  return text;
}

nlohmann::ordered_json to_json(const Incident& incident) {
  const Failure& failure = incident.failure;
  nlohmann::ordered_json blamed = {{"rank", nullptr}, {"node", nullptr}, {"sure", name_of(failure.sure)}};
  if (failure.rank) blamed["rank"] = *failure.rank;
  if (!failure.node.empty()) blamed["node"] = failure.node;
  nlohmann::ordered_json json = {{"number", incident.number},
                                 {"kind", name_of(failure.kind)},
                                 {"time_of_fault_noticed", incident.noticed_at},
                                 {"attempt", incident.attempt},
                                 {"step", failure.step},
                                 {"blamed", blamed},
                                 {"evidence", failure.evidence},
                                 {"action", name_of(incident.decision.action)},
                                 {"reason", incident.decision.reason},
                                 {"spare", nullptr},
                                 {"resumed_step", nullptr},
                                 {"steps_lost", nullptr},
                                 {"seconds_lost", nullptr},
                                 {"text", describe(incident)}};
  if (!incident.spare.empty()) json["spare"] = incident.spare;
  if (incident.resumed_step) {
    json["resumed_step"] = *incident.resumed_step;
    json["steps_lost"] = steps_lost(incident);
  }
  if (incident.seconds_lost) json["seconds_lost"] = *incident.seconds_lost;
  return json;
}

}  // namespace tessera
