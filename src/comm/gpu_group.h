// The ranks of a group, each with its own GPU, and the NCCL operations between them. A ProcessGroup uses a GpuGroup for
// tensors in GPU memory.
//
// An operation runs on a stream of its kind of traffic or of its link. It starts after all work that is on the
// computation's stream at the time of the call. For experts' traffic this is the stream of the dispatcher's calls. The
// host does not wait. The returned fence marks the operation's end. A graph can record all of this.
//
// The GPU writes into host memory which operation it has reached. So describe() can say in which operation the GPU
// hangs, also in a replayed graph.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "comm/progress.h"
#include "comm/transport/transport.h"
#include "device/cuda.h"
#include "tensor/tensor.h"

namespace tessera {

/// What a group moves. Operations of one kind of traffic run one at a time on a GPU. Those of different kinds do not
/// wait for each other. So an exchange that the computation waits for does not queue behind a layer's weights.
enum class Traffic {
  kWeights,      // weights, their gradients, and all that is not below
  kActivations,  // between the ranks that share a sequence
  kExperts       // between the ranks of an expert-parallel group
};

}  // namespace tessera

namespace tessera::cuda {

class GpuGroup {
 public:
  /// Identifies a group while its ranks connect. One rank makes the id and gives it to all.
  using Id = std::array<std::byte, 128>;
  static Id make_id();

  /// Connects the GPUs of a group. All its ranks must call it together. `computation`, `calls` and `progress` must
  /// outlive the group. `calls` is the stream of the operators of experts' traffic. `progress` watches every NCCL call
  /// that waits for other ranks. Throws Error if NCCL is missing, too old, or cannot connect the GPUs.
  GpuGroup(const Id& id, int rank, int size, const Stream& computation, const Stream& calls, Progress& progress);
  ~GpuGroup();
  GpuGroup(const GpuGroup&) = delete;
  GpuGroup& operator=(const GpuGroup&) = delete;

  /// Splits the group. Ranks with the same color form a new group, sorted by `order`. All ranks must call it together.
  /// Returns null if `size` is 1. Groups of one kind of traffic share a stream. Only those of weights share
  /// NCCL's resources.
  std::unique_ptr<GpuGroup> split(int color, int order, int size, Traffic traffic);
  /// Makes a group of two of the ranks, which become ranks 0 and 1. Both must call it together. A link's operations
  /// neither wait for other groups' nor delay them.
  std::unique_ptr<GpuGroup> link(const Id& id, int rank) const;
  /// The number of SMs that other kernels should leave to a link. Its operation occupies an SM until the other rank
  /// arrives.
  static constexpr int kSmsOfLink = 1;

  // The functions below are the operations of process_group.h. `title` says what moves between which ranks.
  Fence all_gather(const Tensor& in, const Tensor& out, const std::string& title);
  Fence reduce_scatter(const Tensor& in, const Tensor& out, Write write, const std::string& title);
  Fence reduce_scatter_as_bfloat16(const Tensor& in, const Tensor& out, Write write, const std::string& title);
  Fence all_reduce(const Tensor& x, const std::string& title);
  Fence all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                     std::span<const std::int64_t> out_rows, std::size_t row_bytes, const std::string& title);
  Fence all_to_all_counted(const Tensor& in, const Tensor& num_sent_P, const Tensor& out, const Tensor& num_received_P,
                           const std::string& title);
  Fence broadcast(const Tensor& x, int root, const std::string& title);
  Fence send(const Tensor& x, int to, const std::string& title);
  Fence receive(const Tensor& x, int from, const std::string& title);

  /// Prepares all_to_all_counted() for tensors of up to `num_bytes`. It allocates two buffers for the other ranks'
  /// parts, (size - 1) / size of that each. All ranks must call it together, before the first such operation, and not
  /// while it is open. Returns whether NCCL can do it here. If any rank gets false, all ranks must call
  /// close_counted().
  bool open_counted(std::size_t num_bytes);
  void close_counted() { counted_ = nullptr; }
  bool is_open_for_counted() const;
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes);

  /// Returns the stream of the operators that produce and read what this group moves.
  const Stream& computation() const;

  /// Throws Error if NCCL has found an error in any of the groups that were split from the same one.
  void check() const;
  /// Returns the operations of all these groups that have begun and not ended: "; the GPU is in all-gather of layers.3
  /// (dp_shard)". Returns an empty string if there are none.
  std::string describe() const;
  /// Returns a number that grows when an operation of these groups begins or ends, and when the computation passes a
  /// mark.
  std::uint64_t position() const;
  /// Puts a mark on the computation's stream.
  void mark() const;
  /// Aborts all operations of all these groups. The groups cannot be used afterwards. An exchange of counted rows
  /// cannot be aborted, because NCCL's kernels wait for signals without end. The process must end then.
  void abort() noexcept;

 private:
  struct Family;
  struct Member;
  GpuGroup(std::shared_ptr<Family> family, void* communicator, int rank, int size, Traffic traffic,
           std::shared_ptr<const Stream> stream);

  std::unique_ptr<GpuGroup> split_communicator(int color, int order, int size, Traffic traffic,
                                               std::shared_ptr<const Stream> stream, bool shares) const;
  template <typename Put>
  Fence put(const std::string& title, Put&& put_operation);

  std::shared_ptr<Family> family_;
  std::unique_ptr<Member> member_;
  std::unique_ptr<GpuGroup> counted_;  // the same ranks, for all_to_all_counted
  // Groups of the same ranks, from which split() makes groups of other kinds of traffic than this one's.
  std::map<Traffic, std::unique_ptr<GpuGroup>> parents_;
};

}  // namespace tessera::cuda
