// Collective operations among the ranks of one axis of the mesh (or of several axes together).
//
// An operation starts at once and runs while the rank computes. Work::wait() waits until it is complete. The ranks of a
// group must start the same operations in the same order. A rank's groups are independent of each other. Tensors must
// be contiguous, and must not be touched before wait() has returned. `name` says what moves ("layers.3"), for messages
// about ranks that hang. Sums of tensors add the ranks' numbers in the order of the ranks, in float32, and round once.
// Sums of the host's numbers go along a tree, in float64. So results depend only on the numbers and the size of the
// group.
//
// In a group of one rank an operation copies, adds (reduce_scatter with Write::kAccumulate) or does nothing, and is
// complete when it returns. Such a group has no GPUs: of tensors in GPU memory it takes only those of all_reduce() and
// broadcast(). An operation on tensors without numbers (Device::kMeta) moves nothing. It is noted in the record of the
// step, if there is one.
//
// Tensors in GPU memory move through NCCL once use_gpu() has connected the ranks' GPUs. An operation begins when the
// computation's stream has produced its operands. Work that is put on that stream after wait() runs when the operation
// is complete. For experts' traffic, that is the stream of the dispatcher's calls. The host does not wait. NCCL chooses
// the order of a sum, and rounds bfloat16 between the ranks, except in reduce_scatter_as_bfloat16().
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <string_view>

#include "comm/gpu_group.h"
#include "comm/progress.h"
#include "tensor/step_record.h"
#include "tensor/tensor.h"

namespace tessera {

/// Describes an operation that was started. It must be waited for before it is destroyed, unless an exception is being
/// thrown.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Progress& progress, std::shared_ptr<Operation> operation)
      : progress_(&progress), operation_(std::move(operation)) {}
  /// Makes the work of a GPU operation that is complete at `end`. wait() makes `computation` wait for it.
  Work(const cuda::Stream& computation, cuda::Fence end) : computation_(&computation), end_(std::move(end)) {}
  /// Makes the work of a transfer that is only recorded.
  Work(StepRecord& record, std::size_t idx) : record_(&record), recorded_(idx) {}
  Work(Work&& other) noexcept { static_cast<void>(*this = std::move(other)); }
  Work& operator=(Work&& other) noexcept;
  ~Work();

  /// Throws RankFailure if another rank has died, or does not take part within the timeout.
  void wait();
  /// Returns whether wait() would return at once. The operation must be one on CPUs.
  bool done() { return operation_ == nullptr || progress_->done(*operation_); }

 private:
  Progress* progress_ = nullptr;
  std::shared_ptr<Operation> operation_;  // null: the operation is complete
  const cuda::Stream* computation_ = nullptr;
  cuda::Fence end_;
  StepRecord* record_ = nullptr;
  std::size_t recorded_ = 0;
};

class ProcessGroup {
 public:
  /// Makes a group of one rank.
  ProcessGroup() = default;
  /// `axis` is the group's name in messages ("dp_shard").
  ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis);
  /// Makes a group of ranks that do not exist. It is enough for measuring. Operations on tensors that have numbers fail
  /// a check.
  static ProcessGroup planned(int rank, int size, std::string axis);

  int rank() const { return transport_ == nullptr ? 0 : transport_->rank(); }
  int size() const { return transport_ == nullptr ? 1 : transport_->size(); }
  const std::string& axis() const { return axis_; }
  /// Notes operations on tensors without numbers in `record` from here on, or no longer if it is null.
  void set_record(StepRecord* record) { step_record_ = record; }

  /// Gathers the tensors `in` [n] of all ranks into out [size · n], in the order of ranks. `in` may be this rank's part
  /// of `out`.
  Work all_gather(const Tensor& in, const Tensor& out, std::string_view name);
  /// Sums in [size · n] over ranks and assigns or adds this rank's part of the sum to out [n]. The contents of `in` are
  /// undefined afterwards. Both are float32, or both bfloat16. `out` must not be a part of `in`. On GPUs, with
  /// Write::kAccumulate, `in` and `out` begin at multiples of 16 bytes, and the size of `out` is a multiple of 16
  /// bytes.
  Work reduce_scatter(const Tensor& in, const Tensor& out, Write write, std::string_view name);
  /// Sums float32 numbers as reduce_scatter() does, but sends half of the bytes. Each rank rounds all its numbers to
  /// bfloat16, its own part of the sum as well, so a sum does not depend on the rank that makes it. The rank of a part
  /// adds the rounded numbers in float32, in the order of the ranks, also on GPUs. There, n must be a multiple of 8.
  /// Needs no memory besides `in`. In a group of one rank nothing is rounded.
  Work reduce_scatter_as_bfloat16(const Tensor& in, const Tensor& out, Write write, std::string_view name);
  /// Replaces x by the sum of all ranks' x. x is float32 or bfloat16. On GPUs it may also be float64.
  Work all_reduce(const Tensor& x, std::string_view name);
  /// Sends part r of in [size · n] to rank r. Part r of out [size · n] is received from rank r.
  Work all_to_all(const Tensor& in, const Tensor& out, std::string_view name);
  /// Makes an all-to-all with varying numbers of rows of the first dim. It sends in_rows[r] rows to rank r, and
  /// receives out_rows[r] rows from it.
  Work all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                    std::span<const std::int64_t> out_rows, std::string_view name);
  /// Makes an all-to-all whose numbers of rows are tensors on the same device as `in`. `in` and `out` have equal parts,
  /// one per rank. The first num_sent_P[r] rows of part r of `in` go to the beginning of this rank's part of rank r's
  /// `out`. num_received_P[r] must be the number of rows that rank r sends here. Both are int32, [size]. CPUs send no
  /// other rows, and neither do GPUs after open_counted(), if NCCL lets kernels send between them. Other GPUs send
  /// whole parts.
  Work all_to_all_counted(const Tensor& in, const Tensor& num_sent_P, const Tensor& out, const Tensor& num_received_P,
                          std::string_view name);
  /// Takes memory on a GPU for all_to_all_counted() of tensors of up to `num_bytes`: twice the parts of the other
  /// ranks. All ranks must call it together, before the first such operation. Does nothing on CPUs.
  void open_counted(std::size_t num_bytes);
  /// Gives the memory back. All ranks must call it together. Graphs that have recorded such an operation must not run
  /// any more.
  void close_counted();
  /// Copies x of rank `root` to x of all ranks.
  Work broadcast(const Tensor& x, int root, std::string_view name);
  /// The largest tag of a message. Tags begin at 0. Messages with the same tag arrive in the order in which they were
  /// sent.
  static constexpr int kMaxTag = (1 << 14) - 1;
  /// Sends x to rank `to`, which must receive a tensor of as many bytes with the same tag. Between GPUs, open_links()
  /// must have been called for the tag.
  Work send(const Tensor& x, int to, int tag, std::string_view name);
  Work receive(const Tensor& x, int from, int tag, std::string_view name);
  /// Names the two ranks between which the messages of one tag go.
  struct Link {
    int from, to, tag;
  };
  /// Opens the links through which tensors on GPUs are sent with these tags. Each tag has one link. Must be called
  /// before such sends. A message waits only for messages of its own tag, so tags may be used in any order. All ranks
  /// must call it with the same links. Does nothing on CPUs.
  void open_links(std::span<const Link> links);
  /// Returns the number of SMs that operators should leave to this rank's links.
  int sms_of_links() const { return static_cast<int>(links_.size()) * cuda::GpuGroup::kSmsOfLink; }

  /// Sums a few numbers of the host over ranks, such as losses or counts, along a tree (comm/tree_operations.h). It
  /// blocks.
  void all_reduce(std::span<double> x, std::string_view name);
  /// Returns all ranks' numbers, rank by rank. It blocks.
  std::vector<double> all_gather(std::span<const double> x, std::string_view name);
  /// Returns when all ranks have called it.
  void barrier(std::string_view name);

  /// Makes this group, and groups that are split from it later, communicate tensors in the memory of the calling
  /// thread's GPU. Each rank has one GPU. `computation` is the stream that produces and reads these tensors, and
  /// `calls` is that of experts' traffic. Both must outlive the groups. All ranks must call it together.
  void use_gpu(const cuda::Stream& computation, const cuda::Stream& calls);
  /// Waits until the GPU has passed `event`. Throws RankFailure, after aborting the GPU's operations, if another rank
  /// has died or the GPU makes no progress within the timeout. Progress means that an operation between ranks begins or
  /// ends, or that the GPU passes a mark. `check` throws errors that the GPU's kernels have detected themselves.
  void wait_for_gpu(const cuda::Event& event, std::string_view name, const std::function<void()>& check = {});
  /// Puts a mark on the computation's stream, to show progress in work that no operation between ranks interrupts.
  void mark_gpu() const {
    if (gpu_ != nullptr) gpu_->mark();
  }
  /// Ends the run after a failure, if there is a GPU. It calls the failure handler (Progress), because destroying
  /// objects would wait for the GPU, and the GPU waits for other ranks. If none is set, as in tests, it aborts what the
  /// GPU does for the groups of this world. The GPU must not run a recorded graph then, because NCCL waits for graphs.
  void abort_gpu(const std::exception& error) noexcept;

  /// Returns the group of the ranks with the same color, sorted by `order`. All ranks of this group must call it
  /// together.
  ProcessGroup split(int color, int order, std::string axis, Traffic traffic = Traffic::kWeights);
  /// Allocates memory that the ranks of this group share. It is GPU memory if the group uses GPUs. All its ranks must
  /// call it together.
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes);
  /// Returns the result of Transport::window_room(), which is about windows on CPUs.
  std::optional<WindowRoom> window_room() const {
    return transport_ == nullptr ? std::nullopt : transport_->window_room();
  }
  /// Waits until over() is true, which the stores of rank `peer` into a window cause. Throws RankFailure as
  /// Work::wait() does. The error's message ends with the text that missing() returns.
  void wait_until(std::string_view operation, std::string_view name, int peer, const std::function<bool()>& over,
                  const std::function<std::string()>& missing);
  /// Returns the timeout of every wait for other ranks.
  Progress::Seconds timeout() const;
  /// Throws the error of wait_until() at the timeout, for a wait in which the GPU has timed out.
  [[noreturn]] void fail_late(std::string_view operation, std::string_view name, const std::string& missing) const;

 private:
  ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis, std::uint64_t id);

  std::string title(std::string_view operation, std::string_view name) const;
  int next_tag();
  /// Returns the rank in the world. It is -1 while the group does not know it.
  int world_rank(int rank) const;
  /// Notes an operation that moves nothing. `num_bytes` is RecordedTransfer::bytes.
  Work note(const char* kind, std::size_t num_bytes) const;
  /// Records an event in the flight recorder.
  std::uint64_t record(const FlightRecorder::NewEvent& event) const;
  Work start(std::shared_ptr<Operation> operation, const FlightRecorder::NewEvent& event);
  /// Starts to sum numbers of type `sent` in memory of the CPU, into this rank's part, `out`.
  Work start_reduce_scatter(std::span<std::byte> in, DType sent, const Tensor& out, Write write, std::string_view name);
  /// Starts an all-to-all on CPUs, of the bytes for each rank and of it.
  Work start_all_to_all(const std::vector<std::span<std::byte>>& in_P, const std::vector<std::span<std::byte>>& out_P,
                        std::size_t num_bytes, std::string_view name);
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
  std::map<int, OpenLink> links_;  // links from or to this rank, by tag
  Progress* progress_ = nullptr;
  StepRecord* step_record_ = nullptr;
  std::string axis_;
  int num_collectives_ = 0;
  std::uint64_t id_ = 0;  // the same on all ranks of the group, and different for all other groups
  std::uint64_t num_splits_ = 0;
  std::shared_ptr<const std::vector<int>> world_ranks_;  // world rank of each rank of the group
  std::uint16_t flight_group_ = FlightRecorder::kNoGroup;
};

}  // namespace tessera
