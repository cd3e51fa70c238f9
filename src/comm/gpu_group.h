// The ranks of a group, each with a GPU of its own, and the operations between them that NCCL makes: what a
// ProcessGroup does with tensors in GPUs' memory.
//
// Each group has a stream. An operation is put on it behind all that the computation has by then on its own stream, and
// the host goes on; the fence that it returns is behind its end. All of it can be recorded as a part of a graph.
//
// The GPU writes into memory of the host which operation it has come to, so that describe() can tell in which one it
// hangs, also of a graph that is replayed.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>

#include "comm/progress.h"
#include "comm/transport.h"
#include "device/cuda.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

class GpuGroup {
 public:
  /// What brings ranks together: made by one of them, given to all.
  using Id = std::array<std::byte, 128>;
  static Id make_id();

  /// Connects the GPUs of a group. All its ranks must call it together. `computation` and `progress` must outlive the
  /// group; `progress` watches every call of NCCL that waits for other ranks. Throws Error if NCCL is missing, too old,
  /// or cannot connect the GPUs.
  GpuGroup(const Id& id, int rank, int size, const Stream& computation, Progress& progress);
  ~GpuGroup();
  GpuGroup(const GpuGroup&) = delete;
  GpuGroup& operator=(const GpuGroup&) = delete;

  /// Splits the group: ranks of the same color form a new one, in the order of `order`. All ranks must call it
  /// together. Returns null for `size` 1.
  std::unique_ptr<GpuGroup> split(int color, int order, int size) const;
  /// Two of the ranks, rank 0 and 1 of the new group. Of groups that were split from each other NCCL runs one operation
  /// at a time; this one's neither wait for theirs nor keep them waiting. Together with the other rank.
  std::unique_ptr<GpuGroup> link(const Id& id, int rank) const;
  /// What other kernels should leave to a link: its operation stays on an SM until the other rank has come.
  static constexpr int kSmsOfLink = 1;

  // The operations of process_group.h. `title` says what moves between whom.
  Fence all_gather(const Tensor& in, const Tensor& out, const std::string& title);
  Fence reduce_scatter(const Tensor& in, const Tensor& out, Write write, const std::string& title);
  Fence all_reduce(const Tensor& x, const std::string& title);
  Fence all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                     std::span<const std::int64_t> out_rows, std::size_t row_bytes, const std::string& title);
  Fence broadcast(const Tensor& x, int root, const std::string& title);
  Fence send(const Tensor& x, int to, const std::string& title);
  Fence receive(const Tensor& x, int from, const std::string& title);

  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes);

  const Stream& computation() const;

  /// Throws Error for what NCCL has found out since. Of all groups that were split from the same one.
  void check() const;
  /// The operations of all these groups that have begun and not ended: "; the GPU is in all-gather of layers.3
  /// (dp_shard)". Empty if there are none.
  std::string describe() const;
  /// Grows whenever one of them begins or ends, and when the computation comes by a mark.
  std::uint64_t position() const;
  /// Puts a mark on the computation's stream.
  void mark() const;
  /// Ends all operations of all these groups, which are of no use any more.
  void abort() noexcept;

 private:
  struct Family;
  struct Member;
  GpuGroup(std::shared_ptr<Family> family, void* communicator, int rank, int size);

  template <typename Put>
  Fence put(const std::string& title, Put&& put_operation);

  std::shared_ptr<Family> family_;
  std::unique_ptr<Member> member_;
};

}  // namespace tessera::cuda
