#include "run/record/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "system/host_name.h"

namespace tessera {
namespace {

constexpr std::string_view kNamePrefix = "events.out.tfevents.";

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

/// Returns the masked checksum that TFRecord stores: the CRC, rotated and shifted. A plain CRC over bytes that contain
/// their own CRC is a bad one.
std::string masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes), masked = (crc >> 15 | crc << 17) + 0xa282ead8u;
  return {reinterpret_cast<const char*>(&masked), sizeof(masked)};
}

// Protobuf's wire format (protobuf.dev/programming-guides/encoding). A field is a key, number << 3 | type, and a value.
enum class WireType : std::uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& message, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) message.push_back(static_cast<char>(value | 0x80));
  message.push_back(static_cast<char>(value));
}

void put_key(std::string& message, std::uint64_t number, WireType type) {
  put_varint(message, number << 3 | static_cast<std::uint64_t>(type));
}

void put_bytes(std::string& message, std::uint64_t number, std::string_view bytes) {
  put_key(message, number, WireType::kBytes);
  put_varint(message, bytes.size());
  message += bytes;
}

template <typename T>
void put_fixed(std::string& message, std::uint64_t number, WireType type, T value) {
  static_assert(std::endian::native == std::endian::little);
  put_key(message, number, type);
  message.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Field numbers of event.proto and summary.proto.
namespace field {
constexpr std::uint64_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;  // Event
constexpr std::uint64_t kSummaryValue = 1;                                                          // Summary
constexpr std::uint64_t kTag = 1, kSimpleValue = 2;                                                 // Summary.Value
constexpr std::uint64_t kStatus = 1;                                                                // SessionLog
}  // namespace field
constexpr std::uint64_t kSessionStart = 1;

/// Returns an Event with the field `what`.
std::string event(double wall_time, std::int64_t step, std::uint64_t what, std::string_view content) {
  std::string message;
  put_fixed(message, field::kWallTime, WireType::kFixed64, wall_time);
  if (step != 0) {  // zeros are left out
    put_key(message, field::kStep, WireType::kVarint);
    put_varint(message, static_cast<std::uint64_t>(step));
  }
  put_bytes(message, what, content);
  return message;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<std::uint8_t>(byte)) & 0xff];
  return ~crc;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step, WallClock clock)
    : clock_(std::move(clock)) {
  create_folder(folder);
  auto time = static_cast<std::int64_t>(clock_());
  for (const auto& entry : entries_of(folder)) {
    const std::string other = entry.path().filename().string();
    if (other.starts_with(kNamePrefix)) {
      time = std::max<std::int64_t>(time, std::strtoll(other.c_str() + kNamePrefix.size(), nullptr, 10) + 1);
    }
  }
  path_ = folder / fmt::format("{}{:010}.{}.{}", kNamePrefix, time, host_name(), static_cast<int>(getpid()));
  file_ = std::fopen(path_.c_str(), "wb");
  if (file_ == nullptr) throw SystemError(fmt::format("open '{}'", path_.string()), errno);
  append(event(clock_(), 0, field::kFileVersion, "brain.Event:2"));
  std::string start;
  put_key(start, field::kStatus, WireType::kVarint);
  put_varint(start, kSessionStart);
  append(event(clock_(), first_step, field::kSessionLog, start));
}

TensorBoardWriter::~TensorBoardWriter() { std::fclose(file_); }

void TensorBoardWriter::write(std::int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;
    put_bytes(value, field::kTag, tag);
    put_fixed(value, field::kSimpleValue, WireType::kFixed32, static_cast<float>(number));
    put_bytes(summary, field::kSummaryValue, value);
  }
  append(event(clock_(), step, field::kSummary, summary));
}

void TensorBoardWriter::append(std::string_view record) {
  const std::uint64_t size = record.size();
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += masked_crc(bytes);
  bytes += record;
  bytes += masked_crc(record);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size() && std::fflush(file_) == 0;
  if (!written) throw SystemError(fmt::format("write '{}'", path_.string()), errno);
}

}  // namespace tessera
