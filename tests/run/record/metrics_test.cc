// Tests what metrics.jsonl says about steps with given numbers and times.
#include "run/record/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "run/record/expert_loads.h"
#include "run/record/run_files.h"
#include "tests/data/support.h"
#include "tests/full_disk.h"
#include "tests/log_of.h"
#include "tests/scrape.h"
#include "tests/unprivileged.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

TEST(Metrics, LinesAreOfTheStepsSinceTheLast) {
  const TemporaryFolder scratch;
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
    r.expert_tokens = {{1.0 * static_cast<double>(step), 3.0}, {5.0, 0.0}};
    r.seconds.forward = 0.5;
    r.seconds.data = 0.01;
    r.seconds.backward = 0.25;
    r.seconds.optimizer = 0.125;
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
  const ExpertLoads loads =
      read_expert_loads(scratch / kExpertLoadsName);  // those of the lines after come half a minute later
  EXPECT_EQ(loads.step, 1);
  EXPECT_EQ(loads.tokens, (std::map<std::string, std::vector<double>>{{"a", {1, 3}}, {"b", {5, 0}}}));
  std::ifstream file(scratch / "metrics.jsonl");
  std::map<int, nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    lines[json["step"]] = json;
  }
  ASSERT_EQ(lines.size(), 4u);  // steps 1, 2, 4 and 6
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
  EXPECT_NEAR(lines[4]["seconds"]["backward"], 0.25, 1e-6);
  EXPECT_NEAR(lines[4]["seconds"]["optimizer"], 0.125, 1e-6);
  EXPECT_NEAR(lines[4]["tflops"], 25.0 * 3e9 * 1e-12, 1e-9);
  EXPECT_NEAR(lines[4]["mfu"], 25.0 * 3e9 / 1e12, 1e-9);
  EXPECT_LT(lines[6]["step_seconds"], 1.0 - 0.025);  // the pause does not count
  EXPECT_GT(lines[6]["step_seconds"], 0.8);
}

/// Returns options for three steps of a run in this folder.
MetricsOptions options_in(const std::filesystem::path& folder) {
  return {.path = folder / "metrics.jsonl",
          .tensorboard_folder = {},
          .num_steps = 3,
          .log_freq = 1,
          .moe_layers = {},
          .num_ranks = 1};
}

/// A run is worth more than its curves.
TEST(Metrics, LinesAreKeptWhileTheDiskIsFull) {
  const TemporaryFolder scratch;
  MetricsOptions options = options_in(scratch.path());
  options.tensorboard_folder = scratch / "tb";
  options.moe_layers = {"a"};
  namespace fs = std::filesystem;
  const std::string log = log_of([&] {
    MetricsWriter writer(options);
    StepResult result;
    result.expert_tokens = {{1.0, 3.0}};
    result.ended = std::chrono::steady_clock::now();
    const auto step = [&](std::int64_t number) {
      result.step = number;
      result.loss = static_cast<double>(number);
      writer.step(result);
    };
    const auto size_of_events = [&] { return fs::file_size(fs::directory_iterator(scratch / "tb")->path()); };
    const auto size = size_of_events();
    {
      const FullDisk full(1);  // takes the first byte of a line, and nothing of the log
      step(1);
      step(2);
      writer.validation(2, 5.0);
    }
    step(3);
    EXPECT_EQ(size_of_events(), size);  // an event may be cut off, and no other may follow it
  });
  EXPECT_THAT(log, testing::HasSubstr("metrics.jsonl' has all lines again"));
  std::istringstream lines(read_text_file(options.path));
  std::vector<double> losses;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    losses.push_back(json.value("loss", json.value("validation_loss", -1.0)));
  }
  EXPECT_EQ(losses, (std::vector<double>{1.0, 2.0, 5.0, 3.0}));
}

/// Lines that cannot be read are not lost. A user who may not read the file may replace it.
TEST(Metrics, AFileThatCannotBeReadStays) {
  const TemporaryFolder scratch;
  const std::filesystem::path path = scratch / "metrics.jsonl";
  const std::string lines = "{\"step\":1}\n";
  data::write_file(path, lines);
  std::filesystem::permissions(scratch.path(), std::filesystem::perms::all);
  std::filesystem::permissions(path, std::filesystem::perms::none);
  MetricsOptions options = options_in(scratch.path());
  options.first_step = 2;
  expect_error(
      [&] {
        const Unprivileged nobody;
        const MetricsWriter writer(options);
      },
      {path.string(), "Permission denied"});
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  EXPECT_EQ(read_text_file(path), lines);
}

TEST(Metrics, ADeletedFolderIsNoticed) {
  const TemporaryFolder scratch;
  const std::filesystem::path folder = scratch / "run";
  std::filesystem::create_directory(folder);
  MetricsWriter writer(options_in(folder));
  StepResult result;
  result.ended = std::chrono::steady_clock::now();
  result.step = 1;
  writer.step(result);
  std::filesystem::remove_all(folder);
  result.step = 2;
  try {
    writer.step(result);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("run/metrics.jsonl' was deleted"));
  }
}

/// Returns the run's values on a page of metrics, by name and labels.
std::map<std::string, double> values_on(const std::string& page) {
  std::map<std::string, double> values;
  std::istringstream lines(page.substr(page.find("\r\n\r\n") + 4));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.rfind(' ');
    if (line.starts_with("tessera_train_")) values[line.substr(0, space)] = std::stod(line.substr(space));
  }
  return values;
}

TEST(Metrics, PrometheusGetsTheNumbersOfTheLastStepThatWasDue) {
  const TemporaryFolder scratch;
  const int port = free_port();
  MetricsOptions options = options_in(scratch.path());
  options.num_steps = 10;
  options.log_freq = 2;
  options.flop_per_token = 3e9;
  options.peak_flops = 1e12;
  options.memory_bytes = 1;
  options.moe_layers = {"a", "b"};
  options.num_ranks = 2;
  options.prometheus_address = fmt::format("127.0.0.1:{}", port);
  options.run_id = "r1";
  const double began = unix_time();
  double saved = 0.0;
  MetricsWriter writer(options);
  const auto begin = std::chrono::steady_clock::now();
  for (const int step : {1, 2, 3, 4}) {
    StepResult result;
    result.step = step;
    result.loss = 3.0 + step;
    result.total_loss = 5.0;
    result.grad_norm = 7.0 + step;
    result.learning_rate = 0.25 * step;
    result.num_tokens = 100;
    result.expert_load = {1.5, 2.5};
    result.later_rounds = step;
    result.seconds = {.data = 0.0625, .forward = 0.5, .backward = 0.25, .optimizer = 0.125};
    if (step == 2) result.repeated_for = "a test";
    result.ended = begin + std::chrono::seconds(2 * step);
    if (step == 4) {
      saved = unix_time();
      writer.checkpoint(3, 0.5, 1.5);
    }
    writer.step(result);
  }
  std::map<std::string, double> values = values_on(scrape(port));
  // The times are of this test, and the memory is its process's.
  for (const auto& [time, earliest] :
       {std::pair{"tessera_train_step_time_seconds", began}, {"tessera_train_checkpoint_time_seconds", saved}}) {
    EXPECT_GE(values[time], earliest) << time;
    EXPECT_LE(values[time], unix_time()) << time;
    values.erase(time);
  }
  EXPECT_GT(values["tessera_train_memory_bytes"], 0.0);
  values.erase("tessera_train_memory_bytes");
  EXPECT_NEAR(values["tessera_train_mfu_ratio"], 25.0 * 3e9 / 1e12, 1e-9);
  values.erase("tessera_train_mfu_ratio");
  EXPECT_EQ(values, (std::map<std::string, double>{
                        {fmt::format("tessera_train_info{{run=\"r1\",version=\"{}\"}}", version()), 1.0},
                        {"tessera_train_step", 4.0},
                        {"tessera_train_steps", 10.0},
                        {"tessera_train_loss", 7.0},
                        {"tessera_train_grad_norm", 11.0},
                        {"tessera_train_learning_rate", 1.0},
                        {"tessera_train_tokens_per_second", 25.0},
                        {"tessera_train_step_seconds", 2.0},
                        {"tessera_train_tokens_total", 400.0},
                        {"tessera_train_repeated_steps_total", 1.0},
                        {"tessera_train_phase_seconds{phase=\"data\"}", 0.0625},
                        {"tessera_train_phase_seconds{phase=\"forward\"}", 0.5},
                        {"tessera_train_phase_seconds{phase=\"backward\"}", 0.25},
                        {"tessera_train_phase_seconds{phase=\"optimizer\"}", 0.125},
                        {"tessera_train_expert_load_ratio{layer=\"a\"}", 1.5},
                        {"tessera_train_expert_load_ratio{layer=\"b\"}", 2.5},
                        {"tessera_train_dispatch_later_rounds", 3.5},  // of the steps 3 and 4
                    }));
}

// On a terminal the line begins with the "[hh:mm:ss] info " of base/log.cc.
TEST(Metrics, StepLinesFitHundredColumns) {
  StepResult result;
  result.step = 100000;
  result.loss = 12.34567;
  result.grad_norm = 10.98765;
  result.learning_rate = 2.2e-4;
  Rates rates;
  rates.tokens_per_second = 1234567.0;
  rates.tflops = 989.4567;
  rates.mfu = 0.41234;
  EXPECT_EQ(step_line(result, rates, 1000000),
            "step  100000  loss 12.3457  norm 10.9877  lr 2.20e-04  tps 1,234,567  mfu 41.2%");
  rates.mfu.reset();
  const std::string longest = step_line(result, rates, 1000000);
  EXPECT_THAT(longest, ::testing::EndsWith("tps 1,234,567  tflops 989.46"));
  EXPECT_LE(std::string("[12:34:56] info ").size() + longest.size(), 100u);
}

/// Returns the scalars of an event file by step and tag. The first step of its session has the tag "session".
std::map<std::int64_t, std::map<std::string, float>> read_events(const std::filesystem::path& folder) {
  std::string bytes;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) bytes += read_text_file(entry.path());
  std::map<std::int64_t, std::map<std::string, float>> events;
  const auto varint = [](std::string_view& message) {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<std::uint8_t>(message.front());
      message.remove_prefix(1);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  const auto part = [&](std::string_view& message) {
    const std::size_t size = varint(message);
    const std::string_view found = message.substr(0, size);
    message.remove_prefix(size);
    return found;
  };
  for (std::string_view left = bytes; !left.empty();) {
    std::uint64_t size = 0;
    std::memcpy(&size, left.data(), sizeof size);
    std::string_view message = left.substr(12 + 9, size - 9);  // without the wall time
    left.remove_prefix(12 + size + 4);
    std::int64_t step = 0;
    if (message.front() == 0x10) message.remove_prefix(1), step = static_cast<std::int64_t>(varint(message));
    const char field = message.front();
    message.remove_prefix(1);
    std::string_view content = part(message);
    if (field == 0x3a) events[step]["session"] = 1.0f;
    while (field == 0x2a && !content.empty()) {
      content.remove_prefix(1);
      std::string_view value = part(content);
      value.remove_prefix(1);
      const std::string tag(part(value));
      std::memcpy(&events[step][tag], value.data() + 1, sizeof(float));
    }
  }
  return events;
}

// TensorBoard shows tags in the order of their names. A model has hundreds of modules, so the overview must be first.
TEST(Metrics, TensorBoardOpensOnTheOverviewAndHasTheLowestErrors) {
  const TemporaryFolder scratch;
  MetricsWriter writer({.path = scratch / "metrics.jsonl",
                        .tensorboard_folder = scratch / "tb",
                        .first_step = 5,
                        .num_steps = 10,
                        .memory_bytes = 1,
                        .moe_layers = {"layers.1.moe"}});
  StepResult result;
  result.step = 5;
  result.loss = 3.0;
  result.learning_rate = 0.25;
  result.num_tokens = 100;
  result.expert_load = {1.5};
  result.seconds.forward = 0.5;
  result.seconds.backward = 0.25;
  result.sqnr = {{.module = "a", .x = 31.0, .w = 33.0, .d_y = {}},
                 {.module = "b", .x = 29.0, .w = 32.0, .d_y = 30.0},
                 {.module = "c", .x = 30.0, .w = 31.0, .d_y = {}}};
  result.ended = std::chrono::steady_clock::now();
  writer.step(result);
  const auto events = read_events(scratch / "tb");
  ASSERT_EQ(events.size(), 1u);  // the session of a resumed run begins where the run goes on
  std::map<std::string, float> scalars = events.at(5);
  EXPECT_EQ(scalars.extract("session").mapped(), 1.0f);
  std::vector<std::string> first;
  for (const auto& [tag, value] : scalars) first.push_back(tag);
  first.resize(4);
  EXPECT_THAT(first,
              ::testing::ElementsAre("_overview/loss", "_overview/lr", "_overview/tokens_per_second", "grad_norm"));
  EXPECT_EQ(scalars.at("_overview/loss"), 3.0f);
  EXPECT_EQ(scalars.at("_overview/lr"), 0.25f);
  EXPECT_EQ(scalars.at("_overview/tokens_per_second"), scalars.at("throughput(tps)"));
  EXPECT_EQ(scalars.at("moe/expert_load_max_over_mean/layers.1.moe"), 1.5f);
  EXPECT_EQ(scalars.at("time_metrics/forward(s)"), 0.5f);
  EXPECT_EQ(scalars.at("time_metrics/backward(s)"), 0.25f);
  const auto sqnr = nlohmann::json::parse(read_text_file(scratch / "metrics.jsonl"))["quantization_sqnr_db"];
  EXPECT_EQ(sqnr["b"]["w"], 32.0);
  EXPECT_EQ(sqnr["b"]["dy"], 30.0);
  EXPECT_EQ(scalars.at("quantization_sqnr_db/x_lowest"), 29.0f);
  EXPECT_EQ(scalars.at("quantization_sqnr_db/x_median"), 30.0f);
  EXPECT_EQ(scalars.at("quantization_sqnr_db/w_lowest"), 31.0f);
  EXPECT_EQ(scalars.at("quantization_sqnr_db/w_median"), 32.0f);
  EXPECT_EQ(scalars.at("quantization_sqnr_db/dy_lowest"), 30.0f);
  EXPECT_EQ(std::ranges::count_if(scalars, [](const auto& entry) { return entry.first.starts_with("quantization"); }),
            6);
}

/// Returns how much resident memory grows when every page of `bytes`, which are zeros, is read.
std::size_t growth(std::span<const std::byte> bytes) {
  const std::size_t before = resident_bytes();
  std::size_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); i += 4096) sum += static_cast<std::size_t>(bytes[i]);
  EXPECT_EQ(sum, 0u);
  return std::max(resident_bytes(), before) - before;
}

// A token shard that has been read is not memory that the run needs. Its tensors and the ranks' windows are.
TEST(Metrics, ResidentMemoryIsWithoutMappedFiles) {
  constexpr std::size_t kSize = 64 << 20;
  const TemporaryFolder scratch;
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
