// Numbers that the host and operators share: a batch's ids, tables, the sums of a step.
#pragma once

#include <span>

#include "device/cuda.h"
#include "tensor/arena.h"

namespace tessera {

/// Numbers on the host, 0 at first, and for Device::kCuda a copy of them on the GPU. The host's are pinned then, so
/// that copies need no host; between putting one on a stream and its end the host's numbers are to be left alone.
template <typename T>
class Mirrored {
 public:
  Mirrored() = default;
  explicit Mirrored(std::int64_t size, Device target = Device::kCpu)
      : size_(size), host_(target == Device::kCuda ? Buffer::pinned(num_bytes()) : Buffer(num_bytes())) {
    if (target == Device::kCuda) gpu_ = Buffer(num_bytes(), target);
  }

  std::int64_t size() const { return size_; }
  std::span<T> host() const { return {reinterpret_cast<T*>(host_.data()), static_cast<std::size_t>(size_)}; }
  /// Returns the numbers as operators on `device` see them, [size]; without numbers on kMeta.
  Tensor tensor(Device device) const {
    const Buffer& buffer = device == Device::kCuda ? gpu_ : host_;
    return Tensor(device == Device::kMeta ? nullptr : buffer.data(), {size_}, DTypeOf<T>::value, device);
  }

  /// Puts a copy of the host's numbers on the stream, if there is a GPU's copy; and the other way round.
  void upload(const cuda::Stream& stream) const {
    if (gpu_.data() != nullptr) cuda::copy_bytes(stream, host_.data(), num_bytes(), gpu_.data());
  }
  void download(const cuda::Stream& stream) const {
    if (gpu_.data() != nullptr) cuda::copy_bytes(stream, gpu_.data(), num_bytes(), host_.data());
  }

 private:
  std::size_t num_bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }

  std::int64_t size_ = 0;
  Buffer host_, gpu_;
};

}  // namespace tessera
