// Helpers that the fuzz targets share. A target is one file, NAME.cc, with LLVMFuzzerTestOneInput. It gives the bytes
// to a reader and accepts only a tessera::Error that names the file. Anything else ends the process, which is a
// finding: another exception, a sanitizer's report, an allocation above the limit, or a message that does not name the
// file.
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

/// Returns the bytes as text.
inline std::string_view as_text(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Returns the same JSON with the checksum of its content. Returns an empty text if it is not an object.
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

/// Writes `content` to the file called `name` in this process's own folder, and returns its path. The folder is in
/// memory if the machine has /dev/shm. It is removed when the process ends normally.
std::filesystem::path write_input(const std::string& name, std::string_view content);

/// Returns the folder of write_input.
const std::filesystem::path& input_folder();

/// Ends the process with a message, which is a finding.
[[noreturn]] void found(const std::string& what);

/// Reads every byte, so that a span that leaves its memory is noticed.
void touch(std::span<const std::byte> bytes);

/// Calls `read`. An Error whose message contains `name` is a good answer to a bad file.
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
