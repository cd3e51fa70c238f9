// Compares the grouped GEMMs of src/ops/gemm/sm90 with float64, and measures their time.
//   grouped_gemm check    many shapes and groupings; exits with 1 if one is wrong
//   grouped_gemm bench    the shapes of docs/performance.md; every case is checked on a sample first
//   grouped_gemm once     each of bench's cases once, for a profiler
// If compiled with LAB_VERSIONS="X(name) X(name) …", bench times several versions of the kernels in turn. One version
// after the other would compare the clocks that the power limit left to each.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device/cuda_check.h"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "reference.cuh"

namespace lab {
namespace {

using tessera::cuda::kSm90PartsBytes;
using Bf16 = __nv_bfloat16;

std::mt19937_64 random_bits;
bool all_right = true;

struct Version {
  const char* name;
  decltype(&tessera::cuda::sm90_grouped_forward) forward;
  decltype(&tessera::cuda::sm90_grouped_dgrad) dgrad;
  decltype(&tessera::cuda::sm90_grouped_wgrad) wgrad;
};

#ifdef LAB_VERSIONS
}  // namespace
}  // namespace lab
#define X(v)                                                 \
  namespace tessera::cuda {                                  \
  void forward_##v(const Sm90GroupedForward&, cudaStream_t); \
  void dgrad_##v(const Sm90GroupedDgrad&, cudaStream_t);     \
  void wgrad_##v(const Sm90GroupedWgrad&, cudaStream_t);     \
  }
LAB_VERSIONS
#undef X
namespace lab {
namespace {
#define X(v) Version{#v, tessera::cuda::forward_##v, tessera::cuda::dgrad_##v, tessera::cuda::wgrad_##v},
std::vector<Version> versions = {LAB_VERSIONS};
#undef X
#else
std::vector<Version> versions = {
    {"src", tessera::cuda::sm90_grouped_forward, tessera::cuda::sm90_grouped_dgrad, tessera::cuda::sm90_grouped_wgrad}};
#endif
Version version = versions.front();

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

struct Shape {
  int m, n, num_rows;  // num_rows is the allocated number of rows, at least that of the groups
  std::vector<int> groups;
};

/// Returns `total` rows in `experts` groups of random sizes.
std::vector<int> skewed(int total, int experts) {
  std::exponential_distribution<double> distribution;
  std::vector<double> weights(experts);
  double sum = 0;
  for (double& w : weights) sum += w = distribution(random_bits);
  std::vector<int> groups(experts);
  int left = total;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(total * weights[e] / sum);
  groups.back() += left;
  return groups;
}

struct Case {
  Shape shape;
  Buffer<Bf16> x, d_y, w, y, d_x;
  Buffer<float> d_w, base;
  Buffer<std::int32_t> offsets;
  Buffer<char> scratch{kSm90PartsBytes};
  cudaStream_t stream = nullptr;

  explicit Case(const Shape& s)
      : shape(s),
        x(std::int64_t{s.num_rows} * s.n),
        d_y(std::int64_t{s.num_rows} * s.m),
        w(std::int64_t{s.m} * s.n * experts()),
        y(d_y.count()),
        d_x(x.count()),
        d_w(w.count()),
        base(w.count()),
        offsets(experts() + 1) {
    std::vector<std::int32_t> host{0};
    for (const int rows : s.groups) host.push_back(host.back() + rows);
    TESSERA_CUDA(cudaMemcpy(offsets.get(), host.data(), host.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
    x.fill(1);
    d_y.fill(1);
    w.fill(0.02f);
    base.fill(3);
    // The rows after the last group are NaN.
    const std::int64_t used = host.back();
    TESSERA_CUDA(cudaMemset(x.get() + used * s.n, 0xff, (s.num_rows - used) * s.n * sizeof(Bf16)));
    TESSERA_CUDA(cudaMemset(d_y.get() + used * s.m, 0xff, (s.num_rows - used) * s.m * sizeof(Bf16)));
  }
  int experts() const { return static_cast<int>(shape.groups.size()); }

  void run(Kind kind, bool accumulate) const {
    const int e = experts(), r = shape.num_rows, m = shape.m, n = shape.n;
    const auto *px = x.get(), *pd_y = d_y.get(), *pw = w.get();
    const auto* po = offsets.get();
    switch (kind) {
      case Kind::kForward:
        return version.forward({.x_RN = px,
                                .w_EMN = pw,
                                .offsets_E1 = po,
                                .y_RM = y.get(),
                                .num_experts = e,
                                .num_rows = r,
                                .m = m,
                                .n = n},
                               stream);
      case Kind::kDgrad:
        return version.dgrad({.d_y_RM = pd_y,
                              .w_EMN = pw,
                              .offsets_E1 = po,
                              .d_x_RN = d_x.get(),
                              .num_experts = e,
                              .num_rows = r,
                              .m = m,
                              .n = n},
                             stream);
      case Kind::kWgrad:
        return version.wgrad({.d_y_RM = pd_y,
                              .x_RN = px,
                              .offsets_E1 = po,
                              .d_w_EMN = d_w.get(),
                              .scratch = scratch.get(),
                              .accumulate = accumulate,
                              .num_experts = e,
                              .num_rows = r,
                              .m = m,
                              .n = n},
                             stream);
    }
  }

  template <typename T>
  Difference difference(Kind kind, const Buffer<T>& out, const float* added, std::int64_t samples, double relative,
                        double absolute) const {
    const Problem problem{.kind = kind,
                          .num_experts = experts(),
                          .num_rows = shape.num_rows,
                          .m = shape.m,
                          .n = shape.n,
                          .offsets = offsets.get(),
                          .x = x.get(),
                          .d_y = d_y.get(),
                          .w = w.get()};
    const Buffer<double> expected(samples ? samples : out.count());
    const Buffer<Difference> result(1);
    TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Difference)));
    reference<<<4096, 256>>>(problem, expected.get(), out.count(), samples);
    compare<<<512, 256>>>(out.get(), added, expected.get(), out.count(), samples, relative, absolute, result.get());
    Difference host;
    TESSERA_CUDA(cudaMemcpy(&host, result.get(), sizeof(host), cudaMemcpyDeviceToHost));
    return host;
  }

  /// Checks a product. bfloat16 outputs differ by their rounding, and float32 ones by the order of the sum.
  void check(Kind kind, bool accumulate, std::int64_t samples, const char* name) const {
    const bool wgrad = kind == Kind::kWgrad;
    if (wgrad && accumulate) {
      TESSERA_CUDA(cudaMemcpy(d_w.get(), base.get(), base.count() * sizeof(float), cudaMemcpyDeviceToDevice));
    } else {
      d_w.poison();
    }
    y.poison();
    d_x.poison();
    run(kind, accumulate);
    TESSERA_CUDA(cudaGetLastError());
    TESSERA_CUDA(cudaDeviceSynchronize());
    const double k = kind == Kind::kForward ? shape.n : shape.m;
    const double typical = 0.02 * std::sqrt(k);
    int longest = *std::max_element(shape.groups.begin(), shape.groups.end());
    const Difference d =
        wgrad ? difference(kind, d_w, accumulate ? base.get() : nullptr, samples, 1e-5, 1e-4 * std::sqrt(longest + 1.0))
        : kind == Kind::kForward ? difference(kind, y, nullptr, samples, 0x1p-8, 1e-3 * typical)
                                 : difference(kind, d_x, nullptr, samples, 0x1p-8, 1e-3 * typical);
    const double error = d.reference_squares > 0 ? std::sqrt(d.squares / d.reference_squares) : std::sqrt(d.squares);
    const bool right = error < (wgrad ? 2e-5 : 2.5e-3) && d.outliers == 0 && d.written_outside == 0;
    all_right &= right;
    if (!right || !samples) {
      std::printf("%s %-8s%s m %5d n %5d rows %6d experts %3d: error %.2e outliers %llu outside %llu of %llu %s\n",
                  right ? "ok  " : "FAIL",
                  kind == Kind::kForward ? "forward"
                  : wgrad                ? "wgrad"
                                         : "dgrad",
                  wgrad ? accumulate ? " += " : " =  " : "    ", shape.m, shape.n, shape.num_rows, experts(), error,
                  d.outliers, d.written_outside, d.count, name);
    }
  }
};

template <typename T>
std::vector<char> bytes_of(const Buffer<T>& buffer) {
  std::vector<char> host(buffer.count() * sizeof(T));
  TESSERA_CUDA(cudaMemcpy(host.data(), buffer.get(), host.size(), cudaMemcpyDeviceToHost));
  return host;
}

/// Checks that the three products, captured into a graph and replayed twice, give the results of a launch.
void check_graph(Case& c) {
  TESSERA_CUDA(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
  const auto run_all = [&] {
    for (const Kind kind : {Kind::kForward, Kind::kDgrad, Kind::kWgrad}) c.run(kind, false);
  };
  const auto poison = [&] {
    c.y.poison();
    c.d_x.poison();
    c.d_w.poison();
    TESSERA_CUDA(cudaDeviceSynchronize());
  };
  const auto results = [&] {
    TESSERA_CUDA(cudaStreamSynchronize(c.stream));
    return std::vector{bytes_of(c.y), bytes_of(c.d_x), bytes_of(c.d_w)};
  };
  poison();
  run_all();
  const auto launched = results();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  TESSERA_CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeGlobal));
  run_all();
  TESSERA_CUDA(cudaStreamEndCapture(c.stream, &graph));
  TESSERA_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 2; ++i) {
    poison();
    TESSERA_CUDA(cudaGraphLaunch(executable, c.stream));
    const bool same = results() == launched;
    std::printf("%s graph, replay %d\n", same ? "ok  " : "FAIL", i);
    all_right &= same;
  }
  TESSERA_CUDA(cudaGraphExecDestroy(executable));
  TESSERA_CUDA(cudaGraphDestroy(graph));
  TESSERA_CUDA(cudaStreamDestroy(c.stream));
  c.stream = nullptr;
}

void check_all() {
  struct Named {
    const char* name;
    Shape shape;
  };
  std::vector<Named> cases = {
      {"one tile", {128, 256, 128, {128}}},
      {"one row, smallest sizes", {8, 8, 1, {1}}},
      {"odd tails everywhere", {200, 328, 700, {77, 0, 131, 5, 300}}},
      {"odd tails, more columns", {1408, 520, 3000, {513, 1, 0, 0, 1023, 129, 640}}},
      {"one has all", {768, 1408, 2500, {0, 0, 2500, 0}}},
      {"last has all, room left", {520, 512, 2500, {0, 0, 0, 1999}}},
      {"no rows at all", {256, 264, 64, {0, 0, 0}}},
      {"multiples of tiles", {512, 512, 2048, {256, 512, 1024, 256}}},
      {"long sums in few tiles", {128, 256, 40000, {20001, 11111}}},
      {"long sums, three parts", {256, 512, 60000, {60000}}},
      {"256 experts", {136, 200, 5000, skewed(4900, 256)}},
      {"wide, many bands", {4200, 264, 900, {100, 33, 700}}},
      {"K shorter than a step", {24, 40, 333, {20, 300}}},
  };
  for (int i = 0; i < 8; ++i) {
    const auto size = [](int most) { return 8 * (1 + static_cast<int>(random_bits() % (most / 8))); };
    const int rows = 200 + static_cast<int>(random_bits() % 4000), experts = 1 + static_cast<int>(random_bits() % 40);
    cases.push_back(
        {"random", {size(1500), size(1500), rows + static_cast<int>(random_bits() % 300), skewed(rows, experts)}});
  }
  for (const auto& [name, shape] : cases) {
    Case c(shape);
    c.check(Kind::kForward, false, 0, name);
    c.check(Kind::kDgrad, false, 0, name);
    c.check(Kind::kWgrad, false, 0, name);
    c.check(Kind::kWgrad, true, 0, name);
    // Results must be the same bits from run to run.
    std::vector<float> first(c.d_w.count()), second(c.d_w.count());
    for (std::vector<float>* copy : {&first, &second}) {
      TESSERA_CUDA(cudaMemcpy(c.d_w.get(), c.base.get(), c.base.count() * 4, cudaMemcpyDeviceToDevice));
      c.run(Kind::kWgrad, true);
      TESSERA_CUDA(cudaMemcpy(copy->data(), c.d_w.get(), c.d_w.count() * 4, cudaMemcpyDeviceToHost));
    }
    if (std::memcmp(first.data(), second.data(), first.size() * 4) != 0) {
      std::printf("FAIL wgrad differs between two runs: %s\n", name);
      all_right = false;
    }
    if (&shape == &cases.front().shape || std::string(name) == "random") check_graph(c);
  }
}

/// Returns groups whose sizes differ by up to 8 to 1.
std::vector<int> bench_groups(int rows, int experts, bool skew) {
  std::vector<int> groups(experts, rows / experts);
  if (!skew) return groups;
  const auto weight = [](int e) { return std::int64_t{1 + (5 * e + 3) % 8}; };
  std::int64_t sum = 0;
  for (int e = 0; e < experts; ++e) sum += weight(e);
  int left = rows;
  for (int e = 0; e < experts; ++e) left -= groups[e] = static_cast<int>(rows * weight(e) / sum);
  groups.back() += left;
  return groups;
}

/// Returns the milliseconds of one run, from as many runs as fill `budget_ms`.
double mean_ms(const Case& c, Kind kind, bool accumulate, double budget_ms) {
  cudaEvent_t begin, end;
  TESSERA_CUDA(cudaEventCreate(&begin));
  TESSERA_CUDA(cudaEventCreate(&end));
  float ms = 0;
  int runs = 1;
  for (int i = 0; i < 2; ++i) {  // the first pass finds the number of runs
    TESSERA_CUDA(cudaEventRecord(begin));
    for (int j = 0; j < runs; ++j) c.run(kind, accumulate);
    TESSERA_CUDA(cudaEventRecord(end));
    TESSERA_CUDA(cudaEventSynchronize(end));
    TESSERA_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i == 0) runs = std::max(1, static_cast<int>(budget_ms / ms));
  }
  TESSERA_CUDA(cudaEventDestroy(begin));
  TESSERA_CUDA(cudaEventDestroy(end));
  return ms / runs;
}

struct Size {
  int experts, rows, n, m;
};
constexpr Size kSizes[] = {{8, 98304, 2048, 1408},
                           {8, 98304, 1408, 2048},
                           {32, 65536, 7168, 2048},
                           {32, 16384, 7168, 2048},
                           {32, 2048, 7168, 2048}};
struct Column {
  const char* name;
  Kind kind;
  bool accumulate;
};
constexpr Column kColumns[] = {{"fwd", Kind::kForward, false},
                               {"dgrad", Kind::kDgrad, false},
                               {"wgrad =", Kind::kWgrad, false},
                               {"wgrad +=", Kind::kWgrad, true}};

void bench_all(bool once) {
  constexpr int kRounds = 5;
  constexpr double kBudgetMs = 30;
  constexpr std::int64_t kSamples = 20000;
  for (const bool skew : {false, true}) {
    for (const auto& [experts, rows, n, m] : kSizes) {
      const Case c({m, n, rows, bench_groups(rows, experts, skew)});
      const double flop = 2.0 * rows * m * n * 1e-12;
      std::vector<std::vector<double>> rates(versions.size());
      for (const auto& [name, kind, accumulate] : kColumns) {
        if (once) {
          c.run(kind, accumulate);
          continue;
        }
        std::vector<std::vector<double>> times(versions.size());
        for (const Version& v : versions) {
          version = v;
          c.check(kind, accumulate, kSamples, v.name);
        }
        for (int round = 0; round < kRounds; ++round) {
          for (std::size_t v = 0; v < versions.size(); ++v) {
            version = versions[v];
            times[v].push_back(mean_ms(c, kind, accumulate, kBudgetMs));
          }
        }
        for (std::size_t v = 0; v < versions.size(); ++v) {
          std::sort(times[v].begin(), times[v].end());
          rates[v].push_back(flop / times[v][kRounds / 2] * 1e3);
        }
      }
      for (std::size_t v = 0; v < versions.size() && !once; ++v) {
        std::printf("%-9s %2d %6d %5d->%5d %-7s", versions[v].name, experts, rows, n, m, skew ? "skewed" : "equal");
        for (const double rate : rates[v]) std::printf(" %8.1f", rate);
        std::printf("\n");
      }
      std::fflush(stdout);
    }
    if (once) break;
  }
  TESSERA_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  const std::string command = argc >= 2 ? argv[1] : "";
  try {
    if (argc > 2) {  // takes only the versions that are named
      std::vector<lab::Version> some;
      for (const lab::Version& v : lab::versions) {
        if (std::find_if(argv + 2, argv + argc, [&](const char* name) { return v.name == std::string(name); }) !=
            argv + argc) {
          some.push_back(v);
        }
      }
      TESSERA_CHECK(!some.empty(), "no such version");
      lab::versions = some;
    }
    if (command == "check") {
      lab::random_bits.seed(std::random_device{}());
      for (const lab::Version& v : lab::versions) {
        lab::version = v;
        std::printf("%s\n", v.name);
        lab::check_all();
      }
    } else if (command == "bench") {
      std::printf("%-9s experts rows n->m groups        fwd    dgrad  wgrad = wgrad +=   TFLOP/s\n", "version");
      lab::bench_all(false);
    } else if (command == "once") {
      lab::version = lab::versions.front();
      lab::bench_all(true);
    } else {
      std::fprintf(stderr, "usage: grouped_gemm check|bench|once [version ...]\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%s\n", lab::all_right ? "all right" : "SOMETHING IS WRONG");
  return lab::all_right ? 0 : 1;
}
