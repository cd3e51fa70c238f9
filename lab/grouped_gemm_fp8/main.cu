// Compares the grouped GEMMs of 8-bit operands in src/ops/gemm/sm90 with float64, and measures their time.
//   grouped_gemm_fp8 check    many shapes and groupings; exits with 1 if one is wrong
//   grouped_gemm_fp8 bench    the shapes of docs/performance.md, with bfloat16 beside them; every case is checked on a
//                             sample
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/cuda_check.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_grouped_gemm_fp8.h"
#include "reference.cuh"

namespace lab {
namespace {

using namespace tessera::cuda;
using mx::ScaleType;
using Bf16 = __nv_bfloat16;

std::mt19937_64 random_bits;
bool all_right = true;

template <typename T>
class Buffer {
 public:
  explicit Buffer(std::int64_t count) : count_(count) {
    TESSERA_CUDA(cudaMalloc(&data_, std::max<std::int64_t>(count, 1) * sizeof(T)));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  std::int64_t count() const { return count_; }
  void poison() const { TESSERA_CUDA(cudaMemset(data_, 0xff, count_ * sizeof(T))); }
  void fill(float scale) const {
    fill_normal<<<1024, 256>>>(data_, count_, scale, random_bits());
    TESSERA_CUDA(cudaGetLastError());
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_;
};

struct Format {
  ScaleType type = ScaleType::kFloat32;
  int along = mx::kWideBlock;
  const char* name = "";
};
constexpr Format kFloat{ScaleType::kFloat32, mx::kWideBlock, "float"}, kWide{ScaleType::kE8M0, mx::kWideBlock, "e8m0"},
    kExact{ScaleType::kE8M0, mx::kBlock, "exact"};

/// Owns a Matrix. `across` is larger than 1 for weights.
class Operand {
 public:
  Operand(const Format& format, int num_matrices, int rows, int k, int across, int small)
      : bytes_(std::int64_t{num_matrices} * rows * k), scales_(scale_bytes(format, num_matrices, rows, k, across)) {
    view = describe(format, num_matrices, rows, k, across);
    view.bytes = bytes_.get();
    view.scales = scales_.get();
    fill_elements<<<2048, 256>>>(view, random_bits(), small);
    fill_scales<<<2048, 256>>>(view, random_bits());
    TESSERA_CUDA(cudaGetLastError());
  }
  void poison_after(bool columns, std::int64_t first) const {
    lab::poison_after<<<2048, 256>>>(view, columns, first);
    TESSERA_CUDA(cudaGetLastError());
  }
  Matrix view;

 private:
  static Matrix describe(const Format& format, int num_matrices, int rows, int k, int across) {
    return {.rows = std::int64_t{num_matrices} * rows,
            .k = k,
            .matrix_rows = rows,
            .is_float = format.type == ScaleType::kFloat32,
            .along = format.along,
            .across = across};
  }
  static std::int64_t scale_bytes(const Format& format, int num_matrices, int rows, int k, int across) {
    const Matrix m = describe(format, num_matrices, rows, k, across);
    return m.scale_rows() * m.scales_per_row() * (m.is_float ? 4 : 1);
  }
  Buffer<std::uint8_t> bytes_, scales_;
};

struct Shape {
  int m, n, num_rows;  // num_rows is the allocated number of rows, at least that of the groups
  std::vector<int> groups;
  int experts() const { return static_cast<int>(groups.size()); }
  int used() const {
    int sum = 0;
    for (const int rows : groups) sum += rows;
    return sum;
  }
};

/// Checks the difference from the reference. Outliers are further off than rounding plus `absolute` times the typical
/// number. FP8 tensor cores keep 13 bits below the largest product of a sum. That is 1e-3 of a step's typical sum at
/// worst, and steps differ in their scales.
template <typename T>
void check(const std::string& what, bool wgrad, const Shape& shape, const Operand& a, const Operand& b,
           const std::int32_t* offsets, const Buffer<T>& out, const float* added, std::int64_t samples, double most,
           double absolute) {
  TESSERA_CUDA(cudaGetLastError());
  TESSERA_CUDA(cudaDeviceSynchronize());
  const Buffer<double> expected(samples ? samples : out.count());
  const Buffer<Difference> result(1);
  reference<<<4096, 256>>>(wgrad, a.view, b.view, offsets, shape.experts(), expected.get(), out.count(), samples);
  Difference d;
  double typical = 0;
  for (int pass = 0; pass < 2; ++pass) {  // the first pass finds the typical number
    TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Difference)));
    compare<<<512, 256>>>(out.get(), added, expected.get(), out.count(), samples, wgrad ? 1e-5 : 0x1p-8,
                          absolute * typical, result.get());
    TESSERA_CUDA(cudaMemcpy(&d, result.get(), sizeof(d), cudaMemcpyDeviceToHost));
    // With wgrad it is that of the longest group.
    const double longest = *std::max_element(shape.groups.begin(), shape.groups.end());
    const double larger = wgrad ? longest * shape.experts() / std::max(1, shape.used()) : 1;
    typical = std::sqrt(d.reference_squares / std::max(1.0, static_cast<double>(d.count)) * larger);
  }
  const double error = d.reference_squares > 0 ? std::sqrt(d.squares / d.reference_squares) : std::sqrt(d.squares);
  const bool right = error < most && d.outliers == 0 && d.written_outside == 0;
  all_right &= right;
  if (!right || !samples) {
    if (samples) std::printf("\n");
    std::printf("%s %-16s m %5d n %5d rows %6d experts %3d: error %.2e outliers %llu outside %llu of %llu\n",
                right ? "ok  " : "FAIL", what.c_str(), shape.m, shape.n, shape.num_rows, shape.experts(), error,
                d.outliers, d.written_outside, d.count);
    std::fflush(stdout);
  }
}

Buffer<std::int32_t>* make_offsets(const Shape& shape) {
  std::vector<std::int32_t> host{0};
  for (const int rows : shape.groups) host.push_back(host.back() + rows);
  auto* offsets = new Buffer<std::int32_t>(static_cast<std::int64_t>(host.size()));
  TESSERA_CUDA(cudaMemcpy(offsets->get(), host.data(), host.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
  return offsets;
}

bool profiling = false;

/// Returns the median of runs that start when the clock has settled. For profilers it makes only one run.
double median_ms(const std::function<void()>& run) {
  if (profiling) {
    run();
    TESSERA_CUDA(cudaDeviceSynchronize());
    return 1;
  }
  constexpr int kWarmUp = 100, kRuns = 25;
  std::vector<cudaEvent_t> events(kRuns + 1);
  for (cudaEvent_t& event : events) TESSERA_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < kWarmUp; ++i) run();
  TESSERA_CUDA(cudaEventRecord(events[0]));
  for (int i = 0; i < kRuns; ++i) {
    run();
    TESSERA_CUDA(cudaEventRecord(events[i + 1]));
  }
  TESSERA_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(kRuns);
  for (int i = 0; i < kRuns; ++i) TESSERA_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
  for (cudaEvent_t event : events) TESSERA_CUDA(cudaEventDestroy(event));
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

/// Checks y = x · wᵀ in a format. The input's gradient is the same with m and n exchanged. Returns ms, or 0 if not
/// timed.
double forward(const Shape& s, const Format& format, std::int64_t samples, bool timed) {
  const bool exact = format.along == mx::kBlock;
  const Operand x(format, 1, s.num_rows, s.n, 1, samples ? 0 : 8);
  const Operand w(format, s.experts(), s.m, s.n, exact ? 1 : mx::kWideBlock, samples ? 0 : 8);
  x.poison_after(false, s.used());
  const std::unique_ptr<Buffer<std::int32_t>> offsets(make_offsets(s));
  const Buffer<Bf16> y(std::int64_t{s.num_rows} * s.m);
  const int wide_row = (s.n + 63) / 64 * 64;
  const Buffer<Bf16> wide(exact ? w.view.rows * wide_row : 0);
  y.poison();
  if (exact) widen<<<2048, 256>>>(w.view, wide.get());
  const auto run = [&] {
    if (exact) {
      sm90_exact_forward({.x_RN = x.view.bytes,
                          .x_scales = static_cast<const std::uint8_t*>(x.view.scales),
                          .w_wide = wide.get(),
                          .offsets_E1 = offsets->get(),
                          .y_RM = y.get(),
                          .num_experts = s.experts(),
                          .num_rows = s.num_rows,
                          .m = s.m,
                          .n = s.n},
                         nullptr);
    } else {
      sm90_blockwise_forward({.x_RN = x.view.bytes,
                              .x_scales = x.view.scales,
                              .w_EMN = w.view.bytes,
                              .w_scales = w.view.scales,
                              .scale_type = format.type,
                              .offsets_E1 = offsets->get(),
                              .y_RM = y.get(),
                              .num_experts = s.experts(),
                              .num_rows = s.num_rows,
                              .m = s.m,
                              .n = s.n},
                             nullptr);
    }
  };
  run();
  check(std::string("forward ") + format.name, false, s, x, w, offsets->get(), y, nullptr, samples, 2.5e-3, 4e-3);
  return timed ? median_ms(run) : 0;
}

double wgrad(const Shape& s, const Format& format, bool accumulate, std::int64_t samples, bool timed) {
  const Operand d_y(format, 1, s.m, s.num_rows, 1, samples ? 0 : 8), x(format, 1, s.n, s.num_rows, 1, samples ? 0 : 8);
  d_y.poison_after(true, s.used());
  x.poison_after(true, s.used());
  const std::unique_ptr<Buffer<std::int32_t>> offsets(make_offsets(s));
  const Buffer<float> d_w(std::int64_t{s.experts()} * s.m * s.n), base(accumulate ? d_w.count() : 0);
  const Buffer<char> scratch(static_cast<std::int64_t>(sm90_blockwise_scratch_bytes(s.num_rows, s.m, s.n)));
  base.fill(100);
  const auto reset = [&] {
    if (accumulate) {
      TESSERA_CUDA(cudaMemcpy(d_w.get(), base.get(), base.count() * sizeof(float), cudaMemcpyDeviceToDevice));
    } else {
      d_w.poison();
    }
  };
  const auto run = [&] {
    sm90_blockwise_wgrad({.d_y_MR = d_y.view.bytes,
                          .d_y_scales = d_y.view.scales,
                          .x_NR = x.view.bytes,
                          .x_scales = x.view.scales,
                          .scale_type = format.type,
                          .offsets_E1 = offsets->get(),
                          .d_w_EMN = d_w.get(),
                          .scratch = scratch.get(),
                          .accumulate = accumulate,
                          .num_experts = s.experts(),
                          .num_rows = s.num_rows,
                          .m = s.m,
                          .n = s.n},
                         nullptr);
  };
  reset();
  run();
  const std::string what = std::string(accumulate ? "wgrad += " : "wgrad = ") + format.name;
  check(what, true, s, d_y, x, offsets->get(), d_w, accumulate ? base.get() : nullptr, samples, 3e-4, 1e-2);
  if (!samples) {  // the bits must be the same from run to run
    std::vector<float> first(d_w.count()), second(d_w.count());
    for (std::vector<float>* copy : {&first, &second}) {
      reset();
      run();
      TESSERA_CUDA(cudaMemcpy(copy->data(), d_w.get(), d_w.count() * sizeof(float), cudaMemcpyDeviceToHost));
    }
    if (std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) != 0) {
      std::printf("FAIL %s differs between two runs\n", what.c_str());
      all_right = false;
    }
  }
  return timed ? median_ms(run) : 0;
}

/// Returns `total` units of rows in `experts` groups of random sizes.
std::vector<int> skewed(int total, int experts, int unit) {
  std::exponential_distribution<double> distribution;
  std::vector<double> weights(experts);
  double sum = 0;
  for (double& w : weights) sum += w = distribution(random_bits);
  std::vector<int> groups(experts);
  int left = total;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(total * weights[e] / sum);
  for (; left > 0; --left) ++groups[random_bits() % experts];
  for (int& rows : groups) rows *= unit;
  return groups;
}

void check_all() {
  std::vector<Shape> rows = {
      {128, 128, 256, {256}},                             // one tile
      {16, 16, 1, {1}},                                   // the smallest sizes
      {208, 336, 700, {77, 0, 131, 5, 300}},              // tails everywhere
      {1408, 528, 3000, {513, 1, 0, 0, 1023, 129, 640}},  // odd number of tiles: pairs span group ends
      {768, 1408, 2500, {0, 0, 2500, 0}},                 // one has all
      {528, 512, 2500, {0, 0, 0, 1999}},                  // the last has all, and there is room after it
      {256, 272, 64, {0, 0, 0}},                          // no rows at all
      {512, 512, 2048, {256, 512, 1024, 256}},            // multiples of tiles
      {144, 208, 5000, skewed(4900, 256, 1)},             // 256 experts
      {4208, 272, 900, {100, 33, 700}},                   // many bands
      {32, 48, 333, {20, 300}},                           // K shorter than a step
      {1424, 7168, 1024, {130, 894}},                     // long sums
  };
  std::vector<Shape> columns = {
      {256, 128, 256, {256}},
      {16, 16, 128, {128}},
      {208, 336, 1280, {128, 0, 256, 384, 256}},
      {1408, 528, 4096, {512, 128, 0, 0, 1024, 128, 640}},
      {768, 1408, 2560, {0, 0, 2560, 0}},
      {528, 512, 2560, {0, 0, 0, 1920}},
      {256, 272, 128, {0, 0, 0}},
      {128, 256, 40064, {20096, 11136}},  // long sums in few tiles
      {256, 512, 60032, {59904}},         // sums in several parts
      {144, 208, 38400, skewed(290, 256, 128)},
      {4208, 272, 1040, {128, 0, 640}},
  };
  const auto size = [](int most) { return 16 * (1 + static_cast<int>(random_bits() % (most / 16))); };
  for (int i = 0; i < 6; ++i) {
    const int experts = 1 + static_cast<int>(random_bits() % 40), count = 200 + static_cast<int>(random_bits() % 4000);
    rows.push_back({size(1500), size(1500), count + static_cast<int>(random_bits() % 300), skewed(count, experts, 1)});
    const int units = 1 + static_cast<int>(random_bits() % 60);
    columns.push_back({size(1500), size(1500), units * 128 + size(300), skewed(units, experts, 128)});
  }
  for (const Shape& shape : rows) {
    for (const Format& format : {kFloat, kWide, kExact}) forward(shape, format, 0, false);
  }
  for (const Shape& shape : columns) {
    for (const Format& format : {kFloat, kWide}) {
      wgrad(shape, format, false, 0, false);
      wgrad(shape, format, true, 0, false);
    }
  }
}

/// Returns groups in multiples of 128 whose sizes differ by up to 8 to 1, as in bench/peers/grouped_mm.py.
std::vector<int> bench_groups(int rows, int experts, bool skew) {
  std::vector<int> groups(experts, rows / experts);
  if (!skew) return groups;
  const auto weight = [](int e) { return std::int64_t{1 + (5 * e + 3) % 8}; };
  std::int64_t sum = 0;
  for (int e = 0; e < experts; ++e) sum += weight(e);
  int left = rows;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(rows / 128 * weight(e) / sum) * 128;
  groups.back() += left;
  return groups;
}

/// Measures our bfloat16 kernels: forward, dgrad, wgrad =, wgrad +=.
std::vector<double> bfloat16_ms(const Shape& s) {
  const Buffer<Bf16> x(std::int64_t{s.num_rows} * s.n), d_y(std::int64_t{s.num_rows} * s.m);
  const Buffer<Bf16> w(std::int64_t{s.experts()} * s.m * s.n), y(d_y.count()), d_x(x.count());
  const Buffer<float> d_w(w.count());
  const Buffer<char> scratch(kSm90PartsBytes);
  const std::unique_ptr<Buffer<std::int32_t>> offsets(make_offsets(s));
  x.fill(1);
  d_y.fill(1);
  w.fill(0.02f);
  d_w.fill(1);
  const int e = s.experts(), r = s.num_rows;
  const Sm90GroupedForward forward{x.get(), w.get(), offsets->get(), y.get(), e, r, s.m, s.n};
  const Sm90GroupedDgrad dgrad{d_y.get(), w.get(), offsets->get(), d_x.get(), e, r, s.m, s.n};
  Sm90GroupedWgrad wgrad{.d_y_RM = d_y.get(),
                         .x_RN = x.get(),
                         .offsets_E1 = offsets->get(),
                         .d_w_EMN = d_w.get(),
                         .scratch = scratch.get(),
                         .num_experts = e,
                         .num_rows = r,
                         .m = s.m,
                         .n = s.n};
  std::vector<double> ms = {median_ms([&] { sm90_grouped_forward(forward, nullptr); }),
                            median_ms([&] { sm90_grouped_dgrad(dgrad, nullptr); })};
  for (const bool accumulate : {false, true}) {
    wgrad.accumulate = accumulate;
    ms.push_back(median_ms([&] { sm90_grouped_wgrad(wgrad, nullptr); }));
  }
  return ms;
}

void bench_all() {
  struct Size {
    int experts, rows, n, m;
  };
  std::printf("%-27s |%23s |%11s |%11s |%23s |%s\n", "", "blockwise float, e8m0", "exact", "wgrad", "bfloat16",
              " TFLOP/s");
  std::printf("%-27s |%5s %5s %5s %5s |%5s %5s |%5s %5s |%5s %5s %5s %5s |\n", "experts rows n->m groups", "fwd",
              "dgrad", "fwd", "dgrad", "fwd", "dgrad", "=", "+=", "fwd", "dgrad", "= ", "+=");
  for (const bool skew : {false, true}) {
    if (skew && profiling) continue;
    for (const auto& [experts, rows, n, m] : {Size{8, 98304, 2048, 1408}, Size{8, 98304, 1408, 2048},
                                              Size{32, 65536, 7168, 2048}, Size{32, 16384, 7168, 2048}}) {
      const Shape s{m, n, rows, bench_groups(rows, experts, skew)}, t{n, m, rows, s.groups};
      const double gflop = 2.0 * rows * m * n * 1e-9;
      constexpr std::int64_t kSamples = 20000;
      std::printf("%2d %6d %5d->%4d %-7s |", experts, rows, n, m, skew ? "skewed" : "equal");
      for (const Format& format : {kFloat, kWide}) {
        for (const Shape* shape : {&s, &t}) std::printf("%5.0f ", gflop / forward(*shape, format, kSamples, true));
      }
      std::printf("|%5.0f %5.0f ", gflop / forward(s, kExact, kSamples, true),
                  gflop / forward(t, kExact, kSamples, true));
      std::printf("|%5.0f %5.0f |", gflop / wgrad(s, kFloat, false, kSamples, true),
                  gflop / wgrad(s, kFloat, true, kSamples, true));
      for (const double ms : bfloat16_ms(s)) std::printf("%5.0f ", gflop / ms);
      std::printf("|\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  const std::string command = argc == 2 ? argv[1] : "";
  try {
    if (command == "check") {
      lab::random_bits.seed(std::random_device{}());
      lab::check_all();
    } else if (command == "bench" || command == "profile") {
      lab::profiling = command == "profile";
      lab::bench_all();
    } else {
      std::fprintf(stderr, "usage: grouped_gemm_fp8 check|bench\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%s\n", lab::all_right ? "all right" : "SOMETHING IS WRONG");
  return lab::all_right ? 0 : 1;
}
