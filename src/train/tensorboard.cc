#include "train/tensorboard.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "tensorboard.pb.h"

namespace tessera {
namespace {

constexpr std::uint32_t kCastagnoli = 0x82F63B78u;  // reflected

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCastagnoli : 0);
    table[byte] = crc;
  }
  return table;
}();

/// TFRecord stores checksums turned and shifted, because a checksum over bytes that hold their own is a bad one.
std::string masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes), masked = (crc >> 15 | crc << 17) + 0xa282ead8u;
  return {reinterpret_cast<const char*>(&masked), sizeof(masked)};
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<std::uint8_t>(byte)) & 0xff];
  return ~crc;
}

TensorBoardWriter::WallClock TensorBoardWriter::system_clock() {
  return [] { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); };
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step, WallClock clock)
    : clock_(std::move(clock)) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require(!error, "cannot create the folder '{}': {}", folder.string(), error.message());
  // The readers take a folder's files in the order of their names.
  const auto name = fmt::format("events.out.tfevents.{:010}.{}.{}", static_cast<std::int64_t>(clock_()), host_name(),
                                static_cast<int>(getpid()));
  path_ = folder / name;
  for (int i = 1; std::filesystem::exists(path_); ++i) path_ = folder / fmt::format("{}.{}", name, i);
  file_ = std::fopen(path_.c_str(), "wb");
  require(file_ != nullptr, "cannot open '{}': {}", path_.string(), std::strerror(errno));
  tensorboard::Event version;
  version.set_wall_time(clock_());
  version.set_file_version("brain.Event:2");
  append(version.SerializeAsString());
  tensorboard::Event start;
  start.set_wall_time(clock_());
  start.set_step(first_step);
  start.mutable_session_log()->set_status(tensorboard::SessionLog::START);
  append(start.SerializeAsString());
}

TensorBoardWriter::~TensorBoardWriter() { std::fclose(file_); }

void TensorBoardWriter::write(std::int64_t step, const Scalars& scalars) {
  tensorboard::Event event;
  event.set_wall_time(clock_());
  event.set_step(step);
  for (const auto& [tag, number] : scalars) {
    tensorboard::Summary::Value& value = *event.mutable_summary()->add_value();
    value.set_tag(tag);
    value.set_simple_value(static_cast<float>(number));
  }
  append(event.SerializeAsString());
}

void TensorBoardWriter::append(std::string_view record) {
  const std::uint64_t size = record.size();
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += masked_crc(bytes);
  bytes += record;
  bytes += masked_crc(record);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size() && std::fflush(file_) == 0;
  require(written, "cannot write '{}': {}", path_.string(), std::strerror(errno));
}

}  // namespace tessera
