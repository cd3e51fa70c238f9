#include "ep/host_numbers.h"

#include <cstring>

#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"
#include "ops/runtime/runtime.h"

namespace tessera::ep {

void put(const Context& op, std::span<const std::int32_t> numbers, const Tensor& x) {
  TESSERA_CHECK(static_cast<std::int64_t>(numbers.size()) <= x.num_elements());
  if (op.cuda != nullptr) return cuda::copy_bytes(op.cuda->stream(), numbers.data(), numbers.size_bytes(), x.raw());
  std::memcpy(x.raw(), numbers.data(), numbers.size_bytes());
}

void HostNumbers::allocate(Device device, std::int64_t size) {
  const std::size_t num_bytes = static_cast<std::size_t>(size) * sizeof(std::int32_t);
  memory_ = device == Device::kCuda ? ::tessera::Buffer::pinned(num_bytes) : ::tessera::Buffer(num_bytes);
}

void HostNumbers::start(const Context& op, const Tensor& x) {
  TESSERA_CHECK(x.dtype() == DType::kInt32 && x.is_contiguous() && x.num_bytes() <= memory_.size(), "{} in {} bytes",
                x.shape().to_string(), memory_.size());
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

Tensor gather_on_device(const Context& op, ProcessGroup& group, const Tensor& x, std::string_view name) {
  const Shape all{group.size(), x.num_elements()};
  const Tensor gathered = op.arena->allocate(all, x.dtype());
  const ArenaScope scope(*op.arena);
  const Tensor sent = op.arena->allocate(all, x.dtype());
  const Tensor source_P = op.arena->allocate({group.size()}, DType::kInt32);
  set_zero(op, source_P);
  gather_row_bytes(op, x.reshape({1, x.num_elements()}), source_P, 1, sent);
  if (!op.measuring()) group.all_to_all(sent, gathered, name).wait();
  return gathered;
}

}  // namespace tessera::ep
