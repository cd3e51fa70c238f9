// This process's GPU: its memory, its streams of work and their events. Every build declares and defines these
// functions. In a build without CUDA, those that need a GPU throw Error and say so.
#pragma once

#include <cstddef>

struct CUevent_st;
struct CUstream_st;

namespace tessera::cuda {

/// Returns whether this build has the CUDA backend. A dry run for a GPU needs it, and needs no GPU.
bool is_built();

/// Returns in one line why this process cannot use a GPU, and how to fix that. The reasons are a build without CUDA, no
/// driver, a driver too old for the CUDA runtime, or no suitable GPU. Returns "" if it can use one.
const char* why_unavailable();
inline bool available() { return why_unavailable()[0] == '\0'; }

/// Returns the number of GPUs that this process sees. It is 0 if it can use none.
int num_devices();
/// Makes the calling thread use GPU `device`, in [0, num_devices()). Each thread starts with GPU 0.
void use_device(int device);

/// Allocates GPU memory and zeroes it. The zeroing is finished on return, so work on any stream may use the memory.
/// Throws Error, which says how much is free and how much was requested, if there is not enough.
std::byte* allocate_zeroed(std::size_t num_bytes);
void free_memory(std::byte* memory) noexcept;

/// Return the GPU's free and total memory, in bytes.
std::size_t free_memory_bytes();
std::size_t total_memory_bytes();

/// Allocates zeroed memory of the host that the GPU reads and writes without an intermediate copy.
std::byte* allocate_pinned(std::size_t num_bytes);
void free_pinned(std::byte* memory) noexcept;
/// Pins existing memory of the host, as that of allocate_pinned() is, until unpin(). `memory` must begin at a page.
/// Shared memory of a tmpfs can be pinned, files on a disk cannot. Returns null on success, otherwise the reason.
const char* pin(std::byte* memory, std::size_t num_bytes);
void unpin(std::byte* memory) noexcept;

/// Owns the CUDA event of an Event or a Fence. The first record() creates it. It is movable.
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

/// The priority of a stream. If several streams have work ready, the GPU starts blocks of the highest priority first.
enum class Priority { kLow, kNormal, kHigh };

/// Owns a CUDA stream, which is a queue of the GPU's work. Work on one stream runs in order. It is movable.
class Stream {
 public:
  explicit Stream(Priority priority = Priority::kNormal);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;

  CUstream_st* handle() const { return handle_; }
  /// Returns whether a graph is being recorded on this stream (device/cuda_graph.h).
  bool is_recording() const;
  /// Waits until all work on this stream is done. Throws InternalError if some of it failed.
  void synchronize() const;
  /// Makes all later work on this stream wait until the other stream has passed the fence.
  void wait(const Fence& fence) const;
  /// Makes all later work on this stream wait for the event. In a graph, every launch waits for the event's latest
  /// record.
  void wait(const Event& event) const;

 private:
  CUstream_st* handle_ = nullptr;
};

/// Marks a point in a stream's work that other streams can wait for. If it is recorded into a graph, it becomes a
/// dependency inside that graph.
class Fence : EventHandle {
 public:
  void record(const Stream& stream);

 private:
  friend class Stream;
};

/// Marks a point in a stream's work that the host can wait for and measure times between.
class Event : EventHandle {
 public:
  /// Puts the event on the stream. While a graph is being recorded, it becomes part of the graph. Every launch passes
  /// it.
  void record(const Stream& stream);
  /// Waits until the stream has passed the event. Returns null, or the reason if the work before it failed.
  const char* wait() const;
  /// Returns whether wait() would return at once.
  bool passed() const;
  /// Returns the seconds between two events. The stream must have passed both.
  double seconds_since(const Event& earlier) const;

 private:
  friend class Stream;
};

/// Puts a copy on the stream. Source and target may each be memory of the host or of the GPU. If memory of the host is
/// not pinned, the function returns only after it has been copied.
void copy_bytes(const Stream& stream, const void* source, std::size_t num_bytes, void* target);

/// Puts a call of function(argument) on the stream. A thread of the CUDA runtime calls the function, and later work on
/// the stream waits until it returns. The function must not throw, use CUDA, or wait for the GPU. It is not called if
/// the GPU has failed.
void call_on_host(const Stream& stream, void (*function)(void*), void* argument);

}  // namespace tessera::cuda
