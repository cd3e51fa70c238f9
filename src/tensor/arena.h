// Memory. A Buffer owns a block of bytes; an Arena hands out tensors from one block as a stack.
//
// All memory of a training step comes from one Arena whose size is known before the first step: the step is run once
// on Device::kMeta with a measuring arena, which counts and gives no memory. The real arena is then made that large.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

/// All tensors start at a multiple of this many bytes: on a CPU a cache line, and the widest vector register; on a GPU
/// what its copy engines and libraries like best.
inline constexpr std::size_t kAlignment = 64, kCudaAlignment = 256;
constexpr std::size_t alignment_on(Device device) { return device == Device::kCuda ? kCudaAlignment : kAlignment; }

/// Owns zeroed memory, aligned as tensors are. Pages are touched at construction, so that what the system reports as
/// used is what was asked for. Throws Error if the device has not that much.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t num_bytes, Device device = Device::kCpu);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  /// The host's memory that the GPU's copies read and write on their own.
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
  /// An arena that measures what `target` will need: its tensors are on Device::kMeta. They have addresses, by which
  /// contains() knows them, and no memory there.
  explicit Arena(Device target = Device::kCpu);
  /// An arena of `capacity` bytes on a CPU or GPU.
  explicit Arena(std::size_t capacity, Device device = Device::kCpu)
      : device_(device), target_(device), buffer_(capacity, device) {}

  /// Where its tensors are.
  Device device() const { return device_; }
  /// Whose operators use it, measuring or not: kCpu or kCuda.
  Device target() const { return target_; }

  /// A contiguous tensor on top of the stack; its numbers are whatever was there. Throws InternalError when full.
  Tensor allocate(Shape shape, DType dtype);
  /// Bytes of scratch memory; null when measuring.
  std::byte* allocate_bytes(std::size_t num_bytes);

  /// Whether the tensor is in what has been handed out and not been given back.
  bool contains(const Tensor& tensor) const;

  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }
  std::size_t capacity() const { return buffer_.size(); }

  /// Gives back all that was allocated since `used()` was `mark`; within an ArenaHold nothing.
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

/// Gives back at the end of the block what was allocated since its construction.
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

/// Keeps everything allocated until the end of the block, because two streams of a GPU may use it at the same time. The
/// next ArenaScope that ends, and began before, frees it.
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
