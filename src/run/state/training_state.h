// The bytes that a training step changes on a rank: masters, the optimizer's state and the experts' biases, each as in
// its flat buffer. Copies in memory hold these bytes, and replicas compare their checksums.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "params/parameters.h"

namespace tessera {

/// Returns the checksum that TrainingState gives to its bytes: XXH3 over the XXH3 of every piece of 256 KiB. Several
/// threads can compute it.
std::uint64_t checksum_of_pieces(std::span<const std::byte> bytes);

/// Views bytes of the host as a tensor of int32, to send it or to receive into it. The bytes must be writable to
/// receive.
Tensor words_of(std::span<const std::byte> bytes);

class TrainingState {
 public:
  /// `parameters` must outlive the object. They need not be allocated for num_bytes().
  explicit TrainingState(const Parameters& parameters) : parameters_(parameters) {}

  std::size_t num_bytes() const;

  struct Checksums {
    std::uint64_t all = 0;      // checksum_of_pieces() of all bytes
    std::uint64_t buffers = 0;  // checksum of the experts' biases alone
  };
  /// Reads the state once and returns its checksums. Also copies it to `target`, of num_bytes(), unless that is null. A
  /// GPU's state is read through pinned memory on a separate stream, which does not wait for the computation's stream.
  /// So no step may be under way.
  Checksums read(std::byte* target = nullptr);
  /// Starts to copy a GPU's state to `target`, pinned memory of num_bytes(), and records `copied` after the copy. The
  /// state must not change before that. Other streams can copy to the host meanwhile.
  void start_copy(std::byte* target, cuda::Event& copied);
  /// Returns what read() would return for the state that `bytes` is a copy of.
  Checksums checksums_of_copy(std::span<const std::byte> bytes) const;
  /// Sets the state. It does not refresh what layers compute with (Model::refresh_weights).
  void write(std::span<const std::byte> bytes);

  /// Describes a part of the state that replicas have in common: "layers.3.attention.wo.weight.exp_avg" or a buffer.
  struct Part {
    std::string name;
    std::uint64_t checksum = 0;
    bool is_buffer = false;
  };
  /// Returns the parts, buffers last. The order is the same on all ranks that hold the same parameters.
  std::vector<Part> parts() const;

 private:
  /// Returns masters, the optimizer's tensors and buffers.
  std::vector<Tensor> tensors() const;

  /// Returns the streams on which a GPU's state is read.
  const std::array<cuda::Stream, 2>& streams();

  const Parameters& parameters_;
  std::optional<std::array<cuda::Stream, 2>> streams_;
  std::array<Buffer, 2> staging_;  // for a GPU's state; allocated by the first read()
};

}  // namespace tessera
