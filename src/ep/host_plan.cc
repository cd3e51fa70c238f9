#include "ep/host_plan.h"

#include <cstring>

#include "ep/placement.h"
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
