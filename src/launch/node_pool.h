// The nodes of a launch: which of them train, which are in reserve, and which processes run their monitors. Times are
// in seconds on a monotonic clock, if nothing else is said.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/launch_state.h"

namespace tessera {

/// How many seconds a node may be without a connection to its monitor. After that it is lost.
inline constexpr double kMonitorRestart = 2.0;
/// The number of seconds between the first two tries to reach a lost node. The time grows with each try.
inline constexpr double kBetweenTries = 5.0;

/// Says what a node does in the launch.
enum class NodeRole : std::uint8_t {
  kActive,
  kSpare,
  kLost,  // it was silent; it becomes a spare when it has a new monitor and has ended its old ranks
  /// It was blamed, and is not used. It returns in one of three cases. A new monitor connects from it, it passes an
  /// active check, or an operator returns it. A new monitor connects after a reboot, and after a lost connection.
  kDrained,
};
std::string name_of(NodeRole role);

struct LaunchNode {
  std::string name;
  NodeRole role = NodeRole::kSpare;
  pid_t monitor = 0;                        // process here that runs the monitor; 0: none
  std::vector<pid_t> closed_monitors = {};  // those that were told to end, and are not reaped yet
  int input = -1;                           // standard input of that process; closing it ends the monitor
  bool has_come = false;
  double seen = 0.0;
  double closed = 0.0;    // time at which the connection ended; 0: it is open
  double next_try = 0.0;  // earliest time at which a monitor may be started
  double between_tries = kBetweenTries;
  int last_status = 0;       // exit status of the connection's process
  std::int64_t ended = 0;    // last attempt of which no process is left
  std::string problem = {};  // reason why the node cannot be used
  bool has_evidence = false;
  std::string sickness = {};                // reason why the health daemon calls it bad; empty: it does not
  std::optional<double> active_check = {};  // Unix time of the last that passed, by the daemon; not set: no word yet
  bool is_drained_as_sick = false;
  std::string drain_reason = {};                  // the reason that the scheduler was given
  std::optional<double> check_before_drain = {};  // active_check at the time of the drain
  bool is_new = false;            // the scheduler has given the node, but its monitor has not connected yet
  double given = 0.0;             // time at which the scheduler gave it
  bool is_sickness_told = false;  // a warning says that it is sick and has no spare

  /// Returns whether it is a spare that could train at once.
  bool is_ready(double now) const;
  void drain(bool as_sick);
  /// Makes the node lost until a new monitor connects from it. An old monitor that was cut off may still be heard, but
  /// it ends when it finds its input closed.
  void lose(double now);
  /// Ends the monitor, if there is one.
  void close_monitor();
};

class NodePool {
 public:
  /// Adds a node. References to nodes stay valid.
  void add(LaunchNode node) { nodes_.push_back(std::move(node)); }
  /// Keeps the first `size` nodes.
  void keep_first(std::size_t size) { nodes_.resize(size); }
  std::size_t size() const { return nodes_.size(); }
  auto begin() { return nodes_.begin(); }
  auto end() { return nodes_.end(); }
  auto begin() const { return nodes_.begin(); }
  auto end() const { return nodes_.end(); }

  /// Returns the node of this name, or null.
  LaunchNode* find(const std::string& name);
  /// Returns a spare that could train at once, or null.
  LaunchNode* find_spare(double now);
  int num_spares(double now) const;
  /// Returns the nodes as launch.json has them.
  std::vector<LaunchState::Node> states(double now) const;

  /// Returns the names of the nodes that train, in the order of their ranks.
  const std::vector<std::string>& active() const { return active_; }
  /// Lets a node train, with the next ranks.
  void activate(LaunchNode& node);
  /// Lets a spare train with the ranks of `bad`, whose role the caller changes.
  void replace(const LaunchNode& bad, LaunchNode& spare);

  /// Sets whether a monitor that ends is started again. It should be only after all have connected.
  void keep_monitors(bool keeps) { keeps_monitors_ = keeps; }
  bool keeps_monitors() const { return keeps_monitors_; }
  /// Takes note of monitors that have ended, and reaps their processes.
  void reap(double now);

 private:
  std::deque<LaunchNode> nodes_;     // a deque: adding nodes must not move those that are referred to
  std::vector<std::string> active_;  // names, in the order of ranks
  bool keeps_monitors_ = false;
};

}  // namespace tessera
