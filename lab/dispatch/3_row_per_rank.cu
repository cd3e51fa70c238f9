// Level 3: a token crosses once per rank, and the receiver copies it to its other rows there.
//
// The idea. Several of a token's experts may live on one rank. The row then crosses for the first of them only. With it
// goes a record that says where the token's choices have their rows. The receiver reads it and copies the row from its
// own memory to the others.
//
// What must be spent. A token has 8 choices on 5.29 ranks at the shape, 4.63 of them remote: 272 MB per rank over
// NVLink instead of 411, 0.60 ms instead of 0.91. The receivers read and write 2.71 rows per token of their own memory.
// On one GPU there are no links, and that is extra: 0.47 GB read, 2.49 written, 1.27 read and 1.27 written again: 5.5
// GB, 1.15 ms.
//
// What limits it. Memory, as before. So this level is slower than level 2 on one GPU, and the table shows it. It pays
// where links are narrower than memory: on an H200 by 10 to 1.
//
// Predicted: 1.45 ms, 3.8 TB/s.
#include "level.cuh"

namespace lab {
namespace {

/// Gives a warp to each token of the rank.
__global__ void __launch_bounds__(kThreads) send_tokens(const __grid_constant__ Ranks ranks) {
  const int p = static_cast<int>(blockIdx.y), t = warp_in_grid();
  if (t < ranks.sizes.tokens) send_token(ranks, p, t, ranks.of[p].base_E);
}

/// Gives a warp to each token of all ranks. The end of the kernel before says that all rows have arrived. On several
/// GPUs flags would say it.
__global__ void __launch_bounds__(kThreads) receive_tokens(const __grid_constant__ Ranks ranks) {
  const Sizes& sizes = ranks.sizes;
  const int token = warp_in_grid();
  if (token >= sizes.ranks * sizes.tokens) return;
  receive_token(ranks.of[blockIdx.y].window, sizes, token / sizes.tokens, token % sizes.tokens);
}

}  // namespace

void dispatch_3_row_per_rank(const Ranks& ranks, cudaStream_t stream) {
  const Sizes& sizes = ranks.sizes;
  plan_on_device(ranks, stream);
  send_tokens<<<warp_grid(ranks, sizes.tokens), kThreads, 0, stream>>>(ranks);
  receive_tokens<<<warp_grid(ranks, sizes.ranks * sizes.tokens), kThreads, 0, stream>>>(ranks);
}

}  // namespace lab
