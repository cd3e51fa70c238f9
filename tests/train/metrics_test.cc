// What metrics.jsonl says of steps whose numbers and times are given.
#include "train/metrics.h"

#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "base/file.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using data::Scratch;

TEST(Metrics, LinesAreOfTheStepsSinceTheLast) {
  const Scratch scratch;
  const auto begin = std::chrono::steady_clock::now();
  const auto result = [&](std::int64_t step, double seconds_after) {
    StepResult r;
    r.step = step;
    r.loss = 3.0;
    r.mtp_loss = 4.0;
    r.balance_loss = 0.5;
    r.total_loss = 5.0;
    r.grad_norm = 7.0;
    r.learning_rate = 0.25;
    r.num_tokens = 100;
    r.expert_load = {1.5, 2.5};
    r.seconds.forward = 0.5;
    r.ended = begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                          std::chrono::duration<double>(seconds_after));
    return r;
  };
  {
    MetricsWriter writer({.path = scratch / "metrics.jsonl",
                          .tensorboard_folder = {},
                          .num_steps = 10,
                          .log_freq = 2,
                          .flop_per_token = 3e9,
                          .peak_flops = 1e12,
                          .memory_bytes = 1,
                          .moe_layers = {"a", "b"},
                          .num_ranks = 2});
    writer.step(result(1, 10));
    writer.step(result(2, 11));
    writer.step(result(3, 12));
    writer.step(result(4, 15));
    writer.pause();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    writer.resume();
    writer.step(result(5, 16));
    writer.step(result(6, 17));
  }
  std::ifstream file(scratch / "metrics.jsonl");
  std::map<int, nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    lines[json["step"]] = json;
  }
  ASSERT_EQ(lines.size(), 4u);  // 1, 2, 4, 6
  EXPECT_EQ(lines[2]["loss"], 3.0);
  EXPECT_EQ(lines[2]["mtp_loss"], 4.0);
  EXPECT_EQ(lines[2]["balance_loss"], 0.5);
  EXPECT_EQ(lines[2]["grad_norm"], 7.0);
  EXPECT_EQ(lines[2]["lr"], 0.25);
  EXPECT_EQ(lines[2]["expert_load_max_over_mean"], 2.5);
  EXPECT_NEAR(lines[2]["tokens_per_second"], 100.0 / 1 / 2, 1e-6);  // per rank
  EXPECT_NEAR(lines[4]["tokens_per_second"], 200.0 / 4 / 2, 1e-6);
  EXPECT_NEAR(lines[4]["step_seconds"], 2.0, 1e-6);
  EXPECT_NEAR(lines[4]["seconds"]["forward"], 0.5, 1e-6);
  EXPECT_NEAR(lines[4]["tflops"], 25.0 * 3e9 * 1e-12, 1e-9);
  EXPECT_NEAR(lines[4]["mfu"], 25.0 * 3e9 / 1e12, 1e-9);
  EXPECT_LT(lines[6]["step_seconds"], 1.0 - 0.025);  // without the pause
  EXPECT_GT(lines[6]["step_seconds"], 0.8);
}

/// How much resident memory grows when every page of `bytes`, which are zeros, is read.
std::size_t growth(std::span<const std::byte> bytes) {
  const std::size_t before = resident_bytes();
  std::size_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); i += 4096) sum += static_cast<std::size_t>(bytes[i]);
  EXPECT_EQ(sum, 0u);
  return std::max(resident_bytes(), before) - before;
}

// A token shard that has been read is no memory that the run needs; its tensors and the ranks' windows are.
TEST(Metrics, ResidentMemoryIsWithoutMappedFiles) {
  constexpr std::size_t kSize = 64 << 20;
  const Scratch scratch;
  struct statfs file_system {};
  ASSERT_EQ(statfs(scratch.path().c_str(), &file_system), 0);
  if (file_system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "files in " << scratch.path() << " are shared memory";
  data::write_file(scratch / "shard", std::string(kSize, '\0'));
  const MappedFile file(scratch / "shard");
  EXPECT_LT(growth(file.bytes()), kSize / 8);
  for (const int kind : {MAP_PRIVATE, MAP_SHARED}) {
    void* at = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    const std::size_t before = resident_bytes();
    std::memset(at, 0, kSize);
    EXPECT_GE(resident_bytes(), before + kSize * 7 / 8);
    munmap(at, kSize);
  }
}

}  // namespace
}  // namespace tessera
