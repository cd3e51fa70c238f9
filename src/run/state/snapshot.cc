#include "run/state/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// How many bytes a thread copies at once.
constexpr std::int64_t kGrain = std::int64_t{2} << 20;
/// How many threads at most fill a piece beside a GPU. On the host of an H200 one thread copies to new pages at 1.3
/// GB/s, and 12 threads at 19 GB/s, while PCIe brings 55 GB/s. Training's threads only launch kernels then.
constexpr int kMostThreads = 16;
/// If no piece is filled for so long, the GPU is asked whether it has failed, after which it calls no function.
constexpr std::chrono::seconds kSilence{10};

void copy_in_parallel(const std::byte* source, std::size_t num_bytes, std::byte* target) {
  parallel_ranges(static_cast<std::int64_t>(num_bytes), kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin));
  });
}

/// Calls visit(bytes, count, offset) for every run of bytes that is contiguous in a tensor and in a piece. `offset` is
/// that of the run among all tensors' bytes.
template <typename Visit>
void for_each_run(std::span<const Tensor> tensors, std::size_t piece_bytes, Visit&& visit) {
  std::size_t offset = 0;
  for (const Tensor& tensor : tensors) {
    const auto* bytes = static_cast<const std::byte*>(tensor.raw());
    for (std::size_t left = tensor.num_bytes(); left > 0;) {
      const std::size_t count = std::min(left, piece_bytes - offset % piece_bytes);
      visit(bytes, count, offset);
      bytes += count;
      left -= count;
      offset += count;
    }
  }
}

}  // namespace

class Snapshot::Piece {
 public:
  Piece() = default;
  explicit Piece(std::size_t num_bytes) : size_(num_bytes) {
    void* memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "cannot take {} bytes of memory for a checkpoint's copy: {}", num_bytes,
            std::strerror(errno));
    data_ = static_cast<std::byte*>(memory);
    ::madvise(memory, num_bytes, MADV_HUGEPAGE);  // faster to fill; without huge pages it fails, which does not matter
  }
  ~Piece() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  Piece(Piece&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Piece& operator=(Piece&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

Snapshot::Snapshot(cuda::Event* state_read_done, std::size_t piece_bytes)
    : state_read_done_(state_read_done), piece_bytes_(piece_bytes) {
  if (state_read_done == nullptr) return;
  staging_ = Buffer::pinned(piece_bytes);
  stream_.emplace(cuda::Priority::kLow);
}

Snapshot::~Snapshot() {
  drop();
  try {
    if (stream_) stream_->synchronize();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the GPU has failed, and calls no function any more
  }
}

std::size_t Snapshot::size_of(std::size_t piece_idx) const {
  return std::min(piece_bytes_, num_bytes_ - piece_idx * piece_bytes_);
}

std::size_t Snapshot::bytes_of(const std::vector<Piece>& pieces) {
  std::size_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.size();
  return sum;
}

Snapshot::Piece Snapshot::take(std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(spare_, num_bytes, &Piece::size);
  if (found == spare_.end()) return Piece(num_bytes);
  Piece piece = std::move(*found);
  spare_.erase(found);
  return piece;
}

void Snapshot::keep_spare(Piece& piece) {
  const bool has_room = bytes_of(spare_) + piece.size() <= kSpareBytes;
  if (!stream_ && piece.size() > 0 && has_room) spare_.push_back(std::move(piece));
}

void Snapshot::start(std::span<const Tensor> tensors) {
  drop();
  if (stream_) stream_->synchronize();  // a copy that was dropped may still be under way
  std::size_t num_bytes = 0;
  for (const Tensor& tensor : tensors) {
    TESSERA_CHECK(tensor.is_contiguous() && (tensor.device() == Device::kCuda) == stream_.has_value());
    num_bytes += tensor.num_bytes();
  }
  num_bytes_ = num_bytes;
  next_ = 0;
  std::vector<Piece> pieces;
  for (std::size_t begin = 0; begin < num_bytes; begin += piece_bytes_) {
    pieces.push_back(take(size_of(begin / piece_bytes_)));
  }
  {
    const std::lock_guard lock(mutex_);
    pieces_ = std::move(pieces);
    num_filled_ = 0;
    is_dropped_ = false;
  }
  if (stream_) return start_on_gpu(tensors);
  for_each_run(tensors, piece_bytes_, [&](const std::byte* bytes, std::size_t count, std::size_t offset) {
    copy_in_parallel(bytes, count, pieces_[offset / piece_bytes_].data() + offset % piece_bytes_);
  });
  num_filled_ = pieces_.size();
}

void Snapshot::start_on_gpu(std::span<const Tensor> tensors) {
  num_threads_ = std::min(num_threads(), kMostThreads);
  for_each_run(tensors, piece_bytes_, [&](const std::byte* bytes, std::size_t count, std::size_t offset) {
    cuda::copy_bytes(*stream_, bytes, count, staging_.data() + offset % piece_bytes_);
    const std::size_t end = offset + count;
    if (end % piece_bytes_ != 0 && end != num_bytes_) return;
    cuda::call_on_host(
        *stream_, [](void* snapshot) { static_cast<Snapshot*>(snapshot)->fill_next(); }, this);
  });
  state_read_done_->record(*stream_);
}

void Snapshot::fill_next() noexcept {
  const auto size = size_of(num_filled_);  // no other thread writes num_filled_ now
  std::byte* target = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!is_dropped_) target = pieces_[num_filled_].data();
  }
  if (target != nullptr) {
    try {
      set_num_threads(num_threads_);  // of CUDA's thread
      copy_in_parallel(staging_.data(), size, target);
    } catch (const std::exception&) {  // no threads
      std::memcpy(target, staging_.data(), size);
    }
  }
  Piece freed;
  {
    const std::lock_guard lock(mutex_);
    if (is_dropped_) std::swap(freed, pieces_[num_filled_]);
    ++num_filled_;
  }
  filled_.notify_all();
}

std::span<const std::byte> Snapshot::wait_for(std::size_t piece_idx, const std::stop_token& stop) {
  const auto is_filled = [&] { return num_filled_ > piece_idx; };
  std::unique_lock lock(mutex_);
  TESSERA_CHECK(!is_dropped_);
  while (!filled_.wait_for(lock, stop, kSilence, is_filled)) {
    require(!stop.stop_requested(), "reading the copy of the state was given up");
    lock.unlock();  // CUDA's thread may wait for it
    if (state_read_done_->passed()) {
      const char* failure = state_read_done_->wait();
      TESSERA_CHECK(failure == nullptr, "copying the state of the GPU: {}", failure);
    }
    lock.lock();
  }
  return {pieces_[piece_idx].data(), pieces_[piece_idx].size()};
}

void Snapshot::read(std::size_t num_bytes, const Sink& sink, const std::stop_token& stop) {
  TESSERA_CHECK(next_ + num_bytes <= num_bytes_, "{} + {} of {}", next_, num_bytes, num_bytes_);
  while (num_bytes > 0) {
    const std::size_t piece_idx = next_ / piece_bytes_, begin = next_ % piece_bytes_;
    const std::span<const std::byte> piece = wait_for(piece_idx, stop);
    const std::size_t count = std::min(num_bytes, piece.size() - begin);
    sink(piece.subspan(begin, count));
    next_ += count;
    num_bytes -= count;
    if (begin + count < piece.size()) continue;
    Piece freed;
    const std::lock_guard lock(mutex_);
    freed = std::exchange(pieces_[piece_idx], {});
    keep_spare(freed);
  }
}

void Snapshot::drop() {
  std::vector<Piece> freed;
  const std::lock_guard lock(mutex_);
  is_dropped_ = true;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i == num_filled_) continue;  // CUDA's thread frees the one that it may be filling
    freed.push_back(std::exchange(pieces_[i], {}));
    keep_spare(freed.back());
  }
}

std::size_t Snapshot::num_held_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_of(pieces_);
}

std::size_t Snapshot::num_spare_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_of(spare_);
}

}  // namespace tessera
