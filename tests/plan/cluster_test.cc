// Reads files of clusters, and checks the times that follow from them.
#include "plan/cluster.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "base/file.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

constexpr const char* kSmall = R"(
name = "small"
gpus_per_domain = 4
sms = 100
memory_gib = 8
reserved_gib = 1
peak_tflop_per_s = 100
precisions = ["bf16"]
dollars_per_gpu_hour = 2
microseconds_per_transfer = 10
microseconds_per_dispatch = 20
microseconds_per_host_plan = 5
overlap_cost = 0.5
straggler = 0.01
source = "a test"
[domain]
gb_per_s = 100
source = "a test"
[network]
gb_per_s = 10
source = "a test"
[direct]
gb_per_s = 90
overlap_cost = 0.5
written_gb_per_s_per_sm = 40
read_gb_per_s_per_sm = 100
summed_gb_per_s_per_sm = 20
source = "a test"
[[operator]]
names = ["gemm"]
type = "float32"
tflop_per_s = 25
source = "a test"
[[operator]]
names = ["gemm", "linear_*"]
type = "bfloat16"
tflop_per_s = 50
half_contraction = 100
gb_per_s = 1
microseconds = 3
source = "a test"
[[operator]]
names = ["copy"]
gb_per_s = 2
source = "a test"
)";

class ClusterFile : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& text) {
    write_whole_file(path_, text);
    return path_;
  }
  /// Returns the small cluster's text with `from` replaced.
  static std::string with(const std::string& from, const std::string& to) {
    std::string text = kSmall;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  }

  void TearDown() override { std::filesystem::remove(path_); }

  std::filesystem::path path_ = std::filesystem::path(::testing::TempDir()) / fmt::format("cluster_{}.toml", getpid());
};

RecordedOperator gemm(std::int64_t m, std::int64_t k, std::int64_t n, bool accumulates) {
  return {.name = "gemm",
          .operands = {{{m, k}, DType::kBFloat16}, {{k, n}, DType::kBFloat16}, {{m, n}, DType::kBFloat16}},
          .accumulates = accumulates,
          .pass = {}};
}

TEST_F(ClusterFile, TheFirstRuleThatFitsCounts) {
  const Cluster cluster = read_cluster(write(kSmall));
  const double flop = 2.0 * 1000 * 300 * 500, output = 2.0 * 1000 * 500;
  // A contraction of 300 has 300 / 400 of the rate.
  EXPECT_NEAR(cluster.time_of(gemm(1000, 300, 500, false)).seconds, flop / 50e12 * 4 / 3 + output / 1e9 + 3e-6, 1e-12);
  RecordedOperator in_float32 = gemm(1000, 300, 500, false);
  in_float32.operands.front().dtype = DType::kFloat32;
  EXPECT_NEAR(cluster.time_of(in_float32).seconds, flop / 25e12, 1e-12);
  const RecordedOperator copy{
      .name = "copy", .operands = {{{1000}, DType::kFloat32}, {{1000}, DType::kBFloat16}}, .pass = {}};
  EXPECT_NEAR(cluster.time_of(copy).seconds, 6000 / 2e9, 1e-12);
}

TEST_F(ClusterFile, RowsThatABalancedLoadLeavesEmptyCostNothing) {
  const Cluster cluster = read_cluster(write(kSmall));
  RecordedOperator call = gemm(1000, 300, 500, false);
  const double full = cluster.time_of(call).seconds - 3e-6;
  for (const std::size_t operand : {0, 2}) call.operands[operand].used = 0.25;
  EXPECT_NEAR(cluster.time_of(call).seconds - 3e-6, 0.25 * full, 1e-12);
}

TEST_F(ClusterFile, AnOperatorWithoutARateIsNamed) {
  const Cluster cluster = read_cluster(write(kSmall));
  const RecordedOperator rope{.name = "rope", .operands = {{{8}, DType::kFloat32}}, .pass = {}};
  expect_error([&] { static_cast<void>(cluster.time_of(rope)); }, {path_.string(), "rope float32"});
}

TEST_F(ClusterFile, RatesCanBeThoseOfAnotherFile) {
  const std::filesystem::path base = write(kSmall);
  path_.replace_extension(".scaled.toml");
  std::string text = kSmall;
  text.resize(text.find("[[operator]]"));
  text += fmt::format("[operators_of]\nfile = \"{}\"\nflop = 2\nbytes = 0.5\nsource = \"a test\"\n",
                      base.filename().string());
  const Cluster cluster = read_cluster(write(text));
  std::filesystem::remove(base);
  const double flop = 2.0 * 1000 * 300 * 500, output = 2.0 * 1000 * 500;
  EXPECT_NEAR(cluster.time_of(gemm(1000, 300, 500, false)).seconds, flop / 100e12 * 4 / 3 + output / 0.5e9 + 3e-6,
              1e-12);
}

// The file's own rules come first.
TEST_F(ClusterFile, RatesCanBeThoseOfACalibration) {
  const std::filesystem::path measured = std::filesystem::path(path_).replace_extension(".json");
  Calibration calibration;
  calibration.threads = 0;  // of a GPU
  calibration.operators["rope float32"] = {.seconds_per = {1e-6, 0.0, 0.0, 0.0, 1e-9}, .most_bytes = 1e6};
  calibration.operators["copy float32 bfloat16"] = {.seconds_per = {1.0}, .most_bytes = 1e6};
  write_calibration(calibration, measured);
  const Cluster cluster = read_cluster(write(
      std::string(kSmall) + fmt::format("[operators_of]\nfile = \"{}\"\nflop = 2\nbytes = 4\nsource = \"a test\"\n",
                                        measured.filename().string())));
  calibration.threads = 2;
  write_calibration(calibration, measured);
  expect_error([&] { read_cluster(path_); }, {measured.filename().string(), "the rates of a CPU"});
  std::filesystem::remove(measured);
  const RecordedOperator rope{.name = "rope", .operands = {{{1000}, DType::kFloat32}}, .pass = {}};
  EXPECT_NEAR(cluster.time_of(rope).seconds, 1e-6 + 4000 * 1e-9 / 4, 1e-15);
  EXPECT_FALSE(cluster.time_of(rope).is_extrapolated);
  const RecordedOperator large{.name = "rope", .operands = {{{1'000'000}, DType::kFloat32}}, .pass = {}};
  EXPECT_TRUE(cluster.time_of(large).is_extrapolated);
  const RecordedOperator copy{
      .name = "copy", .operands = {{{1000}, DType::kFloat32}, {{1000}, DType::kBFloat16}}, .pass = {}};
  EXPECT_NEAR(cluster.time_of(copy).seconds, 6000 / 2e9, 1e-12);
}

TEST_F(ClusterFile, AKindOfTransferMayHaveARateOfItsOwn) {
  const Cluster cluster =
      read_cluster(write(with("[domain]\ngb_per_s = 100", "[domain]\ngb_per_s = 100\nsend_gb_per_s = 30")));
  EXPECT_EQ(cluster.domain_rate("send"), 30e9);
  EXPECT_EQ(cluster.domain_rate("all_gather"), 100e9);
}

TEST_F(ClusterFile, TheSlowestOfManyIsSlower) {
  const Cluster cluster = read_cluster(write(kSmall));
  EXPECT_EQ(cluster.slowest_of(1), 1.0);
  EXPECT_LT(cluster.slowest_of(8), cluster.slowest_of(256));
  EXPECT_NEAR(cluster.slowest_of(256), 1.028, 1e-3);
}

// The expected maxima were integrated numerically.
TEST(Cluster, TheExpectedMaximumIsThatOfNormalNumbers) {
  EXPECT_EQ(expected_maximum(1), 0.0);
  for (const auto& [n, expected] : std::map<std::int64_t, double>{{2, 0.564}, {4, 1.029}, {8, 1.424}, {256, 2.827}}) {
    EXPECT_NEAR(expected_maximum(n), expected, 0.05 * expected) << n;
  }
}

TEST(Cluster, RanksOnCpusHaveWhatTheyMeasured) {
  Calibration calibration;
  calibration.machine = "a processor";
  calibration.path = "c.json";
  double value = 1.0;
  for (const char* name : {"all_gather.gb_per_s", "reduce_scatter.gb_per_s", "all_reduce.gb_per_s",
                           "all_to_all.gb_per_s", "send.gb_per_s", "domain.gb_per_s", "domain.microseconds"}) {
    calibration.between_ranks.push_back({name, value++, "", "", ""});
  }
  for (const auto& [name, part] : {std::pair{"overlap_cost", 0.5}, {"straggler", 0.25}, {"ranks", 2.0}}) {
    calibration.between_ranks.push_back({name, part, "", "", ""});
  }
  const Cluster cluster = cluster_of_cpus(calibration, 2);
  EXPECT_EQ(cluster.name, "a processor");
  EXPECT_EQ(cluster.gpus_per_domain, 2);
  value = 1e9;
  for (const char* kind : kTransferKinds) {
    EXPECT_EQ(cluster.domain_rate(kind), value) << kind;
    value += 1e9;
  }
  EXPECT_EQ(cluster.domain_bytes_per_second, 6e9);
  EXPECT_EQ(cluster.network_bytes_per_second, 6e9);
  EXPECT_EQ(cluster.direct_bytes_per_second, 4e9);  // a dispatch is an all-to-all
  EXPECT_EQ(cluster.seconds_per_transfer, 7.0 * 1e-6);
  EXPECT_EQ(cluster.seconds_per_dispatch, 7.0 * 1e-6);
  EXPECT_EQ(cluster.overlap_cost, 0.5);
  EXPECT_EQ(cluster.direct_overlap_cost, 0.5);
  EXPECT_EQ(cluster.straggler, 0.25);
  expect_error([&] { cluster_of_cpus(calibration, 4); },
               {"'c.json' was measured by 2 ranks, and this run has 4", "`mpirun -np 4 tessera bench calibrate`"});
  calibration.between_ranks.clear();  // which one rank does not need
  EXPECT_EQ(cluster_of_cpus(calibration, 1).straggler, 0.0);
}

TEST_F(ClusterFile, BadFilesAreToldOf) {
  const auto refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    SCOPED_TRACE(parts.back());
    std::vector<std::string> all = parts;
    all.push_back(path_.string());
    expect_error([&] { read_cluster(write(text)); }, all);
  };
  refused(with("memory_gib = 8\n", ""), {"$.memory_gib", "is missing", "number"});
  refused(with("memory_gib = 8", "memory_gib = -8"), {"$.memory_gib", "number"});
  refused(with("memory_gib = 8", "memory_gib = \"8\""), {"$.memory_gib", "number"});
  refused(with("sms = 100", "sms = 1.5"), {"$.sms", "whole number"});
  refused(with("[domain]\ngb_per_s = 100\nsource = \"a test\"", "[domain]\ngb_per_s = 100"), {"$.domain.source"});
  refused(with("[domain]\n", "[domain]\nreceive_gb_per_s = 30\n"), {"$.domain.receive_gb_per_s", "no such key"});
  refused(with("half_contraction", "half_contractoin"), {"$.operator[1].half_contractoin", "no such key"});
  refused(with("names = [\"copy\"]", "names = \"copy\""), {"$.operator[2].names", "array"});
  refused(with("straggler = 0.01", "straggler = 0.01\ncolour = 1"), {"$.colour", "no such key"});
  refused(with("straggler = 0.01", "straggler = 12"), {"$.straggler", "0 to 1"});
  refused(with("memory_gib = 8", "memory_gib = 1e300"), {"$.memory_gib", "number"});
  refused(with("type = \"bfloat16\"", "type = \"bf16\""), {"$.operator[1].type", "'bf16'", "bfloat16"});
  refused(with("gb_per_s = 2\n", ""), {"$.operator[2]", "needs one of", "gb_per_s"});
  refused(with("gb_per_s = 2\n", "gb_per_s = 0\n"), {"$.operator[2].gb_per_s", "is 0"});
  refused(with("gb_per_s = 2\n", "tflop_per_s = 2\n"), {"$.operator[2]", "without FLOP", "'copy'"});
  refused(with("tflop_per_s = 25", "gb_per_s = 25\nhalf_contraction = 100"),
          {"$.operator[0].half_contraction needs tflop_per_s"});
  refused("name = ", {"line 1"});
  refused(std::string(kSmall) + fmt::format("[operators_of]\nfile = \"{}\"\nflop = 1\nbytes = 1\nsource = \"a test\"",
                                            path_.filename().string()),
          {"[operators_of]", "more than 4 files"});
  std::filesystem::remove(path_);
  expect_error([&] { read_cluster(path_); }, {path_.string()});
}

// Every file that is shipped can be read, and names its kind of GPU.
TEST(Clusters, AreRead) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(CLUSTERS)) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path());
    EXPECT_FALSE(read_cluster(entry.path()).name.empty());
    ++count;
  }
  EXPECT_GE(count, 4u);
}

}  // namespace
}  // namespace tessera
