// All that a training step changes on a rank, as bytes: masters, the optimizer's state and the experts' biases, each as it
// lies in its flat buffer. Copies in memory hold these bytes, and replicas compare their checksums.
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

/// The checksum that TrainingState gives to its bytes: XXH3 over the XXH3 of every piece of 256 KiB, so that several
/// threads can compute it.
std::uint64_t checksum_of_pieces(std::span<const std::byte> bytes);

/// Views bytes of the host as a tensor of int32, to send it or to receive into it. The bytes must be writable to
/// receive.
Tensor words_of(std::span<const std::byte> bytes);

class TrainingState {
 public:
  /// `parameters` must stay. They need not be allocated for num_bytes().
  explicit TrainingState(const Parameters& parameters) : parameters_(parameters) {}

  std::size_t num_bytes() const;

  struct Checksums {
    std::uint64_t all = 0;      // as checksum_of_pieces() of the bytes
    std::uint64_t buffers = 0;  // of the experts' biases alone
  };
  /// Reads the state once. Also copies it to `target`, of num_bytes(), unless that is null. The state of a GPU comes
  /// through pinned memory on a stream of its own, which does not wait for the computation's: no step may be under way.
  Checksums read(std::byte* target = nullptr);
  /// Starts to copy a GPU's state to `target`, pinned memory of num_bytes(), and puts `copied` behind that. The state
  /// must not change before.
  void start_copy(std::byte* target, cuda::Event& copied);
  /// What read() would return for the state whose copy `bytes` is.
  Checksums checksums_of_copy(std::span<const std::byte> bytes) const;
  /// Sets the state. What layers compute with (Model::refresh_weights) is not made anew.
  void write(std::span<const std::byte> bytes);

  /// A part that replicas have in common: "layers.3.attention.wo.weight.exp_avg" or a buffer.
  struct Part {
    std::string name;
    std::uint64_t checksum = 0;
    bool is_buffer = false;
  };
  /// The parts one by one, buffers last, in the same order on all ranks that hold the same parameters.
  std::vector<Part> parts() const;

 private:
  /// Masters, first and second moments, buffers.
  std::vector<Tensor> tensors() const;

  const Parameters& parameters_;
  /// On which a GPU's state leaves it.
  const cuda::Stream& stream();

  std::optional<cuda::Stream> stream_;
  std::array<Buffer, 2> staging_;  // of a GPU's state, from the first read() on
};

}  // namespace tessera
