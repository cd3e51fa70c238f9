// JSON of files that may be hostile, and names of files in it.
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

/// JSON has no NaN and no infinity: null stands for them.
inline nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

/// For a file. JSON is UTF-8; paths and what people type may be any bytes, of which replacement characters are written.
template <typename Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

/// A checksum in JSON: 16 hexadecimal digits, because many readers keep only 53 bits of a number.
inline std::string to_hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

/// The field of an object that has the checksum of all its others.
inline constexpr const char* kChecksumField = "checksum";

/// Returns the checksum of all fields but kChecksumField, in their order: what a file with this object has as that
/// field.
inline std::string checksum_of_rest(nlohmann::ordered_json object) {
  object.erase(kChecksumField);
  const std::string text = json_text(object);
  return to_hex(checksum(std::as_bytes(std::span(text))));
}

/// A value in a message: short, and without anything that a terminal would obey, whatever the file holds.
template <typename Json>
std::string describe_json(const Json& value) {
  if (value.is_structured()) return value.type_name();
  constexpr std::size_t kMaxShown = 80;
  return value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace).substr(0, kMaxShown);
}

/// An object of a file, and where it is. A field that is missing or has another type is an Error that says so.
template <typename Json = nlohmann::json>
class JsonFields {
 public:
  /// `place`: "'a/b.json', $" for the file's own object; its field x is "'a/b.json', $.x".
  JsonFields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
    require(object.is_object(), "{}: expected an object, got {}", place_, describe_json(object));
  }

  const std::string& place() const { return place_; }
  std::string place_of(const char* name) const { return fmt::format("{}.{}", place_, name); }

  bool contains(const char* name) const { return object_.contains(name); }
  /// Null if it is missing or is null.
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
  /// A whole number from 0 to `largest`.
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
  /// What to_hex has made.
  std::uint64_t hex(const char* name) const {
    const std::string& digits = text(name);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    const bool is_whole = error == std::errc() && end == digits.data() + digits.size() && to_hex(value) == digits;
    expect(is_whole, name, "16 hexadecimal digits in lower case", at(name));
    return value;
  }
  /// Throws Error unless kChecksumField is right.
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

/// The object of a file that says its format and version; none if there is no such file. Throws Error if it is damaged,
/// or of another format or version.
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
