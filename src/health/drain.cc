#include "health/drain.h"

namespace tessera {

DrainAction decide(const NodeVerdict& verdict, const SchedulerNode& node, const std::optional<std::string>& own_reason,
                   int max_drained, double unix_now) {
  if (!verdict.is_fresh(unix_now)) return DrainAction::kNone;
  if (verdict.level == HealthLevel::kBad) {
    if (node.is_drained) return DrainAction::kNone;
    return node.num_drained >= max_drained ? DrainAction::kLimited : DrainAction::kDrain;
  }
  const bool is_ours = node.is_drained && own_reason && !own_reason->empty() && node.reason == *own_reason;
  const bool is_well = verdict.level == HealthLevel::kOk && verdict.active_check > 0.0;
  return is_ours && is_well ? DrainAction::kUndrain : DrainAction::kNone;
}

}  // namespace tessera
