#include "ops/norm/rmsnorm.h"
#include "ops/quantize/quantize.h"
#include "tests/ops/parity.h"
#include "tests/ops/quantize/quantize_inputs.h"

namespace tessera {
namespace {

constexpr float kEps = 1e-5f;
// The widths are one number, widths that are not in lanes, those of latents and of models, and the widest. In the
// widest rows a thread's last part is not full.
constexpr std::int64_t kNormWidths[] = {1, 45, 64, 512, 577, 2048, 7168};
// Up to 8 rows have a kernel of their own.
constexpr std::int64_t kNumRows[] = {1, 8, 131};

using RmsNormCuda = ParityTest;

TEST_F(RmsNormCuda, Forward) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kNormWidths) {
      for (const std::int64_t num_rows : kNumRows) {
        for (const std::int64_t gap : {0, 3, 8}) {
          const ArenaScope scope(arena_);
          Tensor x = random({num_rows, width + gap}, dtype, 3.0);
          if (gap > 0) x = x.columns(0, width);
          const Tensor w = random({width}, dtype), y = poisoned({num_rows, width}, dtype);
          const Tensor rstd = poisoned({num_rows}, DType::kFloat32);
          expect_close([&](const Side& side) { rmsnorm_forward(side.op, side(x), side(w), kEps, side(y), side(rstd)); },
                       {y, rstd});
        }
      }
    }
  }
}

TEST_F(RmsNormCuda, Residual) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kNormWidths) {
      for (const std::int64_t num_rows : kNumRows) {
        const ArenaScope scope(arena_);
        const Shape shape{num_rows, width};
        const Tensor x = random(shape, dtype, 3.0), delta = random(shape, dtype), w = random({width}, dtype);
        const Tensor sum = poisoned(shape, dtype), y = poisoned(shape, dtype);
        const Tensor rstd = poisoned({num_rows}, DType::kFloat32);
        const auto run = [&](const Side& side) {
          residual_rmsnorm_forward(side.op, side(x), side(delta), side(w), kEps, side(sum), side(y), side(rstd));
        };
        expect_close(run, {y, rstd});
        expect_same(run, {sum});
        if (num_rows == 1) expect_close_though_late(delta, poisoned(shape, dtype), run, {y, rstd});
      }
    }
  }
}

// The quantized forms are those of the plain output, whose last bits are the GPU's.
TEST_F(RmsNormCuda, QuantizedOutputs) {
  for (const DType dtype : kActivationTypes) {
    for (const mx::Format& format : all_formats()) {
      for (const std::int64_t width : {45, 512, 2048}) {
        for (const bool residual : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} {}", name_of(dtype), width, describe(format)));
          const ArenaScope scope(arena_);
          const Shape shape{200, width};
          const Tensor x = random(shape, dtype, 3.0), delta = random(shape, dtype), w = random({width}, dtype);
          const Tensor sum = poisoned(shape, dtype), rstd = poisoned({200}, DType::kFloat32);
          GemmOperand y(poisoned(shape, dtype));
          y.rows = poisoned(shape, format);
          y.columns = poisoned(mx::transposed(shape), format);
          const auto run = [&](const Side& side) {
            residual
                ? residual_rmsnorm_forward(side.op, side(x), side(delta), side(w), kEps, side(sum), side(y), side(rstd))
                : rmsnorm_forward(side.op, side(x), side(w), kEps, side(y), side(rstd));
          };
          expect_close(run, {y.plain, rstd});
          run_on_gpu(run, {y.plain, y.rows.elements, y.rows.scales, y.columns.elements, y.columns.scales});
          const mx::Quantized rows = poisoned(shape, format), columns = poisoned(mx::transposed(shape), format);
          quantize(context(), y.plain, rows, columns);
          EXPECT_EQ(doubles(y.rows.elements), doubles(rows.elements));
          EXPECT_EQ(doubles(y.rows.scales), doubles(rows.scales));
          EXPECT_EQ(doubles(y.columns.elements), doubles(columns.elements));
          EXPECT_EQ(doubles(y.columns.scales), doubles(columns.scales));
        }
      }
    }
  }
}

TEST_F(RmsNormCuda, Backward) {
  for (const DType dtype : kActivationTypes) {
    for (const std::int64_t width : kNormWidths) {
      for (const std::int64_t num_rows : {1, 130, 400, 1100}) {  // from 400 on a block has several rows
        if (num_rows * width > 3'000'000) continue;              // the CPU's memory is limited
        for (const std::int64_t gap : {0, 8}) {
          const ArenaScope scope(arena_);
          const Shape shape{num_rows, width};
          Tensor x = random({num_rows, width + gap}, dtype, 3.0), d_x = random({num_rows, width + gap}, dtype);
          if (gap > 0) x = x.columns(0, width), d_x = d_x.columns(gap, width + gap);
          const Tensor d_y = random(shape, dtype), w = random({width}, dtype), d_w = random({width});
          const Tensor rstd = random({num_rows}, DType::kFloat32);
          for (const Write write : {Write::kAccumulate, Write::kAssign}) {
            expect_close(
                [&](const Side& side) {
                  rmsnorm_backward(side.op, side(d_y), side(x), side(w), side(rstd), side(d_x), write, side(d_w));
                },
                {d_x, d_w}, kBackwardBound);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
