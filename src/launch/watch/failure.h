// The failures of a run, as a launcher sees them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/observe/flight_analysis.h"

namespace tessera {

/// Names the kinds of failures.
enum class FailureKind : std::uint8_t {
  kRankDied,       // its process ended without saying why
  kRankHung,       // it is stopped, or makes no progress
  kRankSlow,       // it computes much longer than the others
  kNodeSick,       // its health daemon calls it bad (health/verdict.h)
  kNodeLost,       // its monitor is silent: crash, power cut, network failure, frozen kernel
  kNonFinite,      // ExitStatus::kNonFinite
  kLossSpike,      // ExitStatus::kLossSpike
  kWeightsDiffer,  // ExitStatus::kWeightsDiffer
  kStorageFailed,  // ExitStatus::kStorageFailed
  kProgramError,   // any other error of a rank
  kWrongInput,     // ExitStatus::kWrongInput
  kTakenOver,      // ExitStatus::kTakenOver
  kStartFailed,    // not all ranks arrived
  kLauncherLost,   // the launcher before this one ended without a word
};
/// Returns the kind's name: "rank died".
std::string_view name_of(FailureKind kind);
/// Returns the kind's name in the form that reasons for draining nodes use: "rankDied".
std::string signal_of(FailureKind kind);

/// Returns the kind of failure that a rank's exit status means. Returns nullopt if the rank ended well or because of
/// another rank.
std::optional<FailureKind> kind_of_status(int exit_status);

struct Failure {
  FailureKind kind = FailureKind::kProgramError;
  std::optional<int> rank = {};  // the blamed rank
  std::string node = {};         // the blamed node; empty: none can be named
  Certainty sure = Certainty::kUnknown;
  std::int64_t step = 0;                   // the step at which it happened; 0: before the first step
  std::vector<std::string> evidence = {};  // sentences
};

}  // namespace tessera
