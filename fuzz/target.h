// What the fuzz targets share. A target is one file, NAME.cc, with LLVMFuzzerTestOneInput; it gives the bytes to a
// reader and lets nothing pass but tessera::Error that names the file. Anything else ends the process, which is a
// finding: another exception, a sanitizer's report, an allocation above the limit, a message that does not say which
// file it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/json.h"

namespace tessera::fuzz {

/// The bytes as text.
inline std::string_view as_text(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// The same JSON with the checksum of its content; empty if it is not an object.
inline std::string with_checksum(std::string_view text) {
  try {
    auto json = parse_json<nlohmann::ordered_json>(text, "input");
    if (!json.is_object()) return {};
    json[kChecksumField] = checksum_of_rest(json);
    return json.dump();
  } catch (const Error&) {
    return {};
  }
}

/// Writes `content` to the file called `name` in a folder of this process's own, which is in memory where the machine
/// has /dev/shm, and returns its path. The folder goes when the process ends as it should.
std::filesystem::path write_input(const std::string& name, std::string_view content);

/// The folder of write_input.
const std::filesystem::path& input_folder();

/// Ends the process with a message: a finding.
[[noreturn]] void found(const std::string& what);

/// Reads every byte, so that a span that leaves its memory is noticed.
void touch(std::span<const std::byte> bytes);

/// Calls `read`. An Error whose message has `name` in it is a good answer to a bad file.
template <typename Read>
void read_hostile(std::string_view name, Read&& read) {
  try {
    read();
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(name) == std::string_view::npos) {
      found(fmt::format("an Error that does not name '{}': {}", name, error.what()));
    }
  }
}

}  // namespace tessera::fuzz
