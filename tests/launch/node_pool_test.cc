#include "launch/node_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>

#include "base/stopwatch.h"

namespace tessera {
namespace {

/// A launch may lose many nodes, and each connection that it ends is a process of its own.
TEST(NodePool, MonitorsOfLostNodesAreReaped) {
  const pid_t monitor = fork();
  if (monitor == 0) {
    setpgid(0, 0);
    while (true) pause();
  }
  setpgid(monitor, monitor);
  NodePool nodes;
  nodes.add({.name = "n1", .role = NodeRole::kActive, .monitor = monitor});
  nodes.find("n1")->lose(0.0);
  EXPECT_EQ(nodes.find("n1")->monitor, 0);
  const Stopwatch watch;
  while (kill(monitor, 0) == 0 && watch.seconds() < 10.0) {  // a zombie can still be sent signals
    nodes.reap(0.0);
    std::this_thread::yield();
  }
  EXPECT_EQ(kill(monitor, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

}  // namespace
}  // namespace tessera
