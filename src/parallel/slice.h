// The part of a tensor that a rank holds when one dim is cut among ranks.
#pragma once

#include <algorithm>

#include "tensor/tensor.h"

namespace tessera {

/// Describes part `part` of `parts` of dim `dim`. If `blocks` is above 1, the dim consists of that many blocks, one
/// after the other (gate rows, up rows). A rank then holds a part of each block.
struct Slice {
  Shape global;
  int dim = 0;
  std::int64_t blocks = 1;
  std::int64_t part = 0, parts = 1;

  bool operator==(const Slice&) const = default;

  /// Returns the shape of the part that the rank holds.
  Shape local() const {
    std::vector<std::int64_t> dims = global.dims();
    TESSERA_CHECK(dims[static_cast<std::size_t>(dim)] % (blocks * parts) == 0, "{} dim {} in {} x {} parts",
                  global.to_string(), dim, blocks, parts);
    dims[static_cast<std::size_t>(dim)] /= parts;
    return Shape(dims);
  }

  /// Calls visit(local index, global index, count) for all runs of numbers in [begin, end) of the local tensor. A run
  /// is contiguous in the global tensor, too. Indices count numbers of the flattened tensors. [begin, end) must lie
  /// within the local tensor, which local() describes.
  template <typename Visit>
  void for_each_run(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    std::int64_t inner = 1;
    for (int i = dim + 1; i < global.num_dims(); ++i) inner *= global[i];
    // Runs are the rows of a matrix that has one row per outer index and block.
    const std::int64_t global_run = global[dim] / blocks * inner, run = global_run / parts;
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t row = at / run, inside = at % run, count = std::min(end - at, run - inside);
      visit(at, row * global_run + part * run + inside, count);
      at += count;
    }
  }
};

}  // namespace tessera
