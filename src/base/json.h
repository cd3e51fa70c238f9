// Reads JSON from files that may be hostile, and checks names of files in it.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace tessera {

/// The deepest nesting that parse_json accepts, far more than any format here needs. nlohmann-json parses and frees
/// without recursion, but it copies, compares and prints recursively. A file of a few hundred thousand '[' would
/// overflow the stack.
inline constexpr int kMaxJsonDepth = 64;

/// Parses the text of a file. `name` names the file in errors ("'a/b.json'"). Throws Error if the text is not JSON, is
/// nested deeper than kMaxJsonDepth, or has a name twice in one object. `Json` is nlohmann::json, or
/// nlohmann::ordered_json where the order of keys matters.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& name) {
  using Event = typename Json::parse_event_t;
  constexpr std::size_t kMaxShown = 200;              // characters of the file that a message shows
  std::vector<std::unordered_set<std::string>> keys;  // names seen so far in each object that is open
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
    // The library's message repeats the token that it could not read.
    fail("{}: not JSON, or damaged: {}", name, std::string_view(error.what()).substr(0, kMaxShown));
  }
}

/// Returns `value` as JSON. JSON has no NaN and no infinity: null stands for them.
inline nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

/// Returns the text of `json` for a file. JSON is UTF-8, but paths and typed text may hold any bytes: invalid ones
/// become replacement characters.
template <typename Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

/// Returns a checksum as 16 hexadecimal digits, because many JSON readers keep only 53 bits of a number.
inline std::string to_hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

/// Name of the field that holds the checksum of an object's other fields.
inline constexpr const char* kChecksumField = "checksum";

/// Returns the checksum of all fields except kChecksumField, in their order. A file stores this value in that field.
inline std::string checksum_of_rest(nlohmann::ordered_json object) {
  object.erase(kChecksumField);
  const std::string text = json_text(object);
  return to_hex(checksum(std::as_bytes(std::span(text))));
}

/// Describes a value in a message. The text is short and ASCII, so nothing in a file can send control codes to a
/// terminal.
template <typename Json>
std::string describe_json(const Json& value) {
  if (value.is_structured()) return value.type_name();
  constexpr std::size_t kMaxShown = 80;
  return value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace).substr(0, kMaxShown);
}

/// Reads the fields of a file's JSON object. It throws Error with the object's place if a field is missing or has
/// another type.
template <typename Json = nlohmann::json>
class JsonFields {
 public:
  /// `place` is "'a/b.json', $" for a file's top object; the place of its field x is then "'a/b.json', $.x".
  JsonFields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
    require(object.is_object(), "{}: expected an object, got {}", place_, describe_json(object));
  }

  const std::string& place() const { return place_; }
  std::string place_of(const char* name) const { return fmt::format("{}.{}", place_, name); }

  bool contains(const char* name) const { return object_.contains(name); }
  /// Returns null if the field is missing or is null.
  const Json* find(const char* name) const {
    const auto field = object_.find(name);
    return field == object_.end() || field->is_null() ? nullptr : &*field;
  }
  const Json& at(const char* name) const {
    const Json* field = find(name);
    require(field != nullptr, "{} is missing", place_of(name));
    return *field;
  }
  const std::string& text(const char* name) const {
    const Json& field = at(name);
    expect(field.is_string(), name, "a string", field);
    return field.template get_ref<const std::string&>();
  }
  /// Returns a whole number from 0 to `largest`.
  std::uint64_t count(const char* name, std::uint64_t largest = std::numeric_limits<std::uint64_t>::max()) const {
    const Json& field = at(name);
    expect(field.is_number_unsigned(), name, "a whole number", field);
    const auto value = field.template get<std::uint64_t>();
    require(value <= largest, "{}: {} is too large, expected at most {}", place_of(name), value, largest);
    return value;
  }
  double number(const char* name) const {
    const Json& field = at(name);
    expect(field.is_number(), name, "a number", field);
    return field.template get<double>();
  }
  bool flag(const char* name) const {
    const Json& field = at(name);
    expect(field.is_boolean(), name, "true or false", field);
    return field.template get<bool>();
  }
  /// Returns the number that to_hex wrote.
  std::uint64_t hex(const char* name) const {
    const std::string& digits = text(name);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    const bool is_whole = error == std::errc() && end == digits.data() + digits.size() && to_hex(value) == digits;
    expect(is_whole, name, "16 hexadecimal digits in lower case", at(name));
    return value;
  }
  /// Throws Error unless kChecksumField matches the object's other fields.
  void require_checksum() const {
    const std::string expected = to_hex(hex(kChecksumField)), found = checksum_of_rest(object_);
    require(found == expected, "{}: its content has checksum {}, expected {}: it was damaged, or edited by hand",
            place_, found, expected);
  }
  const Json& array(const char* name) const {
    const Json& field = at(name);
    expect(field.is_array(), name, "an array", field);
    return field;
  }

 private:
  void expect(bool holds, const char* name, const char* what, const Json& field) const {
    if (!holds) fail("{}: expected {}, got {}", place_of(name), what, describe_json(field));
  }

  const Json& object_;
  std::string place_;
};

/// Reads a file whose JSON object names its format and version. Returns nullopt if there is no such file. Throws Error
/// if it is damaged or has another format or version.
inline std::optional<nlohmann::json> read_json_file(const std::filesystem::path& path, const char* format,
                                                    std::uint64_t version) {
  std::error_code unreadable;
  if (!std::filesystem::exists(path, unreadable)) return std::nullopt;
  const std::string name = fmt::format("'{}'", path.string());
  auto json = parse_json(read_text_file(path), name);
  const JsonFields<> fields(json, name);
  require(fields.text("format") == format && fields.count("version") == version,
          "{}: expected format '{}', version {}, got '{}', version {}", name, format, version, fields.text("format"),
          fields.count("version"));
  return json;
}

/// Throws Error unless `name` is the plain name of a file. `where` is the file that gives it. A list of a folder's
/// files must not lead out of that folder.
inline void require_plain_name(const std::string& name, const std::string& where) {
  constexpr std::size_t kMaxName = 255;  // NAME_MAX of Linux
  const bool plain = !name.empty() && name != "." && name != ".." && name.size() <= kMaxName &&
                     name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
  constexpr std::size_t kMaxShown = 200;
  require(plain, "{}: expected the name of a file beside it, got '{}'", where,
          std::string_view(name).substr(0, kMaxShown));
}

}  // namespace tessera
