// Numbers that the host and the operators share, such as the ids of a batch, tables and the sums of a step.
#pragma once

#include <span>

#include "device/cuda.h"
#include "tensor/arena.h"

namespace tessera {

/// Holds numbers on the host, initially 0, with a copy on the GPU for Device::kCuda. For kMeta it has no numbers at
/// all. With a GPU the host's memory is pinned, so that copies run asynchronously. Do not touch the host's numbers from
/// the call that enqueues a copy until the copy is done.
template <typename T>
class Mirrored {
 public:
  Mirrored() = default;
  explicit Mirrored(std::int64_t size, Device target = Device::kCpu) : size_(size) {
    if (target == Device::kCpu) host_ = Buffer(num_bytes());
    if (target != Device::kCuda) return;
    host_ = Buffer::pinned(num_bytes());
    gpu_ = Buffer(num_bytes(), target);
  }

  std::int64_t size() const { return size_; }
  std::span<T> host() const { return {reinterpret_cast<T*>(host_.data()), static_cast<std::size_t>(size_)}; }
  /// Returns the numbers as a tensor [size] for operators on `device`. On kMeta it has no numbers.
  Tensor tensor(Device device) const {
    const Buffer& buffer = device == Device::kCuda ? gpu_ : host_;
    return Tensor(device == Device::kMeta ? nullptr : buffer.data(), {size_}, DTypeOf<T>::value, device);
  }

  /// Enqueues a copy of the numbers to the GPU. Does nothing on a CPU.
  void upload(const cuda::Stream& stream) const {
    if (gpu_.data() != nullptr) cuda::copy_bytes(stream, host_.data(), num_bytes(), gpu_.data());
  }
  /// Enqueues a copy of the numbers to the host. Does nothing on a CPU.
  void download(const cuda::Stream& stream) const {
    if (gpu_.data() != nullptr) cuda::copy_bytes(stream, gpu_.data(), num_bytes(), host_.data());
  }

 private:
  std::size_t num_bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }

  std::int64_t size_ = 0;
  Buffer host_, gpu_;
};

}  // namespace tessera
