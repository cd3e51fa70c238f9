// Level 1: one thread per output, straight from memory.
//
// The idea. A thread computes y[row, column] as the definition says: it walks both operands along N and adds up the
// products. All sharing is left to the caches.
//
// What must be spent. The shape has 283.5 G products (0.567 TFLOP). Memory must give and take x, w and y once: 0.73 GB.
// An H200's floors are 0.151 ms for these bytes at 4.8 TB/s, and 0.573 ms for the operations at 989 TFLOP/s. The
// operations decide, at all levels of this course.
//
// What limits it. The lanes of a warp have neighbouring columns, so each load of w touches 32 rows of w, in 32 cache
// lines. The L1 cache looks up about one line per cycle, plus one for x, which all lanes share. So a warp's 32 products
// take 33 cycles of an SM: 283.5 G products · 33 / 32 / 132 SMs / 1.98 GHz = 1.12 s.
//
// Predicted: 0.5 TFLOP/s, 0.05 % of the floor's rate.
#include "level.cuh"

namespace lab {
namespace {

constexpr int kColumns = 32, kRows = 8;  // of a block

__global__ void naive(Forward p) {
  const int column = blockIdx.y * kColumns + threadIdx.x, row = blockIdx.x * kRows + threadIdx.y;
  int expert = 0;
  while (expert < p.num_experts && row >= p.offsets_E1[expert + 1]) ++expert;
  if (expert == p.num_experts || column >= p.m) return;  // rows of no expert are not written
  const Bf16* x = p.x_RN + std::int64_t{row} * p.n;
  const Bf16* w = p.w_EMN + (std::int64_t{expert} * p.m + column) * p.n;
  float sum = 0;
  for (int k = 0; k < p.n; ++k) sum += __bfloat162float(x[k]) * __bfloat162float(w[k]);
  p.y_RM[std::int64_t{row} * p.m + column] = __float2bfloat16(sum);
}

}  // namespace

void forward_1_naive(const Forward& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.num_rows, kRows), ceil_div(args.m, kColumns));
  naive<<<grid, dim3(kColumns, kRows), 0, stream>>>(args);
}

}  // namespace lab
