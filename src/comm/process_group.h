// Collective operations among the ranks of one axis of the mesh (or several axes together).
//
// Every operation is started at once and goes on behind the computation; Work::wait() is where it must be complete.
// The ranks of a group must start the same operations in the same order; a rank's groups are independent of each other.
// Tensors are contiguous, and untouched until the wait. `name` says what moves ("layers.3"), for messages about ranks
// that hang. Sums add the ranks' numbers in the order of the ranks, in float32, and round once: results depend on the
// numbers and the group's size only.
//
// In a group of one rank an operation is a copy, or nothing, and is complete when it returns.
//
// Tensors in GPUs' memory move by NCCL, once the group has been told of its ranks' GPUs (use_gpu): an operation begins
// when the computation's stream has made its operands, and what is put on that stream after wait() runs when it is
// complete; the host waits for nothing. NCCL chooses the order of a sum, and rounds bfloat16 between the ranks.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <string_view>

#include "comm/gpu_group.h"
#include "comm/progress.h"
#include "tensor/tensor.h"

namespace tessera {

/// An operation that was started. Must be waited for before it goes, unless an exception is on its way.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Progress& progress, std::shared_ptr<Operation> operation)
      : progress_(&progress), operation_(std::move(operation)) {}
  /// Makes a GPU's work, which is complete at `end`. wait() has `computation` wait for it.
  Work(const cuda::Stream& computation, cuda::Fence end) : computation_(&computation), end_(std::move(end)) {}
  Work(Work&& other) noexcept { static_cast<void>(*this = std::move(other)); }
  Work& operator=(Work&& other) noexcept;
  ~Work();

  /// Throws RankFailure if another rank has died, or does not come within the timeout.
  void wait();
  /// True if wait() would return at once. Of operations on CPUs.
  bool done() { return operation_ == nullptr || progress_->done(*operation_); }

 private:
  Progress* progress_ = nullptr;
  std::shared_ptr<Operation> operation_;  // null: complete
  const cuda::Stream* computation_ = nullptr;
  cuda::Fence end_;
};

class ProcessGroup {
 public:
  /// Makes a group of one rank.
  ProcessGroup() = default;
  /// `axis` is the group's name in messages ("dp_shard").
  ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis);
  /// Makes a group of ranks that do not exist. One can measure with it, but every operation fails a check.
  static ProcessGroup planned(int rank, int size, std::string axis);

  int rank() const { return transport_ == nullptr ? 0 : transport_->rank(); }
  int size() const { return transport_ == nullptr ? 1 : transport_->size(); }
  const std::string& axis() const { return axis_; }

  /// Gathers the ranks' in [n] into out [size · n], in the order of ranks. `in` may be this rank's part of `out`.
  Work all_gather(const Tensor& in, const Tensor& out, std::string_view name);
  /// Assigns or adds to out [n] the sum over ranks of this rank's part of their in [size · n], whose contents are
  /// undefined afterwards. Both are float32, or both bfloat16. `out` must not be a part of `in`.
  Work reduce_scatter(const Tensor& in, const Tensor& out, Write write, std::string_view name);
  /// Replaces x by the sum of the ranks' x. Float32 or bfloat16; on GPUs also float64.
  Work all_reduce(const Tensor& x, std::string_view name);
  /// Sends part r of in [size · n] to rank r. Part r of out [size · n] comes from there.
  Work all_to_all(const Tensor& in, const Tensor& out, std::string_view name);
  /// The same with rows of the first dim: in_rows[r] of them go to rank r, and out_rows[r] come from it.
  Work all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                    std::span<const std::int64_t> out_rows, std::string_view name);
  Work broadcast(const Tensor& x, int root, std::string_view name);
  /// Messages with one `tag`, in [0, kMaxTag], arrive in the order in which they were sent.
  static constexpr int kMaxTag = (1 << 14) - 1;
  Work send(const Tensor& x, int to, int tag, std::string_view name);
  Work receive(const Tensor& x, int from, int tag, std::string_view name);
  /// The ranks between which messages of one tag go.
  struct Link {
    int from, to, tag;
  };
  /// Must be called before tensors on GPUs are sent with these tags, each of which has one link. A message waits only
  /// for those of its tag, so tags may be used in any order. All ranks must call it with the same links. Does nothing
  /// on CPUs.
  void open_links(std::span<const Link> links);
  /// Returns the SMs that operators should leave to this rank's links. Of many links, few wait at once.
  int sms_of_links() const {
    constexpr std::size_t kMostThatWait = 4;
    return static_cast<int>(std::min(links_.size(), kMostThatWait)) * cuda::GpuGroup::kSmsOfLink;
  }

  /// Sums a few numbers of the host over ranks: losses, counts. Blocks.
  void all_reduce(std::span<double> x, std::string_view name);
  /// Returns all ranks' numbers, rank by rank. Blocks.
  std::vector<double> all_gather(std::span<const double> x, std::string_view name);
  /// Returns when all ranks have called it.
  void barrier(std::string_view name);

  /// From now on this group, and those that are split from it, move what lies in the GPU that the calling thread uses,
  /// one per rank. `computation` is the stream of what makes and reads it; it must stay. Together with all ranks.
  void use_gpu(const cuda::Stream& computation);
  /// Until the GPU has passed `event`. Throws RankFailure, having ended what the GPU hangs in, if another rank has died
  /// or the GPU does not get on within the timeout: no operation between ranks begins or ends, and it comes by no mark.
  /// `check` throws what the GPU has found out by itself.
  void wait_for_gpu(const cuda::Event& event, std::string_view name, const std::function<void()>& check = {});
  /// Puts a mark on the computation's stream: of work that no operation between ranks interrupts.
  void mark_gpu() const {
    if (gpu_ != nullptr) gpu_->mark();
  }
  /// After a failure, if there is a GPU: takes the way out (Progress), for what is freed behind it would wait for the
  /// GPU, and that for other ranks. Where there is none, as in tests, ends what the GPU does for the groups of this
  /// world; it must not be a recorded graph, which NCCL waits for.
  void abort_gpu(const std::exception& error) noexcept;

  /// The ranks with the same color, in the order of `order`, as a group. Together with all ranks of this one.
  ProcessGroup split(int color, int order, std::string axis);
  /// Memory that the ranks of this group share: the GPUs', if they use any. Together with all of them.
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes);
  /// Returns what Transport::window_room() does, for windows on CPUs.
  std::optional<WindowRoom> window_room() const {
    return transport_ == nullptr ? std::nullopt : transport_->window_room();
  }
  /// Until over() is true, which the stores of rank `peer` into a window make it. Throws RankFailure as Work::wait()
  /// does; its message ends in what missing() tells.
  void wait_until(std::string_view operation, std::string_view name, int peer, const std::function<bool()>& over,
                  const std::function<std::string()>& missing);
  /// Returns the timeout of every wait for other ranks.
  Progress::Seconds timeout() const;
  /// Throws what wait_until() throws at the timeout, for a wait of the GPU's.
  [[noreturn]] void fail_late(std::string_view operation, std::string_view name, const std::string& missing) const;

 private:
  ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis, std::uint64_t id);

  std::string title(std::string_view operation, std::string_view name) const;
  int next_tag();
  /// -1 while the group does not know it.
  int world_rank(int rank) const;
  /// Tells the flight recorder.
  std::uint64_t record(const FlightRecorder::NewEvent& event) const;
  Work start(std::shared_ptr<Operation> operation, const FlightRecorder::NewEvent& event);
  bool on_gpu(const Tensor& x) const;
  struct OpenLink {
    int peer;
    bool sends;
    std::unique_ptr<cuda::GpuGroup> gpu;
  };
  cuda::GpuGroup& link_of(int tag, int peer, bool sends) const;
  Work work_of(cuda::Fence end) const { return {gpu_->computation(), std::move(end)}; }

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<cuda::GpuGroup> gpu_;
  std::map<int, OpenLink> links_;  // by tag: those from or to this rank
  Progress* progress_ = nullptr;
  std::string axis_;
  int num_collectives_ = 0;
  std::uint64_t id_ = 0;  // the same on all ranks of the group; no other group has it
  std::uint64_t num_splits_ = 0;
  std::shared_ptr<const std::vector<int>> world_ranks_;  // of the group's ranks
  std::uint16_t flight_group_ = FlightRecorder::kNoGroup;
};

}  // namespace tessera
