// What a node's verdict means for a scheduler that may drain nodes.
#pragma once

#include <optional>
#include <string>

#include "health/verdict.h"

namespace tessera {

/// What the scheduler says of the node.
struct SchedulerNode {
  bool is_drained = false;
  std::string reason = {};  // for which it is drained
  int num_drained = 0;      // nodes in all that are drained for a "[node_problem]"
};

enum class DrainAction : std::uint8_t {
  kNone,
  kDrain,
  kUndrain,
  kLimited,  // it should be drained, but too many nodes are
};

/// A bad node is drained unless `max_drained` nodes are already. A node is returned only if an active check has passed
/// since it was drained, and for the reason that we gave (`own_reason`; none: we drained nothing): what an operator
/// drained stays drained.
DrainAction decide(const NodeVerdict& verdict, const SchedulerNode& node, const std::optional<std::string>& own_reason,
                   int max_drained, double unix_now);

}  // namespace tessera
