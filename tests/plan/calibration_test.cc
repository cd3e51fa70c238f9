// Fits rates to calls whose rates are known, and writes and reads calibrations.
#include "plan/calibration.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "tensor/philox.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using Amounts = std::array<double, OperatorWork::kKinds>;

const Amounts kRates = {2e-6, 1e-11, 3e-11, 5e-11, 0.0};

std::vector<MeasuredCall> calls_of_known_rates() {
  std::vector<MeasuredCall> calls;
  const Philox random(1, 1);
  for (std::uint64_t i = 0; i < 40; ++i) {
    MeasuredCall call{.work = {{1.0}}, .seconds = kRates[0]};
    for (std::size_t kind = 1; kind < OperatorWork::kKinds; ++kind) {
      call.work.amounts[kind] = 1e5 * (1.0 + 50.0 * random.uniform(OperatorWork::kKinds * i + kind));
      call.seconds += kRates[kind] * call.work[kind];
    }
    calls.push_back(call);
  }
  return calls;
}

TEST(Calibration, TheFitFindsTheRatesOfWhichTimesAreMade) {
  const std::vector<MeasuredCall> calls = calls_of_known_rates();
  const OperatorRate rate = fit_rate(calls);
  for (std::size_t kind = 0; kind < OperatorWork::kKinds; ++kind) {
    EXPECT_NEAR(rate.seconds_per[kind], kRates[kind], 1e-3 * kRates[kind] + 1e-14) << OperatorWork::kNames[kind];
  }
  EXPECT_LT(rate.mean_error, 1e-3);
  EXPECT_EQ(rate.num_calls, calls.size());
  for (const MeasuredCall& call : calls) {
    EXPECT_NEAR(rate.seconds(call.work), call.seconds, 1e-3 * call.seconds);
    EXPECT_FALSE(rate.extrapolates(call.work));
  }
}

TEST(Calibration, NoRateIsNegative) {
  std::vector<MeasuredCall> calls = calls_of_known_rates();
  for (MeasuredCall& call : calls) call.seconds = 1e-3 - 1e-10 * call.work[OperatorWork::kOtherBytes];
  for (const double seconds : fit_rate(calls).seconds_per) EXPECT_GE(seconds, 0.0);
}

TEST(Calibration, FarFromAllCallsIsAnExtrapolation) {
  const std::vector<MeasuredCall> calls = calls_of_known_rates();
  const OperatorRate rate = fit_rate(calls);
  OperatorWork work;
  work.amounts[OperatorWork::kOtherBytes] = 2.1 * rate.most_bytes;
  EXPECT_TRUE(rate.extrapolates(work));
  work.amounts[OperatorWork::kOtherBytes] = 0.45 * rate.least_bytes;
  EXPECT_TRUE(rate.extrapolates(work));
}

TEST(Calibration, AFileHoldsWhatWasMeasured) {
  const data::TemporaryFolder scratch;
  Calibration written;
  written.machine = "a processor";
  written.program = "0.1.0";
  written.date = "2026-01-02";
  written.threads = 2;
  written.seconds_per_operator = 1.5e-7;
  written.operators.emplace("gemm NT float32", fit_rate(calls_of_known_rates()));
  written.between_ranks = {{"overlap_cost", 0.75, "part", "a test", "2026-01-02"}};
  write_calibration(written, scratch / "c.json");
  const Calibration read = read_calibration(scratch / "c.json");
  EXPECT_EQ(read.between_ranks_value("overlap_cost"), 0.75);
  EXPECT_EQ(read.between_ranks.at(0).unit, "part");
  EXPECT_EQ(read.between_ranks.at(0).source, "a test");
  EXPECT_EQ(read.between_ranks.at(0).date, "2026-01-02");
  expect_error([&] { read.between_ranks_value("straggler"); }, {"c.json", "straggler", "mpirun -np 2"});
  EXPECT_EQ(read.machine, written.machine);
  EXPECT_EQ(read.program, written.program);
  EXPECT_EQ(read.date, written.date);
  EXPECT_EQ(read.threads, 2);
  EXPECT_EQ(read.seconds_per_operator, written.seconds_per_operator);
  EXPECT_EQ(read.operators.at("gemm NT float32").seconds_per, written.operators.at("gemm NT float32").seconds_per);
  EXPECT_EQ(read.operators.at("gemm NT float32").most_bytes, written.operators.at("gemm NT float32").most_bytes);
}

// A class that was not measured has the rates of the most similar one, if there is one. Its time is then no
// measurement.
TEST(Calibration, ASimilarClassStandsInForAnother) {
  Calibration calibration;
  calibration.path = "c.json";
  for (const char* name : {"gemm NT bfloat16 bfloat16 float32", "gemm NT bfloat16 bfloat16 bfloat16",
                           "gemm NN float32 float32 float32", "gemmish NN bfloat16 bfloat16 float32"}) {
    calibration.operators[name] = {.seconds_per = {1e-6}, .most_bytes = 1e12};
  }
  EXPECT_EQ(calibration.measured_class("gemm NN bfloat16 bfloat16 float32"), "gemm NT bfloat16 bfloat16 float32");
  EXPECT_EQ(calibration.measured_class("gemm NN += bfloat16 bfloat16 bfloat16"), "gemm NT bfloat16 bfloat16 bfloat16");
  EXPECT_EQ(calibration.measured_class("gemm NN float8_e4m3 float8_e4m3 float32"), "");
  RecordedOperator call{.name = "gemm",
                        .operands = {{{8, 4}, DType::kBFloat16}, {{2, 4}, DType::kBFloat16}, {{8, 2}, DType::kFloat32}},
                        .transposes_b = true,
                        .pass = {}};
  EXPECT_FALSE(calibration.time_of(call).is_extrapolated);
  call.accumulates = true;
  EXPECT_TRUE(calibration.time_of(call).is_extrapolated);
  call.name = "grouped_linear_dgrad";
  expect_error([&] { static_cast<void>(calibration.time_of(call)); },
               {"c.json", "'grouped_linear_dgrad += bfloat16 bfloat16 float32'", "`tessera bench calibrate`"});
  calibration.between_ranks = {{"ranks", 2.0, "", "", ""}};
  expect_error([&] { static_cast<void>(calibration.time_of(call)); }, {"`mpirun -np 2 tessera bench calibrate`"});
  calibration.threads = 0;  // of a GPU
  expect_error([&] { static_cast<void>(calibration.time_of(call)); }, {"`tessera bench calibrate --gpu`"});
}

TEST(Calibration, WhatIsNoCalibrationIsRefused) {
  const data::TemporaryFolder scratch;
  expect_error([&] { read_calibration(scratch / "none.json"); }, {"there is no", "none.json", "bench calibrate"});
  write_whole_file(scratch / "other.json", R"({"format": "tessera verdict", "version": 1})");
  expect_error([&] { read_calibration(scratch / "other.json"); },
               {"other.json", "tessera calibration", "tessera verdict"});
  write_whole_file(scratch / "short.json", R"({"format": "tessera calibration", "version": 1, "machine": "x"})");
  expect_error([&] { read_calibration(scratch / "short.json"); }, {"short.json", "program"});
}

TEST(Calibration, NumbersThatCannotBeAreRefused) {
  const data::TemporaryFolder scratch;
  const auto refused = [&](const std::string& name, double value) {
    Calibration calibration;
    calibration.between_ranks = {{name, value, "unit", "source", "2026-11-28"}};
    write_calibration(calibration, scratch / "c.json");
    expect_error([&] { read_calibration(scratch / "c.json"); }, {"c.json", name + ".value"});
  };
  refused("all_gather.gb_per_s", 0.0);
  refused("overlap_cost", 7.0);
  refused("straggler", 50.0);
  Calibration negative;
  negative.seconds_per_operator = -1e-3;
  write_calibration(negative, scratch / "c.json");
  expect_error([&] { read_calibration(scratch / "c.json"); }, {"c.json", "seconds_per_operator"});
}

}  // namespace
}  // namespace tessera
