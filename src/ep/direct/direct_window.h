// The layout of the window that each rank of a direct dispatcher has, and what the dispatchers of CPUs and of GPUs
// share. protocol.h says who may touch a part of it, and when.
#pragma once

#include <atomic>

#include "ep/direct/protocol.h"
#include "ep/rows.h"

namespace tessera::ep {

/// Holds the flag of one source rank, on a cache line of its own.
struct alignas(kAlignment) FlagWord {
  std::atomic<std::uint64_t> epoch;  // 0: there was no call yet
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Describes a copy of a token for the experts of one rank. The token's numbers are in the copy's first row there.
struct CopyRecord {
  std::int32_t token;  // on its own rank
  std::int32_t place;  // which of the token's copies it is, in the order of ranks
  std::int32_t num_rows;
};
/// Describes one row of the copy. These entries follow the CopyRecord, in the order of k.
struct CopyChoice {
  std::int32_t row, k;
  float weight;
};

class DirectWindow {
 public:
  /// `max_rows` is R for the largest t and alignment.
  DirectWindow(int num_ranks, const DispatchOptions& options, std::int64_t max_rows);

  std::size_t num_bytes() const { return layout_.num_bytes; }
  /// Returns J, the most ranks that a token goes to.
  std::int64_t max_ranks_of_token() const { return max_ranks_of_token_; }
  /// Allocates the window. All ranks of the group must call it together.
  void allocate(ProcessGroup& group) { window_ = group.allocate_window(layout_.num_bytes); }

  std::byte* base(int rank) const { return window_->peer(rank); }
  std::byte* flags(int rank) const { return at(rank, layout_.flags); }
  // The functions below give parts of `rank`'s window. Before allocate() their tensors are on Device::kMeta.
  std::atomic<std::uint64_t>& flag(int rank, Flag flag, int source) const;
  /// Returns the counts of an epoch (int32). On GPUs this tensor is for even epochs. The one for odd epochs lies right
  /// behind it.
  Tensor counts_PE(int rank) const;
  // The next three functions are used on CPUs only.
  Tensor num_copies_P(int rank) const;  // int32, by source
  /// Returns the record of the i-th copy from `source`. Its choices follow it.
  CopyRecord* copy(int rank, int source, std::int64_t i) const;
  static CopyChoice* choices(CopyRecord* copy) { return reinterpret_cast<CopyChoice*>(copy + 1); }
  // The next two functions are used on GPUs only (direct_kernels.h). Their tensors have an entry per token of each
  // source. A call with fewer tokens than there is room for uses the first of all P · t entries.
  Tensor place_Pt(int rank) const;    // int32
  Tensor choice_PtK(int rank) const;  // [.., 2], of 4 bytes each
  /// Returns the buffer that receives the rows of a dispatch.
  Payload rows(int rank) const;
  Payload gradients(int rank) const;
  /// Returns the buffer of sums, [max_tokens · J, D]. The sum of a token's rows on the j-th of its ranks is at row
  /// token · J + j.
  Tensor sums(int rank) const;
  Tensor d_weights_tK(int rank) const;  // float32

 private:
  /// Says where each part begins, in bytes from the window's begin. All parts begin at multiples of kAlignment. Parts
  /// that this device does not use are at 0.
  struct Layout {
    std::size_t flags = 0, counts = 0;
    std::size_t num_copies = 0, copies = 0;  // on CPUs
    std::size_t places = 0, choices = 0;     // on GPUs
    std::size_t rows = 0, gradients = 0, sums = 0, d_weights = 0;
    std::size_t num_bytes = 0;  // of the whole window
  };
  Layout make_layout() const;

  std::byte* at(int rank, std::size_t offset) const { return window_->peer(rank) + offset; }
  Tensor tensor(int rank, std::size_t offset, const Shape& shape, DType dtype) const;
  Payload payload(int rank, std::size_t offset, PayloadPrecision precision) const;

  DispatchOptions options_;
  std::int64_t num_ranks_, max_rows_, max_ranks_of_token_;
  std::size_t copy_bytes_;
  Layout layout_;
  std::unique_ptr<SymmetricWindow> window_;
};

/// Holds what the direct dispatchers of CPUs and of GPUs share.
class WindowDispatcher : public Dispatcher {
 protected:
  WindowDispatcher(const DispatchOptions& options, ProcessGroup& group);

  std::size_t do_window_bytes() const override { return window_.num_bytes(); }
  void do_allocate() override { window_.allocate(group_); }

  /// Returns `buffer` (kRows or kGradients) of `rank`'s window, cut to this call's size.
  Payload rows_of(int rank, Buffer buffer, const DispatchSaved& saved) const;
  std::int64_t max_ranks_of_token() const { return window_.max_ranks_of_token(); }
  /// Returns the end of a message about a flag that has not come.
  std::string missing(Flag flag, int source, std::uint64_t expected, std::uint64_t seen) const;

  ProcessGroup& group_;
  DirectWindow window_;

 private:
  Tensor do_rows_in_window(const Context& op, const DispatchSaved& saved) const override;
  Tensor do_gradients_in_window(const Context& op, const DispatchSaved& saved) const override;
  Tensor in_window(const Context& op, Buffer buffer, const DispatchSaved& saved) const;
};

}  // namespace tessera::ep
