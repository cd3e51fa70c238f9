#include "launch/cluster_doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Returns the facts of four nodes of 8 GPUs that fit together.
std::vector<NodeFacts> healthy() {
  std::vector<NodeFacts> nodes;
  for (const char* name : {"n1", "n2", "n3", "n4"}) {
    nodes.push_back({.name = name,
                     .version = "1.0",
                     .driver = "580",
                     .nccl = "2.28",
                     .gpus = std::vector<std::string>(8, "NVIDIA H200"),
                     .clock_uncertainty = 0.2,
                     .locked_memory_bytes = std::numeric_limits<double>::infinity(),
                     .memory_bytes = 2e12,
                     .shm_bytes = 1e12,
                     .has_infiniband = true,
                     .has_daemon = true,
                     .folders = {{"/shared", ""}},
                     .nccl_settings = {{"NCCL_SOCKET_IFNAME", "eth0"}}});
  }
  return nodes;
}

TEST(ClusterDoctor, NodesThatFitTogetherAreWell) { EXPECT_THAT(compare_nodes(healthy(), "1.0"), IsEmpty()); }

TEST(ClusterDoctor, WhatDoesNotFitIsToldWithItsRemedy) {
  struct Case {
    std::function<void(NodeFacts&)> change;
    Severity severity;
    const char* text;
  };
  for (const Case& one : {
           Case{[](NodeFacts& node) { node = {.name = "n2", .problem = "it cannot be asked"}; }, Severity::kBad,
                "cannot"},
           Case{[](NodeFacts& node) { node.version = "0.9"; }, Severity::kBad, "Install the same program"},
           Case{[](NodeFacts& node) { node.driver = "570"; }, Severity::kBad, "driver: 570, most nodes have 580"},
           Case{[](NodeFacts& node) { node.nccl = ""; }, Severity::kBad, "NCCL: none, most nodes have 2.28"},
           Case{[](NodeFacts& node) { node.gpus.pop_back(); }, Severity::kBad, "7 x NVIDIA H200, most nodes have 8"},
           Case{[](NodeFacts& node) { node.clock_ahead = -3.0; }, Severity::kBad, "3.0 s behind"},
           Case{[](NodeFacts& node) { node.locked_memory_bytes = 8e6; }, Severity::kBad, "memlock"},
           Case{[](NodeFacts& node) { node.shm_bytes = 1e9; }, Severity::kWarn, "--node-folder"},
           Case{[](NodeFacts& node) { node.has_daemon = false; }, Severity::kWarn, "tessera health serve"},
           Case{[](NodeFacts& node) { node.missing_interfaces = {"ib0"}; }, Severity::kBad, "'ib0'"},
           Case{[](NodeFacts& node) { node.folders["/shared"] = "does not exist there"; }, Severity::kBad, "Mount"},
           Case{[](NodeFacts& node) { node.nccl_settings = {}; }, Severity::kBad, "NCCL's settings: none"},
       }) {
    std::vector<NodeFacts> nodes = healthy();
    one.change(nodes[1]);
    const std::vector<ClusterFinding> findings = compare_nodes(nodes, "1.0");
    ASSERT_EQ(findings.size(), 1u) << one.text;
    EXPECT_EQ(findings.front().severity, one.severity) << one.text;
    EXPECT_EQ(findings.front().nodes, "n2");
    EXPECT_THAT(findings.front().text, HasSubstr(one.text));
  }
}

/// Only InfiniBand locks its buffers.
TEST(ClusterDoctor, WithoutInfiniBandMemlockMayBeLimited) {
  std::vector<NodeFacts> nodes = healthy();
  for (NodeFacts& node : nodes) {
    node.has_infiniband = false;
    node.locked_memory_bytes = 8e6;
  }
  EXPECT_THAT(compare_nodes(nodes, "1.0"), IsEmpty());
}

TEST(ClusterDoctor, AClockIsNotBlamedForASlowAnswer) {
  std::vector<NodeFacts> nodes = healthy();
  nodes[0].clock_ahead = 2.0;
  nodes[0].clock_uncertainty = 1.9;
  EXPECT_THAT(compare_nodes(nodes, "1.0"), IsEmpty());
}

TEST(ClusterDoctor, TheSameFindingOfSeveralNodesIsOne) {
  std::vector<NodeFacts> nodes = healthy();
  for (NodeFacts& node : nodes) node.has_daemon = false;
  nodes[2].version = "0.9";
  const std::vector<ClusterFinding> findings = compare_nodes(nodes, "1.0");
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].nodes, "n3");  // bad findings come first
  EXPECT_EQ(findings[1].nodes, "n1, n2, n3, n4");
}

TEST(ClusterDoctor, FactsSurviveTheirJson) {
  const data::TemporaryFolder scratch;
  data::write_file(scratch / "token", "");
  const NodeFacts facts = take_node_facts({scratch.path(), scratch / "nowhere"}, "token");
  EXPECT_EQ(facts.folders.at(scratch.path().string()), "");
  EXPECT_EQ(facts.folders.at((scratch / "nowhere").string()), "does not exist there");
  EXPECT_GT(facts.memory_bytes, 0.0);
  const NodeFacts read = node_facts_from_json(nlohmann::json::parse(to_json(facts).dump()));
  EXPECT_EQ(to_json(read)["folders"], to_json(facts)["folders"]);
  EXPECT_EQ(read.locked_memory_bytes, facts.locked_memory_bytes);
  EXPECT_EQ(read.version, facts.version);
  EXPECT_EQ(take_node_facts({scratch.path()}, "another").folders.at(scratch.path().string()),
            "is another folder there, not the same one");
  expect_error([] { node_facts_from_json({{"version", 5}}); }, {"a node's answer"});
}

}  // namespace
}  // namespace tessera
