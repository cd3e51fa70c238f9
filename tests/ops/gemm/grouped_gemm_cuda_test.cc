#include "ops/gemm/grouped_gemm.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

class GroupedGemmCuda : public ParityTest {
 protected:
  /// Checks all three products of rows in groups of these lengths. `spare` rows of NaN follow the last group.
  void check(DType dtype, const std::vector<std::int32_t>& lengths, std::int64_t m, std::int64_t n,
             std::int64_t spare = 7) {
    SCOPED_TRACE(fmt::format("{} groups {} of {} x {}", name_of(dtype), fmt::join(lengths, " "), m, n));
    std::vector<std::int32_t> ends = {0};
    for (const std::int32_t length : lengths) ends.push_back(ends.back() + length);
    const Tensor offsets = ints(ends);
    const auto experts = static_cast<std::int64_t>(lengths.size());
    const std::int64_t used = ends.back(), rows = used + spare;
    const auto routed = [&](std::int64_t width) {
      const Tensor x = random({rows, width}, dtype), rest = x.rows(used, rows);
      std::memset(rest.raw(), 0xff, rest.num_bytes());
      return x;
    };
    const Tensor x = routed(n), d_y = routed(m), w = random({experts, m, n}, dtype, 0.1);
    // Rows after the last group stay unchanged: they are numbers, and would become NaN. The others become NaN before
    // the graph writes them.
    const Tensor y = random({rows, m}, dtype), d_x = random({rows, n}, dtype);
    const auto expect = [&](auto&& run, const Tensor& out) {
      expect_close(run, {out.rows(0, used)}, kBackwardBound);
      if (spare > 0) expect_same(run, {out.rows(used, rows)});
    };
    expect(
        [&](const Side& s) {
          choose(s);
          as_graph(s, {y.rows(0, used)}, [&] { grouped_linear_forward(s.op, s(x), s(w), s(offsets), s(y)); });
        },
        y);
    expect(
        [&](const Side& s) {
          choose(s);
          as_graph(s, {d_x.rows(0, used)}, [&] { grouped_linear_dgrad(s.op, s(d_y), s(w), s(offsets), s(d_x)); });
        },
        d_x);
    for (const Write write : {Write::kAssign, Write::kAccumulate}) {
      const Shape shape{experts, m, n};
      const Tensor d_w = write == Write::kAssign ? poisoned(shape, DType::kFloat32) : random(shape);
      const auto wgrad = [&](const Side& s) {
        choose(s);
        grouped_linear_wgrad(s.op, s(d_y), s(x), s(offsets), s(d_w), write);
      };
      expect_close(wgrad, {d_w}, dtype == DType::kFloat32 ? kBackwardBound : 1e-3);
    }
  }

  /// If true, a Hopper runs the kernel that a Blackwell runs.
  bool prefers_library_ = false;

 private:
  void choose(const Side& s) const {
    if (s.op.cuda != nullptr) s.op.cuda->prefer_library_grouped_gemm(prefers_library_);
  }
};

TEST_F(GroupedGemmCuda, SizesAndSkews) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check(dtype, {1}, 8, 8);
    check(dtype, {0, 0, 5}, 24, 40);
    check(dtype, {130, 0, 1, 257, 63}, 136, 72);
    check(dtype, {0, 300, 0}, 264, 320);
    check(dtype, {3, 9}, 7, 13);  // sizes that the tensor cores do not take
    check(dtype, {64, 64}, 128, 128, 1);
  }
  check(DType::kBFloat16, std::vector<std::int32_t>(64, 33), 176, 256);
}

TEST_F(GroupedGemmCuda, TheLibrarysKernel) {
  prefers_library_ = true;
  check(DType::kBFloat16, {1}, 8, 8);
  check(DType::kBFloat16, {0, 0, 5}, 24, 40);
  check(DType::kBFloat16, {0, 0}, 24, 40);                 // no rows at all
  check(DType::kBFloat16, {130, 0, 1, 257, 63}, 136, 72);  // tiles and steps of k that are not full
  check(DType::kBFloat16, {0, 300, 0}, 264, 520);          // several tiles of columns
  check(DType::kBFloat16, {64, 128}, 256, 256, 0);         // whole tiles, and no rows after them
  check(DType::kBFloat16, std::vector<std::int32_t>(64, 33), 176, 256);
}

TEST_F(GroupedGemmCuda, MoreExpertsThanHoppersKernelsTake) {
  check(DType::kBFloat16, std::vector<std::int32_t>(300, 3), 72, 136);
  check(DType::kBFloat16, std::vector<std::int32_t>(512, 2), 16, 24);
  check(DType::kBFloat16, std::vector<std::int32_t>(513, 2), 16, 24);  // more than the library takes, either
}

}  // namespace
}  // namespace tessera
