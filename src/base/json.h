// Reads JSON from files that may be hostile, and checks names of files in it. The templates exist for nlohmann::json
// and nlohmann::ordered_json, which keeps the order of keys. json.cc compiles them once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The deepest nesting that parse_json accepts, far more than any format here needs. nlohmann-json parses and frees
/// without recursion, but it copies, compares and prints recursively. A file of a few hundred thousand '[' would
/// overflow the stack.
inline constexpr int kMaxJsonDepth = 64;

/// Parses the text of a file. `name` names the file in errors ("'a/b.json'"). Throws Error if the text is not JSON, is
/// nested deeper than kMaxJsonDepth, or has a name twice in one object.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& name);

/// Returns what the library says of an error, without the library's name for it.
std::string_view json_problem(const nlohmann::json::exception& error);

/// Returns `value` as JSON. JSON has no NaN and no infinity, so null stands for them.
nlohmann::ordered_json json_number(double value);

/// Returns the text of `json` for a file. JSON is UTF-8, but paths and typed text may hold any bytes. Invalid ones
/// become replacement characters.
template <typename Json>
std::string json_text(const Json& json, int indent = -1);

/// Returns a checksum as 16 hexadecimal digits, because many JSON readers keep only 53 bits of a number.
std::string to_hex(std::uint64_t value);

/// The name of the field that holds the checksum of an object's other fields.
inline constexpr const char* kChecksumField = "checksum";

/// Returns the checksum of all fields except kChecksumField, in their order. A file stores this value in that field.
std::string checksum_of_rest(nlohmann::ordered_json object);

/// Describes a value in a message. The text is short and ASCII, so nothing in a file can send control codes to a
/// terminal.
template <typename Json>
std::string describe_json(const Json& value);

/// Reads the fields of a file's JSON object. It throws Error with the object's place if a field is missing or has
/// another type.
template <typename Json = nlohmann::json>
class JsonFields {
 public:
  /// `place` is "'a/b.json', $" for a file's top object. The place of its field x is then "'a/b.json', $.x".
  JsonFields(const Json& object, std::string place);

  const std::string& place() const { return place_; }
  std::string place_of(const char* name) const;

  bool contains(const char* name) const;
  /// Returns null if the field is missing or is null.
  const Json* find(const char* name) const;
  const Json& at(const char* name) const;
  const std::string& text(const char* name) const;
  /// Returns a whole number from 0 to `largest`.
  std::uint64_t count(const char* name, std::uint64_t largest = std::numeric_limits<std::uint64_t>::max()) const;
  double number(const char* name) const;
  bool flag(const char* name) const;
  /// Returns the number that to_hex wrote.
  std::uint64_t hex(const char* name) const;
  /// Throws Error unless kChecksumField matches the object's other fields.
  void require_checksum() const;
  const Json& array(const char* name) const;

 private:
  void expect(bool holds, const char* name, const char* what, const Json& field) const;

  const Json& object_;
  std::string place_;
};

/// Reads a file whose JSON object names its format and version. Returns nullopt if there is no such file. Throws Error
/// if it is damaged or has another format or version, and SystemError if it cannot be read.
std::optional<nlohmann::json> read_json_file(const std::filesystem::path& path, const char* format,
                                             std::uint64_t version);

/// Throws Error unless `name` is the plain name of a file. `where` is the file that gives it. A list of a folder's
/// files must not lead out of that folder.
void require_plain_name(const std::string& name, const std::string& where);

}  // namespace tessera
