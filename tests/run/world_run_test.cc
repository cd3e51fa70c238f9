// Tests how much a rank sends as the world grows.
#include "run/world_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::TemporaryFolder;
using ::testing::Contains;
using ::testing::IsEmpty;

TEST(WorldRun, ARanksMessagesGrowWithTheLogarithmOfTheWorld) {
  const TemporaryFolder scratch;
  const WorldRun small = run_world(8, scratch / "8"), large = run_world(32, scratch / "32");
  EXPECT_THAT(phases_that_grow_too_fast(small, large), IsEmpty());
  for (const WorldRun* run : {&small, &large}) {
    ASSERT_EQ(run->phases.size(), 4u);
    for (const WorldPhase& phase : run->phases) {
      EXPECT_GT(phase.host.messages, 0) << phase.name;
      EXPECT_GT(phase.seconds, 0.0) << phase.name;
    }
    EXPECT_GT(run->phases[1].tensors.messages, 0);
    EXPECT_GE(run->num_files, 2u * static_cast<std::size_t>(run->num_ranks) + 1);  // model, optimizer, manifest
    EXPECT_LT(run->manifest_bytes, 1000u * static_cast<unsigned>(run->num_ranks));
  }
  // A rank that sent something to each other rank would be noticed in every phase.
  for (std::size_t i = 0; i < small.phases.size(); ++i) {
    WorldRun few = small, many = large;
    few.phases[i].host.messages += small.num_ranks - 1;
    many.phases[i].host.messages += large.num_ranks - 1;
    EXPECT_THAT(phases_that_grow_too_fast(few, many), Contains(small.phases[i].name));
  }
}

}  // namespace
}  // namespace tessera
