// What lies where in the window that each rank of a direct dispatcher has (protocol.h says who may touch it when).
#pragma once

#include <atomic>

#include "ep/rows.h"

namespace tessera::ep {

/// A flag of one source rank, on a cache line of its own.
struct alignas(kAlignment) FlagWord {
  std::atomic<std::uint64_t> epoch;  // zeroed memory: no call yet
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// A copy of a token for the experts of one rank: its first row there holds the numbers.
struct CopyRecord {
  std::int32_t token;  // on its own rank
  std::int32_t place;  // which of the token's copies it is, in the order of ranks
  std::int32_t num_rows;
};
/// Follows the record, per row, in the order of k.
struct CopyChoice {
  std::int32_t row, k;
  float weight;
};

class DirectWindow {
 public:
  /// max_rows: R of the largest T and alignment.
  DirectWindow(int num_ranks, const DispatchOptions& options, std::int64_t max_rows);

  std::size_t num_bytes() const { return num_bytes_; }
  /// Together with all ranks of the group.
  void allocate(ProcessGroup& group) { window_ = group.allocate_window(num_bytes_); }

  // On `rank`'s side; the tensors are on Device::kMeta before allocate().
  std::atomic<std::uint64_t>& flag(int rank, Flag flag, int source) const;
  Tensor counts_PE(int rank) const;     // int32
  Tensor num_copies_P(int rank) const;  // int32: per source
  /// The i-th copy from `source`; its choices follow.
  CopyRecord* copy(int rank, int source, std::int64_t i) const;
  static CopyChoice* choices(CopyRecord* copy) { return reinterpret_cast<CopyChoice*>(copy + 1); }
  /// Where rows of a dispatch come in.
  Payload rows(int rank) const;
  Payload gradients(int rank) const;
  /// [max_tokens · J, D]: the sum of a token's rows on the j-th of its ranks, at token · J + j.
  Tensor sums(int rank) const;
  Tensor d_weights_TK(int rank) const;  // float32

 private:
  std::byte* at(int rank, std::size_t offset) const { return window_->peer(rank) + offset; }
  Tensor tensor(int rank, std::size_t offset, const Shape& shape, DType dtype) const;
  Payload payload(int rank, std::size_t offset, PayloadPrecision precision) const;

  DispatchOptions options_;
  std::int64_t num_ranks_, max_rows_, max_ranks_of_token_;
  std::size_t copy_bytes_;
  // Offsets, and their end.
  std::size_t flags_, counts_, num_copies_, copies_, rows_, gradients_, sums_, d_weights_, num_bytes_ = 0;
  std::unique_ptr<SymmetricWindow> window_;
};

}  // namespace tessera::ep
