// Memory. A Buffer owns a block of bytes. An Arena hands out tensors from one block as a stack.
//
// All memory of a training step comes from one Arena whose size is known before the first step. The step first runs on
// Device::kMeta with a measuring arena, which counts bytes and holds no memory. The real arena then gets that size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

/// Every tensor begins at a multiple of this many bytes. On a CPU it is a cache line and the widest vector register. On
/// a GPU it suits the copy engines and libraries best.
inline constexpr std::size_t kAlignment = 64, kCudaAlignment = 256;
constexpr std::size_t alignment_on(Device device) { return device == Device::kCuda ? kCudaAlignment : kAlignment; }

/// Owns zeroed memory with the alignment of tensors. The constructor touches all pages, so the system reports the whole
/// size as used. Throws Error if the device does not have enough memory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t num_bytes, Device device = Device::kCpu);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  /// Returns pinned memory of the host, which the GPU's copy engines read and write directly.
  static Buffer pinned(std::size_t num_bytes);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  Device device() const { return device_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Device device_ = Device::kCpu;
  bool pinned_ = false;
};

class Arena {
 public:
  /// Makes an arena that measures what `target` will need. Its tensors are on Device::kMeta: they have addresses, which
  /// contains() recognizes, but no memory.
  explicit Arena(Device target = Device::kCpu);
  /// Makes an arena of `capacity` bytes on a CPU or GPU.
  explicit Arena(std::size_t capacity, Device device = Device::kCpu)
      : device_(device), target_(device), buffer_(capacity, device) {}

  /// Returns the device of its tensors. It is kMeta while measuring.
  Device device() const { return device_; }
  /// Returns the device whose operators use the arena, measuring or not: kCpu or kCuda.
  Device target() const { return target_; }

  /// Allocates a contiguous, uninitialized tensor on top of the stack. Throws InternalError if the arena is full.
  Tensor allocate(Shape shape, DType dtype);
  /// Allocates scratch memory. Returns null while measuring.
  std::byte* allocate_bytes(std::size_t num_bytes);

  /// Returns whether the tensor lies in memory that is allocated now.
  bool contains(const Tensor& tensor) const;

  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }
  std::size_t capacity() const { return buffer_.size(); }

  /// Releases everything allocated since `used()` was `mark`. While an ArenaHold lives, it releases nothing.
  void release_to(std::size_t mark);

 private:
  friend class ArenaHold;
  std::byte* base() const;

  Device device_, target_;
  Buffer buffer_;
  std::uintptr_t measured_base_ = 0;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  int num_holds_ = 0;
};

/// Releases at the end of its block what the arena has allocated since this object's construction.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.used()) {}
  ~ArenaScope() { arena_.release_to(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  std::size_t mark_;
};

/// Keeps everything allocated until the end of its block, because two streams of a GPU may use it at the same time. The
/// next enclosing ArenaScope releases it.
class ArenaHold {
 public:
  explicit ArenaHold(Arena& arena) : arena_(arena) { ++arena_.num_holds_; }
  ~ArenaHold() { --arena_.num_holds_; }
  ArenaHold(const ArenaHold&) = delete;
  ArenaHold& operator=(const ArenaHold&) = delete;

 private:
  Arena& arena_;
};

}  // namespace tessera
