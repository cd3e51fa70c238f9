// Collective operations among the ranks of one axis of the mesh (or several axes together).
//
// Every operation is started at once and goes on behind the computation; Work::wait() is where it must be complete.
// The ranks of a group must start the same operations in the same order; a rank's groups are independent of each other.
// Tensors are contiguous, and untouched until the wait. `name` says what moves ("layers.3"), for messages about ranks
// that hang. Sums add the ranks' numbers in the order of the ranks, in float32, and round once: results depend on the
// numbers and the group's size only.
//
// In a group of one rank an operation is a copy, or nothing, and is complete when it returns.
#pragma once

#include <span>
#include <string_view>

#include "comm/progress.h"
#include "tensor/tensor.h"

namespace tessera {

/// An operation that was started. Must be waited for before it goes, unless an exception is on its way.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Progress& progress, std::shared_ptr<Operation> operation)
      : progress_(&progress), operation_(std::move(operation)) {}
  Work(Work&& other) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  ~Work();

  /// Throws RankFailure if another rank has died, or does not come within the timeout.
  void wait();

 private:
  Progress* progress_ = nullptr;
  std::shared_ptr<Operation> operation_;  // null: complete
};

class ProcessGroup {
 public:
  /// A group of one rank.
  ProcessGroup() = default;
  /// `axis`: its name in messages ("dp_shard").
  ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis);

  int rank() const { return transport_ == nullptr ? 0 : transport_->rank(); }
  int size() const { return transport_ == nullptr ? 1 : transport_->size(); }
  const std::string& axis() const { return axis_; }

  /// out [size · n] = the ranks' in [n], one behind the other. `in` may be this rank's part of `out`.
  Work all_gather(const Tensor& in, const Tensor& out, std::string_view name);
  /// out [n] (= or +=) the sum over the ranks of this rank's part of their in [size · n]. Float32, or bfloat16 for
  /// both; `out` is no part of `in`.
  Work reduce_scatter(const Tensor& in, const Tensor& out, Write write, std::string_view name);
  /// x = the sum of the ranks' x. Float32 or bfloat16.
  Work all_reduce(const Tensor& x, std::string_view name);
  /// Part r of in [size · n] goes to rank r; part r of out [size · n] comes from there.
  Work all_to_all(const Tensor& in, const Tensor& out, std::string_view name);
  /// The same with rows of the first dim, in_rows[r] of them to rank r and out_rows[r] from it.
  Work all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                    std::span<const std::int64_t> out_rows, std::string_view name);
  Work broadcast(const Tensor& x, int root, std::string_view name);
  /// What has one `tag`, in [0, kMaxTag], arrives in the order in which it was sent.
  static constexpr int kMaxTag = (1 << 14) - 1;
  Work send(const Tensor& x, int to, int tag, std::string_view name);
  Work receive(const Tensor& x, int from, int tag, std::string_view name);

  /// Sums of a few numbers of the host: losses, counts. Blocking.
  void all_reduce(std::span<double> x, std::string_view name);
  /// All ranks' numbers, rank by rank. Blocking.
  std::vector<double> all_gather(std::span<const double> x, std::string_view name);
  /// Returns when all ranks have come.
  void barrier(std::string_view name);

  /// The ranks with the same color, in the order of `order`, as a group. Together with all ranks of this one.
  ProcessGroup split(int color, int order, std::string axis);
  /// Memory that the ranks of this group share. Together with all of them.
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes);
  /// Until over() is true, which other ranks' stores into a window make it. Throws RankFailure as Work::wait() does;
  /// its message ends in what missing() tells.
  void wait_until(std::string_view operation, std::string_view name, const std::function<bool()>& over,
                  const std::function<std::string()>& missing);

 private:
  std::string title(std::string_view operation, std::string_view name) const;
  int next_tag();
  Work start(std::shared_ptr<Operation> operation);

  std::unique_ptr<Transport> transport_;
  Progress* progress_ = nullptr;
  std::string axis_;
  int num_collectives_ = 0;
};

}  // namespace tessera
