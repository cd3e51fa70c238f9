// The GPU of this process as memory and a queue of work. The functions are there in every build; one without CUDA
// throws Error, saying so, where they are asked for a GPU.
#pragma once

#include <cstddef>

struct CUevent_st;
struct CUstream_st;

namespace tessera::cuda {

/// Why this process cannot use a GPU, and how to mend it, in one line: a build without CUDA, no driver, one that is too
/// old for the CUDA runtime, no GPU. Empty if it can.
const char* why_unavailable();
inline bool available() { return why_unavailable()[0] == '\0'; }

/// GPUs that this process sees; 0 if it can use none.
int num_devices();
/// Has the calling thread use one of them, from 0 on; it is 0 at first.
void use_device(int device);

/// Zeroed memory of the GPU, on which the calling process's later work may start at once. Throws Error, with what is
/// free and what was asked for, if there is not that much.
std::byte* allocate_zeroed(std::size_t num_bytes);
void free_memory(std::byte* memory) noexcept;

/// What the GPU has left, and what it has.
std::size_t free_memory_bytes();
std::size_t total_memory_bytes();

/// Memory of the host that the GPU reads and writes without a copy in between, zeroed.
std::byte* allocate_pinned(std::size_t num_bytes);
void free_pinned(std::byte* memory) noexcept;
/// Makes memory that the host has already, shared memory of a tmpfs included, like that of allocate_pinned(), until
/// unpin(). `memory`: the begin of a page. Returns why that cannot be, null if it is done: files of a disk cannot be
/// pinned.
const char* pin(std::byte* memory, std::size_t num_bytes);
void unpin(std::byte* memory) noexcept;

/// What Event and Fence own, from the first record() on; movable.
class EventHandle {
 public:
  EventHandle() = default;
  ~EventHandle();
  EventHandle(EventHandle&& other) noexcept;
  EventHandle& operator=(EventHandle&& other) noexcept;

 protected:
  CUevent_st* handle_ = nullptr;
};

class Fence;
class Event;

/// Whose blocks the GPU starts first, where work of several streams is ready.
enum class Priority { kLow, kNormal, kHigh };

/// A queue of the GPU's work: what is put on one stream runs in order. Owned; movable.
class Stream {
 public:
  explicit Stream(Priority priority = Priority::kNormal);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;

  CUstream_st* handle() const { return handle_; }
  /// Waits until all that was put on it is done. Throws InternalError if some of it failed.
  void synchronize() const;
  /// Has everything that is put on this stream afterwards wait until the other stream has passed the fence.
  void wait(const Fence& fence) const;
  /// The same with an event. In a graph it is a wait of its own in every launch, for what was recorded last before.
  void wait(const Event& event) const;

 private:
  CUstream_st* handle_ = nullptr;
};

/// A point in a stream's work that other streams wait for; part of a graph, while one is being recorded.
class Fence : EventHandle {
 public:
  void record(const Stream& stream);

 private:
  friend class Stream;
};

/// A point in a stream's work, for the host to wait for and to measure from.
class Event : EventHandle {
 public:
  /// Puts it on the stream; while a graph is being recorded, into the graph, every launch of which passes it.
  void record(const Stream& stream);
  /// Waits until the stream has passed it. Returns why the work before it failed, null if it did not.
  const char* wait() const;
  /// True if wait() would return at once.
  bool passed() const;
  /// Between two that have been passed.
  double seconds_since(const Event& earlier) const;

 private:
  friend class Stream;
};

/// Puts a copy between any two of the host's and the GPU's memories on the stream. Memory of the host that is not
/// pinned is copied before it returns.
void copy_bytes(const Stream& stream, const void* source, std::size_t num_bytes, void* target);

}  // namespace tessera::cuda
