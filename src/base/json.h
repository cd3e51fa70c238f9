// JSON of files that may be hostile, and names of files in it. A folder that includes this links nlohmann-json itself.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/error.h"

namespace tessera {

/// Far more than any format here nests. nlohmann-json parses and frees without recursion, but it copies, compares and
/// prints with it: a file of a few hundred thousand '[' would overflow the stack.
inline constexpr int kMaxJsonDepth = 64;

/// Parses the text of a file. `name` names the file in errors ("'a/b.json'"). Throws Error for what is not JSON, for
/// JSON nested deeper than kMaxJsonDepth, and for a name that occurs twice in an object.
///   Json: nlohmann::json, or nlohmann::ordered_json where the order of keys counts
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& name) {
  using Event = typename Json::parse_event_t;
  constexpr std::size_t kMaxShown = 200;              // of what the file says
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Event event, Json& value) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    require(!opens || depth < kMaxJsonDepth, "{}: JSON nested deeper than {} levels", name, kMaxJsonDepth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      const auto& key = value.template get_ref<const std::string&>();
      require(keys.back().insert(key).second, "{}: the name '{}' occurs twice in an object", name,
              std::string_view(key).substr(0, kMaxShown));
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const nlohmann::json::exception& error) {
    // The library's text repeats the token that it could not read.
    fail("{}: not JSON, or damaged: {}", name, std::string_view(error.what()).substr(0, kMaxShown));
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
