#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::expect_error;
using data::Scratch;

class CheckpointTest : public ::testing::Test {
 protected:
  std::vector<CheckpointFile> files() {
    return {{.name = "model.safetensors",
             .tensors = {{"w", Tensor(numbers_.data(), {static_cast<std::int64_t>(numbers_.size())}, DType::kFloat32,
                                      Device::kCpu)}}}};
  }

  std::vector<CheckpointPart> parts() { return {tensors_part(files().front())}; }

  std::vector<float> numbers_ = std::vector<float>(1 << 16, 1.0f);
  Scratch scratch_;
};

TEST_F(CheckpointTest, RoundTrip) {
  save_checkpoint(scratch_.path(), 3, parts(), {{"answer", 42}});
  std::fill(numbers_.begin(), numbers_.end(), 0.0f);
  EXPECT_EQ(verify_checkpoint(scratch_ / "step-3")["answer"], 42);
  load_checkpoint(scratch_ / "step-3", files());
  EXPECT_THAT(numbers_, ::testing::Each(1.0f));
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save_checkpoint(scratch_.path(), 3, parts(), {});
  numbers_[0] = 7.0f;
  save_checkpoint(scratch_.path(), 3, parts(), {});
  numbers_[0] = 0.0f;
  verify_checkpoint(scratch_ / "step-3");
  load_checkpoint(scratch_ / "step-3", files());
  EXPECT_EQ(numbers_[0], 7.0f);
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(3));
}

TEST_F(CheckpointTest, PruningKeepsTheNewestAndClearsLeftovers) {
  for (const std::int64_t step : {1, 2, 10}) save_checkpoint(scratch_.path(), step, parts(), {});
  std::filesystem::create_directories(scratch_ / "step-11.partial");
  std::filesystem::create_directories(scratch_ / "step-12");  // no manifest: not a checkpoint
  prune_checkpoints(scratch_.path(), 2);
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(2, 10));
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "step-11.partial"));
}

// The same failure as a full disk: write() fails half-way.
TEST_F(CheckpointTest, ASaveThatFailsLeavesThePreviousCheckpoint) {
  save_checkpoint(scratch_.path(), 1, parts(), {});
  struct rlimit old_limit {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = old_limit;
  limit.rlim_cur = 100'000;  // the tensor takes 262,144 bytes
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message = expect_error([&] { save_checkpoint(scratch_.path(), 2, parts(), {}); }, {"cannot write"});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(1));
  EXPECT_NO_THROW(verify_checkpoint(scratch_ / "step-1"));
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(scratch_.path())) ++entries;
  EXPECT_EQ(entries, 1u);
}

// Manifests that no save writes. Each was a crash, or a file outside of the checkpoint that was opened.
TEST_F(CheckpointTest, ManifestsThatLie) {
  save_checkpoint(scratch_.path(), 1, parts(), {});
  const auto path = scratch_ / "step-1/manifest.json";
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  const auto refused = [&](const std::string& version, const std::string& listed, const std::string& state,
                           const std::string& part) {
    data::write_file(path, fmt::format(R"({{"format": "tessera-checkpoint", "version": {}, "files": {}, "state": {}}})",
                                       version, listed, state));
    expect_error([&] { verify_checkpoint(scratch_ / "step-1"); }, {path.string(), part});
  };
  refused(deep, "{}", "1", "nested deeper");
  refused("1", "{}", deep, "nested deeper");
  refused("1", "5", "1", "no JSON object");
  refused("1", R"({"model.safetensors": {"bytes": 1e300, "xxh3_64": ""}})", "1", "no whole number");
  refused("1", R"({"model.safetensors": {"bytes": -1, "xxh3_64": ""}})", "1", "no whole number");
  for (const char* name : {"", ".", "..", "../step-1/model.safetensors", "/dev/null", "model.safetensors\\u0000x"}) {
    refused("1", fmt::format(R"({{"{}": {{"bytes": 0, "xxh3_64": ""}}}})", name), "1", "expected the name of a file");
  }
}

}  // namespace
}  // namespace tessera
