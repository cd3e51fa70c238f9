// Event files for TensorBoard: a sequence of records (TFRecord: length, masked CRC-32C of it, bytes, masked CRC-32C of
// them), each a protobuf message Event (tensorflow/core/util/event.proto). The few fields that are needed are encoded
// here: Debian's SentencePiece carries a protobuf of its own inside, which another version in the same process breaks.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

using Scalars = std::vector<std::pair<std::string, double>>;

class TensorBoardWriter {
 public:
  /// Seconds since 1970.
  using WallClock = std::function<double()>;

  /// Creates `folder`/events.out.tfevents.<time>.<host>.<process>. A run that resumes writes a new file beside the old
  /// ones; TensorBoard then drops what those have of `first_step` and later. TensorBoard reads files in the order of
  /// their names, so <time> is the clock's, or a second after the latest file that is there. Throws Error.
  TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step, WallClock clock = system_clock());
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  /// Writes the scalars of a step and flushes them. Throws Error if the file cannot be written.
  void write(std::int64_t step, const Scalars& scalars);

  const std::filesystem::path& path() const { return path_; }
  static WallClock system_clock();

 private:
  void append(std::string_view record);

  std::filesystem::path path_;
  WallClock clock_;
  std::FILE* file_ = nullptr;
};

/// CRC-32C (Castagnoli, RFC 3720 appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
