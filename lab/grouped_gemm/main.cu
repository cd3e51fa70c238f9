// Compares grouped GEMMs with float64, and measures their time: the levels of the course, and the kernels of
// src/ops/gemm/sm90, which are its last level.
//   grouped_gemm check [name ...]     many shapes and groupings; exits with 1 if one is wrong
//   grouped_gemm bench [name ...]     the course: forward by all levels in turn, each checked on a sample
//   grouped_gemm products [name ...]  forward, dgrad and wgrad at the shapes of docs/performance.md, in TFLOP/s
//   grouped_gemm once [name ...]      each of these products once, for a profiler
//   grouped_gemm plan                 the levels' lists of tiles, on the CPU only
// A name is that of a level ("3_wgmma") or of a version of all products ("src"). If compiled with LAB_VERSIONS="X(name)
// X(name) …", there are several such versions.
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "../products.cuh"
#include "level.cuh"
#include "wgmma_tile.cuh"

namespace lab {
namespace {

using tessera::cuda::kSm90PartsBytes;

enum class Kind { kForward, kDgrad, kWgrad };
constexpr Kind kKinds[] = {Kind::kForward, Kind::kDgrad, Kind::kWgrad};

/// A level computes the forward only.
struct Version {
  std::string name;
  decltype(&tessera::cuda::sm90_grouped_forward) forward;
  decltype(&tessera::cuda::sm90_grouped_dgrad) dgrad = nullptr;
  decltype(&tessera::cuda::sm90_grouped_wgrad) wgrad = nullptr;

  bool has(Kind kind) const {
    return kind == Kind::kForward || (kind == Kind::kDgrad ? dgrad != nullptr : wgrad != nullptr);
  }
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
const std::vector<Version> kProductVersions = {LAB_VERSIONS};
#undef X
#else
const std::vector<Version> kProductVersions = {
    {"src", tessera::cuda::sm90_grouped_forward, tessera::cuda::sm90_grouped_dgrad, tessera::cuda::sm90_grouped_wgrad}};
#endif

std::vector<Version> all_versions() {
  std::vector<Version> all = {{"1_naive", forward_1_naive},
                              {"2_shared_tiles", forward_2_shared_tiles},
                              {"3_wgmma", forward_3_wgmma},
                              {"4_ring", forward_4_ring},
                              {"5_persistent_clusters", forward_5_persistent_clusters}};
  all.insert(all.end(), kProductVersions.begin(), kProductVersions.end());
  return all;
}

struct Case {
  Shape shape;
  Buffer<Bf16> x, d_y, w, y, d_x;
  Buffer<float> d_w, base;
  Buffer<std::int32_t> offsets;
  Buffer<char> scratch{kSm90PartsBytes};
  cudaStream_t stream = nullptr;

  /// With forward_only, nothing is allocated that only the other products need.
  Case(const Shape& s, bool forward_only)
      : shape(s),
        x(std::int64_t{s.num_rows} * s.n),
        d_y(forward_only ? 0 : std::int64_t{s.num_rows} * s.m),
        w(std::int64_t{s.m} * s.n * s.experts()),
        y(std::int64_t{s.num_rows} * s.m),
        d_x(forward_only ? 0 : x.count()),
        d_w(forward_only ? 0 : w.count()),
        base(d_w.count()),
        offsets(s.offsets()) {
    fill_normal(x, 1);
    fill_normal(d_y, 1);
    fill_normal(w, 0.02f);
    fill_normal(base, 3);
    // The rows after the last group are NaN.
    const std::int64_t used = s.used(), unused = s.num_rows - used;
    TESSERA_CUDA(cudaMemset(x.get() + used * s.n, 0xff, unused * s.n * sizeof(Bf16)));
    if (!forward_only) TESSERA_CUDA(cudaMemset(d_y.get() + used * s.m, 0xff, unused * s.m * sizeof(Bf16)));
  }

  void run(const Version& version, Kind kind, bool accumulate = false) const {
    const int e = shape.experts(), r = shape.num_rows, m = shape.m, n = shape.n;
    switch (kind) {
      case Kind::kForward:
        return version.forward({.x_RN = x.get(),
                                .w_EMN = w.get(),
                                .offsets_E1 = offsets.get(),
                                .y_RM = y.get(),
                                .num_experts = e,
                                .num_rows = r,
                                .m = m,
                                .n = n},
                               stream);
      case Kind::kDgrad:
        return version.dgrad({.d_y_RM = d_y.get(),
                              .w_EMN = w.get(),
                              .offsets_E1 = offsets.get(),
                              .d_x_RN = d_x.get(),
                              .num_experts = e,
                              .num_rows = r,
                              .m = m,
                              .n = n},
                             stream);
      case Kind::kWgrad:
        return version.wgrad({.d_y_RM = d_y.get(),
                              .x_RN = x.get(),
                              .offsets_E1 = offsets.get(),
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

  /// Restores what a product adds to, and poisons what it assigns.
  void reset(bool accumulate) const {
    if (accumulate) {
      d_w.assign(base);
    } else {
      d_w.poison();
    }
    y.poison();
    d_x.poison();
  }

  /// Checks a product. bfloat16 outputs differ by their rounding, and float32 ones by the order of the sum.
  bool check(const Version& version, Kind kind, bool accumulate, std::int64_t samples,
             const std::string& what = "") const {
    reset(accumulate);
    run(version, kind, accumulate);
    constexpr Tolerance kRounded{2.5e-3, 1e-3}, kFloat32{2e-5, 1e-4};
    const std::int64_t m = shape.m, n = shape.n;
    const auto product = [&](bool wgrad, std::int64_t columns, std::int64_t k) {
      return Product{.wgrad = wgrad,
                     .num_experts = shape.experts(),
                     .rows = wgrad ? shape.m : shape.num_rows,
                     .columns = static_cast<int>(columns),
                     .k = static_cast<int>(k),
                     .offsets = offsets.get()};
    };
    const std::string name = version.name + " " + what;
    switch (kind) {
      case Kind::kForward:
        return check_product(name + "forward", product(false, m, n), shape, Bf16Operand{x.get(), 0, n, 1},
                             Bf16Operand{w.get(), m * n, n, 1}, y, nullptr, samples, kRounded);
      case Kind::kDgrad:
        return check_product(name + "dgrad", product(false, n, m), shape, Bf16Operand{d_y.get(), 0, m, 1},
                             Bf16Operand{w.get(), m * n, 1, n}, d_x, nullptr, samples, kRounded);
      case Kind::kWgrad:
        break;
    }
    return check_product(name + (accumulate ? "wgrad +=" : "wgrad ="), product(true, n, 0), shape,
                         Bf16Operand{d_y.get(), 0, 1, m}, Bf16Operand{x.get(), 0, 1, n}, d_w,
                         accumulate ? base.get() : nullptr, samples, kFloat32);
  }
};

/// Checks that the products, captured into a graph and replayed twice, give the results of a launch.
void check_graph(Case& c, const Version& version) {
  TESSERA_CUDA(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
  const auto run_all = [&] {
    for (const Kind kind : kKinds) {
      if (version.has(kind)) c.run(version, kind);
    }
  };
  const auto poison = [&] {
    c.reset(false);
    TESSERA_CUDA(cudaDeviceSynchronize());
  };
  const auto results = [&] {
    TESSERA_CUDA(cudaStreamSynchronize(c.stream));
    std::vector<char> bytes;
    const auto append = [&](const auto& buffer) {
      const std::size_t begin = bytes.size();
      bytes.resize(begin + buffer.num_bytes());
      TESSERA_CUDA(cudaMemcpy(bytes.data() + begin, buffer.get(), buffer.num_bytes(), cudaMemcpyDeviceToHost));
    };
    append(c.y);
    append(c.d_x);
    append(c.d_w);
    return bytes;
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
    std::printf("%s %s graph, replay %d\n", verdict(results() == launched), version.name.c_str(), i);
  }
  TESSERA_CUDA(cudaGraphExecDestroy(executable));
  TESSERA_CUDA(cudaGraphDestroy(graph));
  TESSERA_CUDA(cudaStreamDestroy(c.stream));
  c.stream = nullptr;
}

std::vector<Shape> shapes_to_check() {
  std::vector<Shape> all = {
      {128, 256, 128, {128}},                             // one tile
      {8, 8, 1, {1}},                                     // one row, the smallest sizes
      {200, 328, 700, {77, 0, 131, 5, 300}},              // tails everywhere
      {1408, 520, 3000, {513, 1, 0, 0, 1023, 129, 640}},  // tails, and more columns
      {768, 1408, 2500, {0, 0, 2500, 0}},                 // one group has all rows
      {520, 512, 2500, {0, 0, 0, 1999}},                  // the last group has all rows, and spare rows follow
      {256, 264, 64, {0, 0, 0}},                          // no rows at all
      {512, 512, 2048, {256, 512, 1024, 256}},            // multiples of tiles
      {128, 256, 40000, {20001, 11111}},                  // long sums in few tiles
      {256, 512, 60000, {60000}},                         // long sums, in three parts
      {136, 200, 5000, skewed(4900, 256)},                // 256 experts
      {4200, 264, 900, {100, 33, 700}},                   // many bands
      {24, 40, 333, {20, 300}},                           // K shorter than a step
  };
  for (int i = 0; i < 8; ++i) {
    const auto size = [](int most) { return 8 * (1 + static_cast<int>(random_bits() % (most / 8))); };
    const int rows = 200 + static_cast<int>(random_bits() % 4000), experts = 1 + static_cast<int>(random_bits() % 40);
    const int room = rows + static_cast<int>(random_bits() % 300), m = size(1500), n = size(1500);
    all.push_back({m, n, room, skewed(rows, experts)});
  }
  return all;
}

void check(const Names& names) {
  seed_random();
  const std::vector<Shape> shapes = shapes_to_check();
  for (const Version& version : named(all_versions(), names)) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      Case c(shapes[i], !version.has(Kind::kWgrad));
      c.check(version, Kind::kForward, false, 0);
      check_same_bits<Bf16>(
          version.name, c.y, [] {}, [&] { c.run(version, Kind::kForward); });
      if (version.has(Kind::kDgrad)) c.check(version, Kind::kDgrad, false, 0);
      if (version.has(Kind::kWgrad)) {
        c.check(version, Kind::kWgrad, false, 0);
        c.check(version, Kind::kWgrad, true, 0);
        check_same_bits<float>(
            version.name + " wgrad", c.d_w, [&] { c.reset(true); }, [&] { c.run(version, Kind::kWgrad, true); });
      }
      if (i == 0 || i + 8 >= shapes.size()) check_graph(c, version);
    }
  }
}

// --- The lists of tiles, on the CPU --------------------------------------------------------------------------------

/// Checks that every row of every group lies in one tile and no tile is empty.
void check_row_tiles(const Shape& s, int tile_rows) {
  const std::vector<std::int32_t> offsets = s.offsets();
  std::vector<int> times(s.num_rows);
  bool right = true;
  const int most = most_row_tiles({.num_experts = s.experts(), .num_rows = s.num_rows}, tile_rows);
  for (int index = 0; index < most; ++index) {
    const RowTile tile = find_row_tile(offsets.data(), s.experts(), index, tile_rows);
    if (tile.expert < 0) continue;
    right &= tile.row >= offsets[tile.expert] && tile.row < tile.row_end && tile.row_end == offsets[tile.expert + 1];
    for (int row = tile.row; row < std::min(tile.row + tile_rows, tile.row_end); ++row) ++times[row];
  }
  right &= find_row_tile(offsets.data(), s.experts(), most, tile_rows).expert < 0;
  for (int row = 0; row < s.num_rows; ++row) right &= times[row] == (row < s.used() ? 1 : 0);
  std::printf("%s row tiles of %d: rows %d, experts %d\n", verdict(right), tile_rows, s.num_rows, s.experts());
}

/// Checks that `stride` walkers together meet every tile once.
void check_tile_list(const Shape& s, int stride) {
  constexpr int kRows = 2 * kTileRows;
  const std::vector<std::int32_t> offsets = s.offsets();
  std::map<std::tuple<int, int, int>, int> times;
  bool right = true;
  for (int first = 0; first < stride; ++first) {
    TileList tiles(offsets.data(), s.experts(), s.m, kRows, kTileColumns, first, stride);
    Tile tile;
    while (tiles.next(tile)) {
      ++times[{tile.rows.expert, tile.rows.row, tile.column}];
      right &= tile.rows.row_end == offsets[tile.rows.expert + 1];
    }
  }
  std::size_t expected = 0;
  for (int e = 0; e < s.experts(); ++e) {
    for (int row = offsets[e]; row < offsets[e + 1]; row += kRows) {
      for (int column = 0; column < s.m; column += kTileColumns, ++expected) right &= times[{e, row, column}] == 1;
    }
  }
  right &= times.size() == expected;
  std::printf("%s tile list of %d: rows %d, experts %d, m %d\n", verdict(right), stride, s.num_rows, s.experts(), s.m);
}

void plan(const Names&) {
  seed_random();
  for (const Shape& shape : shapes_to_check()) {
    for (const int tile_rows : {1, 128, 256}) check_row_tiles(shape, tile_rows);
    for (const int stride : {1, 3, 66}) check_tile_list(shape, stride);
  }
}

// --- Times ---------------------------------------------------------------------------------------------------------

struct Size {
  int experts, rows, n, m;
};
constexpr std::int64_t kSamples = 20000;

Shape shape_of(const Size& size, bool skew) {
  return {size.m, size.n, size.rows, bench_groups(size.rows, size.experts, skew, 1)};
}

void bench(const Names& names) {
  constexpr std::pair<Size, bool> kCases[] = {
      {{8, 98304, 2048, 1408}, false}, {{8, 98304, 2048, 1408}, true}, {{32, 16384, 7168, 2048}, false}};
  const std::vector<Version> versions = named(all_versions(), names);
  for (const auto& [size, skew] : kCases) {
    const auto [experts, rows, n, m] = size;
    const Case c(shape_of(size, skew), true);
    const double flop = 2.0 * rows * m * n;
    const double bytes = 2.0 * (double{1} * rows * (m + n) + double{1} * experts * m * n);
    const double flop_ms = flop / kTensorRate * 1e3, memory_ms = bytes / kMemoryRate * 1e3;
    std::printf("forward, %d experts, %d rows %s, %d->%d: %.3f ms for %.3f TFLOP, %.3f ms for %.2f GB\n", experts, rows,
                skew ? "skewed" : "equal", n, m, flop_ms, flop * 1e-12, memory_ms, bytes * 1e-9);
    std::vector<bool> right;
    std::vector<std::function<void()>> runs;
    for (const Version& version : versions) {
      right.push_back(c.check(version, Kind::kForward, false, kSamples));
      runs.push_back([&] { c.run(version, Kind::kForward); });
    }
    const std::vector<double> ms = times_in_turn(runs);
    print_table_head("TFLOP/s");
    for (std::size_t i = 0; i < versions.size(); ++i) {
      print_table_row(versions[i].name, right[i], ms[i], flop / ms[i] * 1e-9, std::max(flop_ms, memory_ms));
    }
  }
}

void products(const Names& names) {
  constexpr Size kSizes[] = {{8, 98304, 2048, 1408},
                             {8, 98304, 1408, 2048},
                             {32, 65536, 7168, 2048},
                             {32, 16384, 7168, 2048},
                             {32, 2048, 7168, 2048}};
  constexpr std::pair<Kind, bool> kColumns[] = {
      {Kind::kForward, false}, {Kind::kDgrad, false}, {Kind::kWgrad, false}, {Kind::kWgrad, true}};
  const std::vector<Version> versions = named(kProductVersions, names);
  std::printf("%-9s experts rows n->m groups        fwd    dgrad  wgrad = wgrad +=   TFLOP/s\n", "version");
  for (const bool skew : {false, true}) {
    if (skew && profiling) break;
    for (const Size& size : kSizes) {
      const Case c(shape_of(size, skew), false);
      const double gflop = 2.0 * size.rows * size.m * size.n * 1e-9;
      std::vector<std::vector<double>> rates(versions.size());
      for (const auto& [kind, accumulate] : kColumns) {
        std::vector<std::function<void()>> runs;
        for (const Version& version : versions) {
          if (!profiling) c.check(version, kind, accumulate, kSamples);
          runs.push_back([&, kind = kind, accumulate = accumulate] { c.run(version, kind, accumulate); });
        }
        const std::vector<double> ms = times_in_turn(runs);
        for (std::size_t v = 0; v < versions.size(); ++v) rates[v].push_back(gflop / ms[v]);
      }
      for (std::size_t v = 0; v < versions.size() && !profiling; ++v) {
        std::printf("%-9s %2d %6d %5d->%5d %-7s", versions[v].name.c_str(), size.experts, size.rows, size.n, size.m,
                    skew ? "skewed" : "equal");
        for (const double rate : rates[v]) std::printf(" %8.1f", rate);
        std::printf("\n");
      }
      std::fflush(stdout);
    }
  }
  finish_kernels();
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  const auto once = [](const lab::Names& names) {
    lab::profiling = true;
    lab::products(names);
  };
  return lab::run_command(
      argc, argv,
      {{"check", lab::check}, {"bench", lab::bench}, {"products", lab::products}, {"once", once}, {"plan", lab::plan}});
}
