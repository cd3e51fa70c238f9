#include "run/state/training_state.h"

#include <algorithm>
#include <cstring>

#include "base/file.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Bytes of a piece: few enough that a copied piece is still in the core's cache when it is hashed.
constexpr std::size_t kPiece = std::size_t{256} << 10;
/// Bytes that are copied from a GPU at once to be read.
constexpr std::size_t kStaged = 128 * kPiece;
/// Bytes of a transfer of start_copy(). Other downloads wait for one or two, which take 5 ms each at 55 GB/s.
constexpr std::size_t kTransfer = std::size_t{256} << 20;

/// Calls visit(address, count) for the part of each tensor that lies in bytes [begin, end) of all tensors' bytes.
template <typename Visit>
void for_each_segment(std::span<const Tensor> tensors, std::size_t begin, std::size_t end, Visit&& visit) {
  std::size_t first = 0;  // offset of the tensor among all bytes
  for (const Tensor& tensor : tensors) {
    const std::size_t last = first + tensor.num_bytes();
    const std::size_t from = std::max(begin, first), to = std::min(end, last);
    if (from < to) visit(static_cast<std::byte*>(tensor.raw()) + (from - first), to - from);
    first = last;
  }
}

/// Cuts `num_bytes` bytes into pieces of `size` bytes.
struct StatePieces {
  std::size_t num_bytes, size;

  std::size_t count() const { return (num_bytes + size - 1) / size; }
  std::size_t begin(std::size_t piece) const { return piece * size; }
  std::size_t end(std::size_t piece) const { return std::min(num_bytes, (piece + 1) * size); }
};

/// Writes the checksum of every piece of the tensors' bytes, which are in host memory. Also copies the bytes to
/// `target` unless that is null.
void read_pieces(std::span<const Tensor> tensors, std::size_t num_bytes, std::byte* target, std::uint64_t* checksums) {
  const StatePieces pieces{num_bytes, kPiece};
  parallel_for(static_cast<std::int64_t>(pieces.count()), [&](std::int64_t task) {
    const auto piece = static_cast<std::size_t>(task);
    std::byte* next = target == nullptr ? nullptr : target + pieces.begin(piece);
    Checksum sum;
    for_each_segment(tensors, pieces.begin(piece), pieces.end(piece), [&](const std::byte* bytes, std::size_t count) {
      if (next != nullptr) next = std::copy_n(bytes, count, next);
      sum.update({bytes, count});
    });
    checksums[piece] = sum.value();
  });
}

std::uint64_t checksum_of(const std::vector<std::uint64_t>& checksums) {
  return checksum(std::as_bytes(std::span(checksums)));
}

std::size_t bytes_of(std::span<const Tensor> tensors) {
  std::size_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.num_bytes();
  return sum;
}

}  // namespace

Tensor words_of(std::span<const std::byte> bytes) {
  return {const_cast<std::byte*>(bytes.data()),  // NOLINT(cppcoreguidelines-pro-type-const-cast)
          {static_cast<std::int64_t>(bytes.size() / sizeof(std::int32_t))},
          DType::kInt32,
          Device::kCpu};
}

std::uint64_t checksum_of_pieces(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> checksums(StatePieces{bytes.size(), kPiece}.count());
  const Tensor words = words_of(bytes);
  TESSERA_CHECK(words.num_bytes() == bytes.size(), "{} bytes", bytes.size());
  read_pieces(std::span(&words, 1), bytes.size(), nullptr, checksums.data());
  return checksum_of(checksums);
}

std::vector<Tensor> TrainingState::tensors() const {
  std::vector<Tensor> tensors = {parameters_.all_masters()};
  for (std::size_t i = 0; i < parameters_.optimizer_tensors().size(); ++i) {
    tensors.push_back(parameters_.optimizer_tensor(i));
  }
  tensors.push_back(parameters_.all_buffers());
  return tensors;
}

std::size_t TrainingState::num_bytes() const { return bytes_of(tensors()); }

TrainingState::Checksums TrainingState::read(std::byte* target) {
  const std::vector<Tensor> tensors = this->tensors();
  const std::size_t num_bytes = bytes_of(tensors);
  const Tensor& buffers = tensors.back();
  std::vector<std::uint64_t> checksums(StatePieces{num_bytes, kPiece}.count());
  std::vector<std::byte> host_buffers(buffers.num_bytes());
  parameters_.read(buffers, Tensor(host_buffers.data(), buffers.shape(), buffers.dtype(), Device::kCpu));
  Checksums result{.buffers = checksum(host_buffers)};
  if (buffers.device() == Device::kCpu) {
    read_pieces(tensors, num_bytes, target, checksums.data());
  } else {
    // While the host reads one part from pinned memory, the GPU copies the next one.
    const cuda::Stream& stream = streams().front();
    const StatePieces parts{num_bytes, kStaged};
    std::array<cuda::Event, 2> arrived;
    const auto start = [&](std::size_t part) {
      Buffer& staging = staging_[part % 2];
      if (staging.size() == 0) staging = Buffer::pinned(kStaged);
      std::byte* next = staging.data();
      for_each_segment(tensors, parts.begin(part), parts.end(part), [&](const std::byte* bytes, std::size_t count) {
        cuda::copy_bytes(stream, bytes, count, next);
        next += count;
      });
      arrived[part % 2].record(stream);
    };
    if (parts.count() > 0) start(0);
    for (std::size_t part = 0; part < parts.count(); ++part) {
      if (part + 1 < parts.count()) start(part + 1);
      const char* failure = arrived[part % 2].wait();
      TESSERA_CHECK(failure == nullptr, "reading the state of the GPU: {}", failure);
      const std::size_t begin = parts.begin(part), size = parts.end(part) - begin;
      const Tensor words = words_of({staging_[part % 2].data(), size});
      read_pieces(std::span(&words, 1), size, target == nullptr ? nullptr : target + begin,
                  checksums.data() + begin / kPiece);
    }
  }
  result.all = checksum_of(checksums);
  return result;
}

const std::array<cuda::Stream, 2>& TrainingState::streams() {
  if (!streams_) streams_ = {cuda::Stream(cuda::Priority::kLow), cuda::Stream(cuda::Priority::kLow)};
  return *streams_;
}

// The engine that copies to the host does all that a stream has ready for it before it turns to another stream. So two
// streams take turns: each waits for the other one's transfer, and the engine also serves the step between them.
void TrainingState::start_copy(std::byte* target, cuda::Event& copied) {
  const std::vector<Tensor> tensors = this->tensors();
  const StatePieces transfers{bytes_of(tensors), kTransfer};
  const cuda::Stream* stream = &streams().front();
  cuda::Fence arrived;
  for (std::size_t i = 0; i < transfers.count(); ++i) {
    stream = &streams()[i % 2];
    if (i > 0) stream->wait(arrived);
    for_each_segment(tensors, transfers.begin(i), transfers.end(i), [&](const std::byte* bytes, std::size_t count) {
      cuda::copy_bytes(*stream, bytes, count, target);
      target += count;
    });
    arrived.record(*stream);
  }
  copied.record(*stream);
}

TrainingState::Checksums TrainingState::checksums_of_copy(std::span<const std::byte> bytes) const {
  return {.all = checksum_of_pieces(bytes), .buffers = checksum(bytes.last(tensors().back().num_bytes()))};
}

void TrainingState::write(std::span<const std::byte> bytes) {
  const std::vector<Tensor> tensors = this->tensors();
  TESSERA_CHECK(bytes.size() == bytes_of(tensors), "{} bytes, expected {}", bytes.size(), bytes_of(tensors));
  const std::byte* next = bytes.data();
  for (const Tensor& tensor : tensors) {
    parameters_.assign(tensor, {next, tensor.num_bytes()});
    next += tensor.num_bytes();
  }
}

std::vector<TrainingState::Part> TrainingState::parts() const {
  std::vector<Part> parts;
  const auto add = [&](std::string name, const Tensor& tensor, bool is_buffer = false) {
    std::vector<std::byte> numbers(tensor.num_bytes());
    parameters_.read(tensor, Tensor(numbers.data(), tensor.shape(), tensor.dtype(), Device::kCpu));
    parts.push_back({std::move(name), checksum(numbers), is_buffer});
  };
  for (ParamId id = 0; id < parameters_.size(); ++id) {
    const Parameters::Range range = parameters_.shard_range(id);
    if (range.begin == range.end) continue;
    const std::string& name = parameters_.spec(id).name;
    add(name, parameters_.master_shard(id));
    for (std::size_t i = 0; i < parameters_.optimizer_tensors().size(); ++i) {
      add(name + parameters_.optimizer_tensors()[i].suffix, parameters_.optimizer_shard(i, id));
    }
  }
  for (ParamId id = 0; id < parameters_.num_buffers(); ++id) {
    const Tensor buffer = parameters_.buffer(id);
    add(parameters_.buffer_spec(id).name, buffer.reshape({buffer.num_elements()}), true);
  }
  return parts;
}

}  // namespace tessera
