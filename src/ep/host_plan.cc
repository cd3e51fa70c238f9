#include "ep/host_plan.h"

#include <cstring>

#include "ep/placement.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"
#include "ops/runtime/runtime.h"

namespace tessera::ep {

Tensor tensor_of(Ints& numbers, const Shape& shape) {
  return Tensor(numbers.data(), shape, DType::kInt32, Device::kCpu);
}

Ints fetch(const Context& op, const Tensor& x) {
  Ints numbers(static_cast<std::size_t>(x.num_elements()));
  if (op.cuda != nullptr) {
    op.cuda->fetch(x, numbers.data());
  } else {
    std::memcpy(numbers.data(), x.raw(), x.num_bytes());
  }
  return numbers;
}

void put(const Context& op, std::span<const std::int32_t> numbers, const Tensor& x) {
  TESSERA_CHECK(static_cast<std::int64_t>(numbers.size()) <= x.num_elements());
  if (op.cuda != nullptr) return cuda::copy_bytes(op.cuda->stream(), numbers.data(), numbers.size_bytes(), x.raw());
  std::memcpy(x.raw(), numbers.data(), numbers.size_bytes());
}

void HostNumbers::start(const Context& op, const Tensor& x) {
  TESSERA_CHECK(x.dtype() == DType::kInt32 && x.is_contiguous());
  if (memory_.size() < x.num_bytes()) {
    memory_ = op.cuda != nullptr ? ::tessera::Buffer::pinned(x.num_bytes()) : ::tessera::Buffer(x.num_bytes());
  }
  size_ = static_cast<std::size_t>(x.num_elements());
  if (op.cuda == nullptr) {
    std::memcpy(memory_.data(), x.raw(), x.num_bytes());
  } else {
    cuda::copy_bytes(op.cuda->stream(), x.raw(), x.num_bytes(), memory_.data());
    copied_.record(op.cuda->stream());
  }
}

std::span<const std::int32_t> HostNumbers::wait(const Context& op) {
  if (op.cuda != nullptr) op.cuda->wait(copied_);
  return {reinterpret_cast<const std::int32_t*>(memory_.data()), size_};
}

Tensor gather_counts(const Context& op, ProcessGroup& group, const DispatchSaved& saved) {
  const Tensor& counts_E = saved.routing.counts_E;
  const Shape all{group.size(), counts_E.dim(0)};
  const Tensor counts_PE = op.arena->allocate(all, DType::kInt32);
  const ArenaScope scope(*op.arena);
  const Tensor source_P = op.arena->allocate({group.size()}, DType::kInt32);
  const Tensor sent_PE = op.arena->allocate(all, DType::kInt32);
  set_zero(op, source_P);
  gather_row_bytes(op, counts_E.reshape({1, counts_E.dim(0)}), source_P, 1, sent_PE);
  if (!op.measuring()) group.all_to_all(sent_PE, counts_PE, fmt::format("counts of {}", saved.layer.name)).wait();
  return counts_PE;
}

HostPlacement gather_placement(const Context& op, ProcessGroup& group, const DispatchSaved& saved) {
  const std::int64_t ranks = group.size(), num_experts = saved.routing.counts_E.dim(0), local = num_experts / ranks;
  const auto ints = [](std::int64_t count) { return Ints(static_cast<std::size_t>(count)); };
  HostPlacement result{.counts_PE = ints(ranks * num_experts),
                       .first_row_PE = ints(ranks * num_experts),
                       .offsets_Pe1 = ints(ranks * (local + 1))};
  Ints own_counts = fetch(op, saved.routing.counts_E);
  const Tensor counts_PE = tensor_of(result.counts_PE, {ranks, num_experts});
  const Placement placement{.first_row_PE = tensor_of(result.first_row_PE, {ranks, num_experts}),
                            .offsets_Pe1 = tensor_of(result.offsets_Pe1, {ranks, local + 1})};
  group.all_gather(tensor_of(own_counts, {num_experts}), counts_PE, saved.layer.name).wait();
  place_rows(counts_PE, saved.layer.alignment, placement);
  *saved.num_rounds = count_rounds(placement, saved.num_rows());
  cut_to_round(placement, saved.round, saved.num_rows());
  return result;
}

Ints keep_round(std::span<const std::int32_t> first_row_E, std::int64_t room, std::span<std::int32_t> expert_ids_tK) {
  Ints next_row(first_row_E.begin(), first_row_E.end()), counts(next_row.size(), 0);
  for (std::int32_t& expert : expert_ids_tK) {
    TESSERA_CHECK(0 <= expert && expert < std::ssize(counts), "expert {} of {}", expert, counts.size());
    const auto at = static_cast<std::size_t>(expert);
    const std::int32_t size = rows_in_round(next_row[at]++, 1, room).size();
    counts[at] += size;
    if (size == 0) expert = kNoExpert;
  }
  return counts;
}

}  // namespace tessera::ep
