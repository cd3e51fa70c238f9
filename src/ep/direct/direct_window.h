// What lies where in the window that each rank of a direct dispatcher has (protocol.h says who may touch it when), and
// what the dispatchers of CPUs and of GPUs have in common.
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

  std::byte* base(int rank) const { return window_->peer(rank); }
  std::byte* flags(int rank) const { return at(rank, flags_); }
  // On `rank`'s side; the tensors are on Device::kMeta before allocate().
  std::atomic<std::uint64_t>& flag(int rank, Flag flag, int source) const;
  /// int32. On GPUs those of even epochs; those of odd ones lie right behind them.
  Tensor counts_PE(int rank) const;
  // On CPUs:
  Tensor num_copies_P(int rank) const;  // int32: per source
  /// The i-th copy from `source`; its choices follow.
  CopyRecord* copy(int rank, int source, std::int64_t i) const;
  static CopyChoice* choices(CopyRecord* copy) { return reinterpret_cast<CopyChoice*>(copy + 1); }
  // On GPUs, of the tokens of each source (direct_kernels.h); with fewer tokens than there is room for, the first T of
  // all P · t:
  Tensor place_Pt(int rank) const;    // int32
  Tensor choice_PtK(int rank) const;  // [.., 2]: of 4 bytes each
  /// Where rows of a dispatch come in.
  Payload rows(int rank) const;
  Payload gradients(int rank) const;
  /// [max_tokens · J, D]: the sum of a token's rows on the j-th of its ranks, at token · J + j.
  Tensor sums(int rank) const;
  Tensor d_weights_tK(int rank) const;  // float32

 private:
  std::byte* at(int rank, std::size_t offset) const { return window_->peer(rank) + offset; }
  Tensor tensor(int rank, std::size_t offset, const Shape& shape, DType dtype) const;
  Payload payload(int rank, std::size_t offset, PayloadPrecision precision) const;

  DispatchOptions options_;
  std::int64_t num_ranks_, max_rows_, max_ranks_of_token_;
  std::size_t copy_bytes_;
  // Offsets, and their end.
  std::size_t flags_, counts_, num_copies_ = 0, copies_ = 0, places_ = 0, choices_ = 0, rows_, gradients_, sums_,
                               d_weights_, num_bytes_ = 0;
  std::unique_ptr<SymmetricWindow> window_;
};

/// A dispatcher of windows.
class WindowDispatcher : public Dispatcher {
 public:
  std::size_t window_bytes() const override { return window_.num_bytes(); }
  void allocate() override { window_.allocate(group_); }
  Tensor rows_in_window(const Context& op, const DispatchSaved& saved) const override;
  Tensor gradients_in_window(const Context& op, const DispatchSaved& saved) const override;

 protected:
  WindowDispatcher(const DispatchOptions& options, ProcessGroup& group);

  /// Rows, gradients: of this call's size, on `rank`'s side.
  Payload rows_of(int rank, Buffer buffer, const DispatchSaved& saved) const;
  /// The end of a message about a flag that does not come.
  std::string missing(Flag flag, int source, std::uint64_t expected, std::uint64_t seen) const;

  ProcessGroup& group_;
  DirectWindow window_;
  std::int64_t max_ranks_of_token_;  // J

 private:
  Tensor in_window(const Context& op, Buffer buffer, const DispatchSaved& saved) const;
};

}  // namespace tessera::ep
