#include "base/json.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"

namespace tessera {
namespace {

template <typename Json>
std::string json_text_in_ascii(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

}  // namespace

template <typename Json>
Json parse_json(std::string_view text, const std::string& name) {
  using Event = typename Json::parse_event_t;
  std::vector<std::unordered_set<std::string>> keys;  // names seen so far in each object that is open
  const auto check = [&](int depth, Event event, Json& value) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    require(!opens || depth < kMaxJsonDepth, "{}: JSON nested deeper than {} levels", name, kMaxJsonDepth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      const auto& key = value.template get_ref<const std::string&>();
      require(keys.back().insert(key).second, "{}: the name '{}' occurs twice in an object", name, printable(key));
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const nlohmann::json::exception& error) {
    // The library's message repeats the token that it could not read.
    fail("{}: not JSON, or damaged: {}", name, printable(json_problem(error)));
  }
}

std::string_view json_problem(const nlohmann::json::exception& error) {
  std::string_view text = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
  if (text.starts_with("[json.exception.")) text.remove_prefix(std::min(text.find("] ") + 2, text.size()));
  return text;
}

nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

template <typename Json>
std::string json_text(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string to_hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

std::string checksum_of_rest(nlohmann::ordered_json object) {
  object.erase(kChecksumField);
  const std::string text = json_text(object);
  return to_hex(checksum(std::as_bytes(std::span(text))));
}

template <typename Json>
std::string describe_json(const Json& value) {
  if (value.is_structured()) return value.type_name();
  constexpr std::size_t kMaxValue = 80;
  return json_text_in_ascii(value).substr(0, kMaxValue);
}

template <typename Json>
JsonFields<Json>::JsonFields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
  require(object.is_object(), "{}: expected an object, got {}", place_, describe_json(object));
}

template <typename Json>
std::string JsonFields<Json>::place_of(const char* name) const {
  return fmt::format("{}.{}", place_, printable(name));
}

template <typename Json>
bool JsonFields<Json>::contains(const char* name) const {
  return object_.contains(name);
}

template <typename Json>
const Json* JsonFields<Json>::find(const char* name) const {
  const auto field = object_.find(name);
  return field == object_.end() || field->is_null() ? nullptr : &*field;
}

template <typename Json>
const Json& JsonFields<Json>::at(const char* name) const {
  const Json* field = find(name);
  require(field != nullptr, "{} is missing", place_of(name));
  return *field;
}

template <typename Json>
const std::string& JsonFields<Json>::text(const char* name) const {
  const Json& field = at(name);
  expect(field.is_string(), name, "a string", field);
  return field.template get_ref<const std::string&>();
}

template <typename Json>
std::uint64_t JsonFields<Json>::count(const char* name, std::uint64_t largest) const {
  const Json& field = at(name);
  expect(field.is_number_unsigned(), name, "a whole number", field);
  const auto value = field.template get<std::uint64_t>();
  require(value <= largest, "{}: {} is too large, expected at most {}", place_of(name), value, largest);
  return value;
}

template <typename Json>
double JsonFields<Json>::number(const char* name) const {
  const Json& field = at(name);
  expect(field.is_number(), name, "a number", field);
  return field.template get<double>();
}

template <typename Json>
bool JsonFields<Json>::flag(const char* name) const {
  const Json& field = at(name);
  expect(field.is_boolean(), name, "true or false", field);
  return field.template get<bool>();
}

template <typename Json>
std::uint64_t JsonFields<Json>::hex(const char* name) const {
  const std::string& digits = text(name);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  const bool is_whole = error == std::errc() && end == digits.data() + digits.size() && to_hex(value) == digits;
  expect(is_whole, name, "16 hexadecimal digits in lower case", at(name));
  return value;
}

template <typename Json>
void JsonFields<Json>::require_checksum() const {
  const std::string expected = to_hex(hex(kChecksumField)), found = checksum_of_rest(object_);
  require(found == expected, "{}: its content has checksum {}, expected {}: it was damaged, or edited by hand", place_,
          found, expected);
}

template <typename Json>
const Json& JsonFields<Json>::array(const char* name) const {
  const Json& field = at(name);
  expect(field.is_array(), name, "an array", field);
  return field;
}

template <typename Json>
void JsonFields<Json>::expect(bool holds, const char* name, const char* what, const Json& field) const {
  if (!holds) fail("{}: expected {}, got {}", place_of(name), what, describe_json(field));
}

std::optional<nlohmann::json> read_json_file(const std::filesystem::path& path, const char* format,
                                             std::uint64_t version) {
  if (!path_exists(path)) return std::nullopt;
  const std::string name = fmt::format("'{}'", path.string());
  auto json = parse_json(read_text_file(path), name);
  const JsonFields<> fields(json, name);
  require(fields.text("format") == format && fields.count("version") == version,
          "{}: expected format '{}', version {}, got '{}', version {}", name, format, version, fields.text("format"),
          fields.count("version"));
  return json;
}

void require_plain_name(const std::string& name, const std::string& where) {
  constexpr std::size_t kMaxName = 255;  // NAME_MAX of Linux
  const bool plain = !name.empty() && name != "." && name != ".." && name.size() <= kMaxName &&
                     std::ranges::none_of(
                         name, [](char ch) { return ch == '/' || std::iscntrl(static_cast<unsigned char>(ch)) != 0; });
  require(plain, "{}: expected the name of a file beside it, got '{}'", where, printable(name));
}

template nlohmann::json parse_json(std::string_view, const std::string&);
template nlohmann::ordered_json parse_json(std::string_view, const std::string&);
template std::string json_text(const nlohmann::json&, int);
template std::string json_text(const nlohmann::ordered_json&, int);
template std::string describe_json(const nlohmann::json&);
template std::string describe_json(const nlohmann::ordered_json&);
template class JsonFields<nlohmann::json>;
template class JsonFields<nlohmann::ordered_json>;

}  // namespace tessera
