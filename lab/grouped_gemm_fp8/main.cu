// Compares the grouped GEMMs of 8-bit operands in src/ops/gemm/sm90 with float64, and measures their time.
//   grouped_gemm_fp8 check      many shapes and groupings; exits with 1 if one is wrong
//   grouped_gemm_fp8 bench      the shapes of docs/performance.md, in turn with bfloat16; every case is checked on a
//                               sample
//   grouped_gemm_fp8 profile    each of bench's cases once, for a profiler
#include <memory>

#include "../products.cuh"
#include "operand.cuh"
#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_grouped_gemm_fp8.h"

namespace lab {
namespace {

using namespace tessera::cuda;
using mx::ScaleType;
using Bf16 = __nv_bfloat16;

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

// FP8 tensor cores keep 13 bits below the largest product of a sum. That is 1e-3 of a step's typical sum at worst, and
// steps differ in their scales.
constexpr Tolerance kRounded{2.5e-3, 4e-3}, kFloat32{3e-4, 1e-2};

/// y = x · wᵀ in a format. The input's gradient is the same with m and n exchanged.
struct Rows {
  Shape shape;
  Format format;
  bool exact;
  Operand x, w;
  Buffer<std::int32_t> offsets;
  Buffer<Bf16> y, wide;

  /// One in `small` elements is subnormal (0: none).
  Rows(const Shape& s, const Format& f, int small)
      : shape(s),
        format(f),
        exact(f.along == mx::kBlock),
        x(f, 1, s.num_rows, s.n, 1, small),
        w(f, s.experts(), s.m, s.n, exact ? 1 : mx::kWideBlock, small),
        offsets(s.offsets()),
        y(std::int64_t{s.num_rows} * s.m),
        wide(exact ? w.view.rows * ((s.n + 63) / 64 * 64) : 0) {
    x.poison_after(false, s.used());
    if (exact) widen<<<2048, 256>>>(w.view, wide.get());
  }

  void run() const {
    const int e = shape.experts(), r = shape.num_rows, m = shape.m, n = shape.n;
    if (exact) {
      sm90_exact_forward({.x_RN = x.view.bytes,
                          .x_scales = static_cast<const std::uint8_t*>(x.view.scales),
                          .w_wide = wide.get(),
                          .offsets_E1 = offsets.get(),
                          .y_RM = y.get(),
                          .num_experts = e,
                          .num_rows = r,
                          .m = m,
                          .n = n},
                         nullptr);
    } else {
      sm90_blockwise_forward({.x_RN = x.view.bytes,
                              .x_scales = x.view.scales,
                              .w_EMN = w.view.bytes,
                              .w_scales = w.view.scales,
                              .scale_type = format.type,
                              .offsets_E1 = offsets.get(),
                              .y_RM = y.get(),
                              .num_experts = e,
                              .num_rows = r,
                              .m = m,
                              .n = n},
                             nullptr);
    }
  }

  void check(std::int64_t samples) const {
    y.poison();
    run();
    const Product product{.num_experts = shape.experts(),
                          .rows = shape.num_rows,
                          .columns = shape.m,
                          .k = shape.n,
                          .offsets = offsets.get()};
    check_product(std::string("forward ") + format.name, product, shape, x.view, w.view, y, nullptr, samples, kRounded);
  }
};

/// d_w (= or +=) d_yᵀ · x.
struct Gradient {
  Shape shape;
  Format format;
  bool accumulate;
  Operand d_y, x;
  Buffer<std::int32_t> offsets;
  Buffer<float> d_w, base;
  Buffer<char> scratch;

  Gradient(const Shape& s, const Format& f, bool adds, int small)
      : shape(s),
        format(f),
        accumulate(adds),
        d_y(f, 1, s.m, s.num_rows, 1, small),
        x(f, 1, s.n, s.num_rows, 1, small),
        offsets(s.offsets()),
        d_w(std::int64_t{s.experts()} * s.m * s.n),
        base(adds ? d_w.count() : 0),
        scratch(static_cast<std::int64_t>(sm90_blockwise_scratch_bytes(s.num_rows, s.m, s.n))) {
    d_y.poison_after(true, s.used());
    x.poison_after(true, s.used());
    fill_normal(base, 100);
  }

  void run() const {
    sm90_blockwise_wgrad({.d_y_MR = d_y.view.bytes,
                          .d_y_scales = d_y.view.scales,
                          .x_NR = x.view.bytes,
                          .x_scales = x.view.scales,
                          .scale_type = format.type,
                          .offsets_E1 = offsets.get(),
                          .d_w_EMN = d_w.get(),
                          .scratch = scratch.get(),
                          .accumulate = accumulate,
                          .num_experts = shape.experts(),
                          .num_rows = shape.num_rows,
                          .m = shape.m,
                          .n = shape.n},
                         nullptr);
  }

  void check(std::int64_t samples) const {
    const auto reset = [&] { accumulate ? d_w.assign(base) : d_w.poison(); };
    reset();
    run();
    const Product product{
        .wgrad = true, .num_experts = shape.experts(), .rows = shape.m, .columns = shape.n, .offsets = offsets.get()};
    const std::string what = std::string(accumulate ? "wgrad += " : "wgrad = ") + format.name;
    check_product(what, product, shape, d_y.view, x.view, d_w, accumulate ? base.get() : nullptr, samples, kFloat32);
    if (!samples) check_same_bits<float>(what, d_w, reset, [&] { run(); });
  }
};

/// The products in bfloat16, to compare times with.
struct Bf16Products {
  Shape shape;
  Buffer<Bf16> x, d_y, w, y, d_x;
  Buffer<float> d_w;
  Buffer<char> scratch{kSm90PartsBytes};
  Buffer<std::int32_t> offsets;

  explicit Bf16Products(const Shape& s)
      : shape(s),
        x(std::int64_t{s.num_rows} * s.n),
        d_y(std::int64_t{s.num_rows} * s.m),
        w(std::int64_t{s.experts()} * s.m * s.n),
        y(d_y.count()),
        d_x(x.count()),
        d_w(w.count()),
        offsets(s.offsets()) {
    fill_normal(x, 1);
    fill_normal(d_y, 1);
    fill_normal(w, 0.02f);
    fill_normal(d_w, 1);
  }

  void forward() const {
    sm90_grouped_forward({x.get(), w.get(), offsets.get(), y.get(), shape.experts(), shape.num_rows, shape.m, shape.n},
                         nullptr);
  }
  void dgrad() const {
    sm90_grouped_dgrad(
        {d_y.get(), w.get(), offsets.get(), d_x.get(), shape.experts(), shape.num_rows, shape.m, shape.n}, nullptr);
  }
  void wgrad(bool accumulate) const {
    sm90_grouped_wgrad({.d_y_RM = d_y.get(),
                        .x_RN = x.get(),
                        .offsets_E1 = offsets.get(),
                        .d_w_EMN = d_w.get(),
                        .scratch = scratch.get(),
                        .accumulate = accumulate,
                        .num_experts = shape.experts(),
                        .num_rows = shape.num_rows,
                        .m = shape.m,
                        .n = shape.n},
                       nullptr);
  }
};

void check(const Names&) {
  seed_random();
  std::vector<Shape> rows = {
      {128, 128, 256, {256}},                             // one tile
      {16, 16, 1, {1}},                                   // the smallest sizes
      {208, 336, 700, {77, 0, 131, 5, 300}},              // tails everywhere
      {1408, 528, 3000, {513, 1, 0, 0, 1023, 129, 640}},  // odd number of tiles: pairs span group ends
      {768, 1408, 2500, {0, 0, 2500, 0}},                 // one group has all rows
      {528, 512, 2500, {0, 0, 0, 1999}},                  // the last group has all rows, and spare rows follow
      {256, 272, 64, {0, 0, 0}},                          // no rows at all
      {512, 512, 2048, {256, 512, 1024, 256}},            // multiples of tiles
      {144, 208, 5000, skewed(4900, 256)},                // 256 experts
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
    rows.push_back({size(1500), size(1500), count + static_cast<int>(random_bits() % 300), skewed(count, experts)});
    const int units = 1 + static_cast<int>(random_bits() % 60);
    columns.push_back({size(1500), size(1500), units * 128 + size(300), skewed(units, experts, 128)});
  }
  constexpr int kSmall = 8;
  for (const Shape& shape : rows) {
    for (const Format& format : {kFloat, kWide, kExact}) Rows(shape, format, kSmall).check(0);
  }
  for (const Shape& shape : columns) {
    for (const Format& format : {kFloat, kWide}) {
      for (const bool accumulate : {false, true}) Gradient(shape, format, accumulate, kSmall).check(0);
    }
  }
}

void bench(const Names&) {
  struct Size {
    int experts, rows, n, m;
  };
  std::printf("%-27s |%23s |%11s |%11s |%23s |%s\n", "", "blockwise float, e8m0", "exact", "wgrad", "bfloat16",
              " TFLOP/s");
  std::printf("%-27s |%5s %5s %5s %5s |%5s %5s |%5s %5s |%5s %5s %5s %5s |\n", "experts rows n->m groups", "fwd",
              "dgrad", "fwd", "dgrad", "fwd", "dgrad", "=", "+=", "fwd", "dgrad", "= ", "+=");
  for (const bool skew : {false, true}) {
    if (skew && profiling) break;
    for (const auto& [experts, rows, n, m] : {Size{8, 98304, 2048, 1408}, Size{8, 98304, 1408, 2048},
                                              Size{32, 65536, 7168, 2048}, Size{32, 16384, 7168, 2048}}) {
      constexpr std::int64_t kSamples = 20000;
      const Shape s{m, n, rows, bench_groups(rows, experts, skew, 128)}, t{n, m, rows, s.groups};
      std::vector<std::function<void()>> runs;
      const auto add = [&](const auto& product) {
        product->check(kSamples);
        runs.push_back([product] { product->run(); });
      };
      for (const Format& format : {kFloat, kWide, kExact}) {
        for (const Shape* shape : {&s, &t}) add(std::make_shared<Rows>(*shape, format, 0));
      }
      for (const bool accumulate : {false, true}) add(std::make_shared<Gradient>(s, kFloat, accumulate, 0));
      const Bf16Products bf16(s);
      runs.push_back([&] { bf16.forward(); });
      runs.push_back([&] { bf16.dgrad(); });
      runs.push_back([&] { bf16.wgrad(false); });
      runs.push_back([&] { bf16.wgrad(true); });
      const std::vector<double> ms = times_in_turn(runs);
      std::printf("%2d %6d %5d->%4d %-7s |", experts, rows, n, m, skew ? "skewed" : "equal");
      for (std::size_t i = 0; i < ms.size(); ++i) {
        const bool ends_group = i == 3 || i == 5 || i == 7 || i + 1 == ms.size();
        std::printf("%5.0f %s", 2.0 * rows * m * n * 1e-9 / ms[i], ends_group ? "|" : "");
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  const auto profile = [](const lab::Names& names) {
    lab::profiling = true;
    lab::bench(names);
  };
  return lab::run_command(argc, argv, {{"check", lab::check}, {"bench", lab::bench}, {"profile", profile}});
}
