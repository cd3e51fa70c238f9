// What the dispatchers that the host drives by collectives have in common: they bring numbers to the host, and compute
// from all ranks' counts where rows go.
#pragma once

#include <span>
#include <vector>

#include "device/cuda.h"
#include "ep/dispatcher.h"

namespace tessera::ep {

using Ints = std::vector<std::int32_t>;

/// Returns a view of `numbers`, which must outlive it.
Tensor tensor_of(Ints& numbers, const Shape& shape);
/// Returns the numbers of x (int32), which may be on any device. Waits for a GPU's.
Ints fetch(const Context& op, const Tensor& x);
/// Assigns `numbers` to the first numbers of x (int32), which may be on any device.
void put(const Context& op, std::span<const std::int32_t> numbers, const Tensor& x);

/// Brings a few numbers of operators to the host, while the GPU goes on.
class HostNumbers {
 public:
  /// Enqueues a copy of x (int32) to the host. The numbers of the copy before become invalid.
  void start(const Context& op, const Tensor& x);
  /// Waits for the copy. Returns its numbers, which are valid until the next start.
  std::span<const std::int32_t> wait(const Context& op);

 private:
  ::tessera::Buffer memory_;  // pinned with a GPU
  std::size_t size_ = 0;
  cuda::Event copied_;
};

/// Returns all ranks' counts [P, E] on the device, in scratch memory. All ranks must call it together. Every rank sends
/// its counts to each: on a GPU this has fewer steps than NCCL's all-gather. Ranks that share a GPU can do it, too
/// (docs/cuda.md).
Tensor gather_counts(const Context& op, ProcessGroup& group, const DispatchSaved& saved);

/// Holds a placement (ep/placement.h) that is cut to a round, and the counts that it is computed from.
struct HostPlacement {
  Ints counts_PE, first_row_PE, offsets_Pe1;
};
/// Gathers all ranks' counts and places the rows of the round. Assigns the number of rounds. All ranks must call it
/// together.
HostPlacement gather_placement(const Context& op, ProcessGroup& group, const DispatchSaved& saved);

/// Replaces, by kNoExpert, the ids of a rank's choices whose rows are not of the round. Returns the choices per expert
/// that stay. first_row_E is that of the rank's rows, cut to the round.
Ints keep_round(std::span<const std::int32_t> first_row_E, std::int64_t room, std::span<std::int32_t> expert_ids_tK);

}  // namespace tessera::ep
