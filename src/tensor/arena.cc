#include "tensor/arena.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "device/cuda.h"

namespace tessera {
namespace {

std::size_t align_up(std::size_t num_bytes, Device device) {
  const std::size_t alignment = alignment_on(device);
  return (num_bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Buffer::Buffer(std::size_t num_bytes, Device device) : size_(num_bytes), device_(device) {
  if (num_bytes == 0) return;
  if (device == Device::kCuda) {
    data_ = cuda::allocate_zeroed(num_bytes);
    return;
  }
  data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, align_up(num_bytes, device)));
  require(data_ != nullptr, "cannot allocate {:.2f} GiB of memory; make the batch, the sequence or the model smaller",
          static_cast<double>(num_bytes) / (1ULL << 30));
  std::memset(data_, 0, num_bytes);
}

Buffer::~Buffer() {
  if (device_ == Device::kCuda) {
    cuda::free_memory(data_);
  } else if (pinned_) {
    cuda::free_pinned(data_);
  } else {
    std::free(data_);
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      device_(other.device_),
      pinned_(other.pinned_) {}

Buffer Buffer::pinned(std::size_t num_bytes) {
  Buffer buffer;
  buffer.size_ = num_bytes;
  buffer.pinned_ = true;
  if (num_bytes > 0) buffer.data_ = cuda::allocate_pinned(num_bytes);
  return buffer;
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(device_, other.device_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

Arena::Arena(Device target) : device_(Device::kMeta), target_(target) {
  // Addresses of measuring arenas are far from each other and from all real memory.
  static std::atomic<std::uintptr_t> num_arenas = 0;
  measured_base_ = (std::uintptr_t{1} << 63) + (++num_arenas % (1U << 14)) * (std::uintptr_t{1} << 48);
}

std::byte* Arena::base() const {
  return device_ == Device::kMeta ? reinterpret_cast<std::byte*>(measured_base_) : buffer_.data();
}

Tensor Arena::allocate(Shape shape, DType dtype) {
  const std::size_t begin = used_;
  allocate_bytes(static_cast<std::size_t>(shape.num_elements()) * size_of(dtype));
  return Tensor(base() + begin, shape, dtype, device_);
}

std::byte* Arena::allocate_bytes(std::size_t num_bytes) {
  const std::size_t begin = used_;
  used_ += align_up(num_bytes, target_);
  peak_ = std::max(peak_, used_);
  if (device_ == Device::kMeta) return nullptr;
  TESSERA_CHECK(used_ <= buffer_.size(), "arena of {} bytes: {} used, {} more asked for; the plan missed it",
                buffer_.size(), begin, num_bytes);
  return base() + begin;
}

bool Arena::contains(const Tensor& tensor) const {
  const auto at = reinterpret_cast<std::uintptr_t>(tensor.raw()), begin = reinterpret_cast<std::uintptr_t>(base());
  return begin <= at && at < begin + used_;
}

void Arena::release_to(std::size_t mark) {
  TESSERA_CHECK(mark <= used_, "mark {} used {}", mark, used_);
  if (num_holds_ == 0) used_ = mark;
}

}  // namespace tessera
