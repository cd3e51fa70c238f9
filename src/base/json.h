// JSON of files that may be hostile, and names of files in it. A folder that includes this links nlohmann-json itself.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/error.h"

namespace tessera {

/// Far more than any format here nests. nlohmann-json parses and frees without recursion, but it copies, compares and
/// prints with it: a file of a few hundred thousand '[' would overflow the stack.
inline constexpr int kMaxJsonDepth = 64;

/// Parses the text of a file. `name` names the file in errors ("'a/b.json'"). Throws Error for what is not JSON and for
/// JSON nested deeper than kMaxJsonDepth.
///   Json: nlohmann::json, or nlohmann::ordered_json where the order of keys counts
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& name) {
  using Event = typename Json::parse_event_t;
  const auto check_depth = [&](int depth, Event event, Json&) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    require(!opens || depth < kMaxJsonDepth, "{}: JSON nested deeper than {} levels", name, kMaxJsonDepth);
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const nlohmann::json::exception& error) {
    constexpr std::size_t kMaxReason = 200;  // the library's text repeats the token that it could not read
    fail("{}: not JSON, or damaged: {}", name, std::string_view(error.what()).substr(0, kMaxReason));
  }
}

/// Throws Error unless `name`, which the file called `where` gives, is a plain name: a list of a folder's files must
/// not lead out of the folder.
inline void require_plain_name(const std::string& name, const std::string& where) {
  constexpr std::size_t kMaxName = 255;  // NAME_MAX of Linux
  const bool plain = !name.empty() && name != "." && name != ".." && name.size() <= kMaxName &&
                     name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
  constexpr std::size_t kMaxShown = 200;
  require(plain, "{}: expected the name of a file beside it, got '{}'", where,
          std::string_view(name).substr(0, kMaxShown));
}

}  // namespace tessera
