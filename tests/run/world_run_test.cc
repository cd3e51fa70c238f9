// Tests how much a rank sends as the world grows.
#include "run/world_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport/forwarding_transport.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using data::TemporaryFolder;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

TEST(WorldRun, ARankTalksToAsManyRanksAsTheLogarithmOfTheWorld) {
  const TemporaryFolder scratch;
  const WorldRun small = run_world(8, scratch / "8"), large = run_world(32, scratch / "32");
  EXPECT_THAT(phases_that_grow_too_fast(small, large), IsEmpty());
  for (const WorldRun* run : {&small, &large}) {
    ASSERT_EQ(run->phases.size(), 4u);
    for (const WorldPhase& phase : run->phases) {
      EXPECT_GT(phase.host.receivers, 0) << phase.name;
      EXPECT_GE(phase.host.messages, phase.host.receivers) << phase.name;
      EXPECT_GT(phase.seconds, 0.0) << phase.name;
    }
    EXPECT_GT(run->phases[1].tensors.messages, 0);
    EXPECT_GE(run->num_files, 2u * static_cast<std::size_t>(run->num_ranks) + 1);  // model, optimizer, manifest
    EXPECT_LT(run->manifest_bytes, 1000u * static_cast<unsigned>(run->num_ranks));
  }
  // The manifest of 4096 ranks must not be larger than 10 MB. It is extrapolated: each rank adds the same bytes to it.
  const auto per_rank = static_cast<double>(large.manifest_bytes - small.manifest_bytes) / (32 - 8);
  EXPECT_LT(static_cast<double>(large.manifest_bytes) + per_rank * (4096 - 32), 1e7);
}

/// Sends an empty message to every other rank beside each message, as code would that tells all ranks.
class TellsAllRanks : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    constexpr int kTagOfNobody = (1 << 15) - 1;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) extra_.push_back(transport().send(nullptr, 0, peer, kTagOfNobody));
    }
    return transport().send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return std::make_unique<TellsAllRanks>(transport().split(color, order, axis));
  }

 private:
  std::vector<std::unique_ptr<Request>> extra_;
};

TEST(WorldRun, ARankThatTellsAllOthersIsNoticed) {
  const TemporaryFolder scratch;
  const auto tell_all = [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
    return std::make_unique<TellsAllRanks>(std::move(transport));
  };
  EXPECT_THAT(phases_that_grow_too_fast(run_world(8, scratch / "8", tell_all), run_world(32, scratch / "32", tell_all)),
              UnorderedElementsAre("start", "step", "save", "resume"));
}

}  // namespace
}  // namespace tessera
