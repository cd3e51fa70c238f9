// Decides from a node's verdict whether a scheduler should drain the node or return it.
#pragma once

#include <optional>
#include <string>

#include "health/verdict.h"

namespace tessera {

/// Holds what the scheduler reports about the node.
struct SchedulerNode {
  bool is_drained = false;
  std::string reason = {};  // reason why it is drained
  int num_drained = 0;      // number of nodes in all that are drained for a "[node_problem]"
};

/// Says what to do with a node.
enum class DrainAction : std::uint8_t {
  kNone,
  kDrain,
  kUndrain,
  kLimited,  // it should be drained, but too many nodes are drained already
};

/// Returns what to do with a node. A bad node is drained unless `max_drained` nodes are drained already. A drained node
/// is returned only if an active check has passed since then, the node is ok, and the reason is ours. `own_reason` is
/// the reason that we gave, or nullopt if we drained nothing. A node that an operator drained stays drained.
DrainAction decide(const NodeVerdict& verdict, const SchedulerNode& node, const std::optional<std::string>& own_reason,
                   int max_drained, double unix_now);

}  // namespace tessera
