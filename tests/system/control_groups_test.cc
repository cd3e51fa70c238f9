#include "system/control_groups.h"

#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

class ControlGroups : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) { data::write_file(scratch_ / "mounted" / file, text); }
  GroupLimits limits_of(const std::string& groups) {
    return control_group_limits(data::write_file(scratch_ / "groups", groups), scratch_ / "mounted");
  }

  const TemporaryFolder scratch_;
};

TEST_F(ControlGroups, MemoryIsTheLeastOfAllGroupsAroundAProcess) {
  EXPECT_EQ(limits_of("0::/job/step\n").memory_bytes, std::nullopt);
  write("job/step/memory.max", "max\n");
  EXPECT_EQ(limits_of("0::/job/step\n").memory_bytes, std::nullopt);
  write("job/memory.max", "5000000000\n");
  EXPECT_EQ(limits_of("0::/job/step\n").memory_bytes, 5000000000u);
  EXPECT_EQ(limits_of("0::/other\n").memory_bytes, std::nullopt);
  write("memory.max", "6000000000\n");
  EXPECT_EQ(limits_of("0::/other\n").memory_bytes, 6000000000u);
  write("memory/old/memory.limit_in_bytes", "4000\n");
  EXPECT_EQ(limits_of("3:cpu:/old\n2:memory:/old\n0::/\n").memory_bytes, 4000u);
  write("memory/free/memory.limit_in_bytes", "9223372036854771712\n");  // what version 1 says without a limit
  EXPECT_EQ(limits_of("2:memory:/free\n").memory_bytes, std::nullopt);
}

TEST_F(ControlGroups, CoresAreQuotaOverPeriod) {
  write("job/cpu.max", "max 100000\n");
  EXPECT_EQ(limits_of("0::/job/step\n").cores, std::nullopt);
  write("job/cpu.max", "400000 100000\n");
  write("job/step/cpu.max", "150000 100000\n");
  EXPECT_EQ(limits_of("0::/job/step\n").cores, 1.5);
  EXPECT_EQ(limits_of("0::/job\n").cores, 4.0);
  write("cpu/old/cpu.cfs_quota_us", "-1\n");
  write("cpu/old/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(limits_of("4:cpu,cpuacct:/old\n").cores, std::nullopt);
  write("cpu/old/cpu.cfs_quota_us", "200000\n");
  for (const char* controllers : {"cpu", "cpu,cpuacct", "cpuacct,cpu", "memory,cpu"}) {
    EXPECT_EQ(limits_of(fmt::format("4:{}:/old\n", controllers)).cores, 2.0) << controllers;
  }
  EXPECT_EQ(limits_of("4:cpuacct,cpuset:/old\n").cores, std::nullopt);
}

TEST_F(ControlGroups, NothingIsKnownOfFilesThatAreNotThere) {
  for (const std::string groups : {"no such line\n", ""}) {
    EXPECT_EQ(limits_of(groups).memory_bytes, std::nullopt);
    EXPECT_EQ(limits_of(groups).cores, std::nullopt);
  }
  EXPECT_EQ(control_group_limits(scratch_ / "absent", scratch_ / "mounted").memory_bytes, std::nullopt);
}

}  // namespace
}  // namespace tessera
