// The numbers of a save, copied to memory of the host. Training goes on while a thread writes them to files.
//
// The copy is cut into pieces of kPieceBytes. They are filled in order and read in order, and each is freed as soon as
// it has been read. So memory is taken only between the start of a save and its end.
//
// On CPUs start() copies all, and training waits for it. So up to kSpareBytes of pieces are kept for the next save
// there: new pages take two to three times as long to fill. On a GPU start() returns at once, and the copy has a stream
// of its own. For each piece, the stream has a transfer to pinned memory of the size of one piece, and a function of
// the host that copies it to the pageable piece. Only that memory is pinned, once: pinning is slower than the copy, and
// waits for the whole GPU. Pieces on a GPU are large because few functions of the host fit a stream's queue. With more,
// start() waits, and the GPU gets no work: 150 pieces of 128 MiB took 0.7 to 2 s of a 16B model's training.
//
// docs/checkpoints.md says why there is memory for all numbers, and the GPU does not wait for the storage.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "config/job_config.h"
#include "device/cuda.h"
#include "tensor/arena.h"

namespace tessera {

class Snapshot {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{128} << 20, kPieceBytesOnGpu = std::size_t{512} << 20;
  static constexpr std::size_t kSpareBytes = std::size_t{1} << 30;

  /// Returns whether saves of a run on this device write from a copy.
  static bool is_taken(const JobConfig& config, Device device) {
    return device == Device::kCuda || config.checkpoint.async_mode == AsyncMode::kAsync;
  }
  /// Returns the size of the pieces for copies of up to so many bytes.
  static std::size_t piece_bytes(std::size_t num_bytes, Device device) {
    return device == Device::kCuda ? std::clamp(num_bytes, std::size_t{1}, kPieceBytesOnGpu) : kPieceBytes;
  }
  /// Returns the most memory of the host that a copy of so many bytes takes.
  static std::size_t peak_bytes(std::size_t num_bytes, Device device) {
    return num_bytes + (device == Device::kCuda ? piece_bytes(num_bytes, device) : 0);
  }

  /// `state_read_done` is TrainingStep's on GPUs, and must outlive the object. It is null on CPUs. Pieces have
  /// `piece_bytes` bytes, which is not 0. Throws Error if a GPU gets no pinned memory for one.
  Snapshot(cuda::Event* state_read_done, std::size_t piece_bytes);
  /// Waits until the GPU no longer copies. No thread may read any more.
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // One thread at a time may call start(), and no thread may be in read() then.

  /// Starts to copy the tensors' bytes, one tensor after the other, and forgets what was not read of the copy before.
  /// The tensors are contiguous, in memory of the host, or of the GPU if there is an event. Their numbers must be final
  /// when this is called. A GPU's must stay until the event has passed, which a step waits for before its update.
  /// Throws Error if there is no memory.
  void start(std::span<const Tensor> tensors);

  // Any thread may call the functions below, one thread at a time.

  using Sink = std::function<void(std::span<const std::byte>)>;
  /// Passes the next `num_bytes` bytes of the copy to `sink`, which may throw, in one or several calls. Waits for
  /// pieces that are not filled yet. Throws Error if a stop is requested while it waits, and InternalError if the GPU
  /// has failed.
  void read(std::size_t num_bytes, const Sink& sink, const std::stop_token& stop = {});
  /// Frees what was not read. A copy that is under way goes on without memory. Does not wait. Afterwards, only
  /// start() may be called.
  void drop();
  /// Returns the size of the pieces whose numbers are still to be read, in bytes. Any thread may call it at any time.
  std::size_t num_held_bytes() const;
  /// Returns the size of the pieces that are kept for the next save.
  std::size_t num_spare_bytes() const;

 private:
  /// Owns pageable memory whose pages are taken when they are first written.
  class Piece;

  static std::size_t bytes_of(const std::vector<Piece>& pieces);
  std::size_t size_of(std::size_t piece_idx) const;
  /// Returns a piece of so many bytes, which may be a spare one.
  Piece take(std::size_t num_bytes);
  /// Takes a piece over for later, if it should be kept. The caller holds the mutex, and frees it otherwise.
  void keep_spare(Piece& piece);
  /// Puts the copy of all pieces on the stream.
  void start_on_gpu(std::span<const Tensor> tensors);
  /// Copies the pinned memory to the next piece. A thread of CUDA calls it.
  void fill_next() noexcept;
  /// Returns a piece when it is filled.
  std::span<const std::byte> wait_for(std::size_t piece_idx, const std::stop_token& stop);

  cuda::Event* state_read_done_;
  std::size_t piece_bytes_;
  int num_threads_ = 1;  // that fill a piece
  Buffer staging_;
  std::size_t num_bytes_ = 0;  // of the whole copy
  std::size_t next_ = 0;       // offset of the next byte to read
  mutable std::mutex mutex_;   // guards the members below
  std::condition_variable_any filled_;
  std::vector<Piece> pieces_, spare_;
  std::size_t num_filled_ = 0;  // pieces before this one are filled
  bool is_dropped_ = false;
  std::optional<cuda::Stream> stream_;  // last
};

}  // namespace tessera
