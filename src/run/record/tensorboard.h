// Event files for TensorBoard. A file is a sequence of records (TFRecord: length, its masked CRC-32C, bytes, their
// masked CRC-32C). Each record is a protobuf message Event (tensorflow/core/util/event.proto). The few fields that are
// needed are encoded here, because Debian's SentencePiece contains a protobuf, which another version in the same
// process breaks.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unix_time.h"

namespace tessera {

using Scalars = std::vector<std::pair<std::string, double>>;

class TensorBoardWriter {
 public:
  /// Returns the seconds since 1970.
  using WallClock = std::function<double()>;

  /// Creates `folder`/events.out.tfevents.<time>.<host>.<process>. A run that resumes writes a new file beside the old
  /// ones. TensorBoard then drops the old files' events of `first_step` and later. TensorBoard reads files in the order
  /// of their names. So <time> is the clock's time, or a second after that of the latest existing file. Throws Error.
  TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step, WallClock clock = unix_time);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  /// Writes the scalars of a step and flushes them. Throws Error if the file cannot be written.
  void write(std::int64_t step, const Scalars& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  void append(std::string_view record);

  std::filesystem::path path_;
  WallClock clock_;
  std::FILE* file_ = nullptr;
};

/// Returns the CRC-32C of the bytes (Castagnoli, RFC 3720 appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
