#include "launch/node_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

#include "base/log.h"
#include "system/child_process.h"

namespace tessera {
namespace {

/// The most seconds between two tries to reach a lost node.
constexpr double kLongestBetweenTries = 60.0;

}  // namespace

std::string name_of(NodeRole role) {
  constexpr std::array kNames = {"active", "spare", "lost", "drained"};
  return kNames[static_cast<std::size_t>(role)];
}

bool LaunchNode::is_ready(double now) const {
  return role == NodeRole::kSpare && problem.empty() && sickness.empty() && has_come && closed == 0.0 &&
         now - seen < kMonitorRestart;
}

void LaunchNode::drain(bool as_sick) {
  role = NodeRole::kDrained;
  ended = 0;
  is_drained_as_sick = as_sick;
  check_before_drain = active_check;
}

void LaunchNode::lose(double now) {
  close_monitor();
  role = NodeRole::kLost;
  ended = 0;
  has_come = false;
  next_try = now + between_tries;
}

void LaunchNode::close_monitor() {
  if (input >= 0) close(input);
  input = -1;
  if (monitor > 0) {
    kill(-monitor, SIGTERM);
    closed_monitors.push_back(monitor);
  }
  monitor = 0;
}

LaunchNode* NodePool::find(const std::string& name) {
  const auto found = std::ranges::find(nodes_, name, &LaunchNode::name);
  return found == nodes_.end() ? nullptr : &*found;
}

LaunchNode* NodePool::find_spare(double now) {
  const auto found = std::ranges::find_if(nodes_, [&](const LaunchNode& node) { return node.is_ready(now); });
  return found == nodes_.end() ? nullptr : &*found;
}

int NodePool::num_spares(double now) const {
  return static_cast<int>(std::ranges::count_if(nodes_, [&](const LaunchNode& node) { return node.is_ready(now); }));
}

std::vector<LaunchState::Node> NodePool::states(double now) const {
  std::vector<LaunchState::Node> states;
  for (const LaunchNode& node : nodes_) {
    states.push_back({node.name, name_of(node.role), node.has_come ? now - node.seen : 0.0});
  }
  return states;
}

void NodePool::activate(LaunchNode& node) {
  node.role = NodeRole::kActive;
  active_.push_back(node.name);
}

void NodePool::replace(const LaunchNode& bad, LaunchNode& spare) {
  spare.role = NodeRole::kActive;
  *std::ranges::find(active_, bad.name) = spare.name;
}

void NodePool::reap(double now) {
  for (LaunchNode& node : nodes_) {
    std::erase_if(node.closed_monitors, [](pid_t process) { return waitpid(process, nullptr, WNOHANG) != 0; });
    int status = 0;
    if (node.monitor == 0 || waitpid(node.monitor, &status, WNOHANG) != node.monitor) continue;
    node.monitor = 0;
    node.last_status = exit_status_of(status);
    if (node.input >= 0) close(node.input);
    node.input = -1;
    if (node.closed == 0.0) node.closed = now;
    const bool is_expected = node.has_come && (node.role == NodeRole::kActive || node.role == NodeRole::kSpare);
    node.next_try = is_expected ? now : now + node.between_tries;
    if (!is_expected) node.between_tries = std::min(kLongestBetweenTries, 1.5 * node.between_tries);
    if (keeps_monitors_ && node.role == NodeRole::kActive) {
      spdlog::warn("the connection to the monitor of {} has ended (status {})", node.name, node.last_status);
    }
  }
}

}  // namespace tessera
