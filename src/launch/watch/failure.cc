#include "launch/watch/failure.h"

#include <cctype>

#include "base/exit_status.h"

namespace tessera {

std::string_view name_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::kRankDied:
      return "rank died";
    case FailureKind::kRankHung:
      return "rank hung";
    case FailureKind::kRankSlow:
      return "rank slow";
    case FailureKind::kNodeSick:
      return "node sick";
    case FailureKind::kNodeLost:
      return "node lost";
    case FailureKind::kNonFinite:
      return "step not finite";
    case FailureKind::kLossSpike:
      return "loss spike";
    case FailureKind::kWeightsDiffer:
      return "weights differ";
    case FailureKind::kStorageFailed:
      return "storage failed";
    case FailureKind::kProgramError:
      return "program error";
    case FailureKind::kWrongInput:
      return "wrong input";
    case FailureKind::kTakenOver:
      return "taken over";
    case FailureKind::kStartFailed:
      return "start failed";
    case FailureKind::kLauncherLost:
      return "launcher lost";
  }
  return "unknown";
}

std::string signal_of(FailureKind kind) {
  std::string signal;
  bool is_begin = false;  // of a word after the first
  for (const char ch : name_of(kind)) {
    if (ch != ' ' && ch != '-') signal += is_begin ? static_cast<char>(std::toupper(ch)) : ch;
    is_begin = ch == ' ' || ch == '-';
  }
  return signal;
}

std::optional<FailureKind> kind_of_status(int exit_status) {
  switch (static_cast<ExitStatus>(exit_status)) {
    case ExitStatus::kDone:
    case ExitStatus::kRankFailed:
      return std::nullopt;
    case ExitStatus::kWrongInput:
      return FailureKind::kWrongInput;
    case ExitStatus::kNonFinite:
      return FailureKind::kNonFinite;
    case ExitStatus::kLossSpike:
      return FailureKind::kLossSpike;
    case ExitStatus::kWeightsDiffer:
      return FailureKind::kWeightsDiffer;
    case ExitStatus::kTakenOver:
      return FailureKind::kTakenOver;
    case ExitStatus::kStorageFailed:
      return FailureKind::kStorageFailed;
    default:
      return FailureKind::kProgramError;
  }
}

}  // namespace tessera
