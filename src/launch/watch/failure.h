// What can go wrong in a run, as a launcher sees it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/observe/flight_analysis.h"

namespace tessera {

enum class FailureKind : std::uint8_t {
  kRankDied,       // its process ended without saying why
  kRankHung,       // it is stopped, or does not get on
  kRankSlow,       // it computes much longer than the others
  kNodeSick,       // its health daemon says that it is bad (health/verdict.h)
  kNodeLost,       // its monitor is silent: crash, power, network, a frozen kernel
  kNonFinite,      // ExitStatus::kNonFinite
  kWeightsDiffer,  // ExitStatus::kWeightsDiffer
  kStorageFailed,  // ExitStatus::kStorageFailed
  kProgramError,   // any other error of a rank
  kWrongInput,     // ExitStatus::kWrongInput
  kTakenOver,      // ExitStatus::kTakenOver
  kStartFailed,    // the ranks did not come
  kLauncherLost,   // the launcher before this one ended without a word
};
/// "rank died".
std::string_view name_of(FailureKind kind);
/// "rankDied", as the reasons for drained nodes name problems.
std::string signal_of(FailureKind kind);

/// The kind of a rank's end with this exit status; none if it tells of another rank's failure, or of none.
std::optional<FailureKind> kind_of_status(int exit_status);

struct Failure {
  FailureKind kind = FailureKind::kProgramError;
  std::optional<int> rank = {};  // that is blamed
  std::string node = {};         // that is blamed; empty: none can be named
  Certainty sure = Certainty::kUnknown;
  std::int64_t step = 0;                   // at which it happened; 0: before the first
  std::vector<std::string> evidence = {};  // sentences
};

}  // namespace tessera
