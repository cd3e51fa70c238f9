#include "health/peer_rates.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/data/support.h"

namespace tessera {
namespace {

TEST(PeerRates, AreTheMedianOfTheOtherNodesWithTheSameProcessor) {
  const data::TemporaryFolder scratch;
  const std::filesystem::path folder = scratch / "rates";
  EXPECT_FALSE(find_peer_rates(folder, "n1", "H100"));
  write_rates(folder, "n1", {"H100", 1.0, 1.0});
  write_rates(folder, "n2", {"H100", 700.0, 2000.0});
  write_rates(folder, "n3", {"H200", 5.0, 5.0});
  EXPECT_FALSE(find_peer_rates(folder, "n1", "H100"));  // n2 alone is not enough to compare with
  write_rates(folder, "n4", {"H100", 720.0, 2100.0});
  write_rates(folder, "n4", {"H100", 710.0, 2200.0});
  std::ofstream(folder / "n5.rates.json") << "{\"format\": ";
  const std::optional<ActiveRates> peers = find_peer_rates(folder, "n1", "H100");
  ASSERT_TRUE(peers);
  EXPECT_EQ(peers->gemm_tflops, 705.0);
  EXPECT_EQ(peers->copy_gb_per_s, 2100.0);
}

}  // namespace
}  // namespace tessera
