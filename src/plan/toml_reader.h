// Reads files of the planner in TOML, and says in which file and at which key something is wrong.
#pragma once

#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace tessera {

/// Reads a table of a file. Errors name the file and the key.
class TomlReader {
 public:
  TomlReader(const toml::table& table, std::string where) : table_(table), where_(std::move(where)) {}

  double number(std::string_view key, double least = 0.0, double most = 1e9) {
    const toml::node_view<const toml::node> node = known(key);
    require(static_cast<bool>(node), "{}.{} is missing; expected a number from {:g} to {:g}", where_, key, least, most);
    const std::optional<double> value = node.value<double>();
    require(value.has_value(), "{}.{} must be a number", where_, key);
    require(*value >= least && *value <= most, "{}.{} is {:g}; expected a number from {:g} to {:g}", where_, key,
            *value, least, most);
    return *value;
  }
  /// Returns a part of something.
  double part(const char* key) { return number(key, 0.0, 1.0); }
  double number_or(const char* key, double otherwise) { return table_.contains(key) ? number(key) : otherwise; }
  bool flag_or(const char* key, bool otherwise) {
    if (!table_.contains(key)) return otherwise;
    const std::optional<bool> value = known(key).value<bool>();
    require(value.has_value(), "{}.{} must be true or false", where_, key);
    return *value;
  }
  int count(const char* key) {
    const double value = number(key, 1.0, 1e6);
    require(value == std::floor(value), "{}.{} must be a whole number, and is {:g}", where_, key, value);
    return static_cast<int>(value);
  }
  std::string text(const char* key) {
    const std::optional<std::string> value = known(key).value<std::string>();
    require(value.has_value() && !value->empty(), "{}.{} must be a text", where_, key);
    return *value;
  }
  std::vector<std::string> texts(const char* key) {
    std::vector<std::string> result;
    const toml::array* array = known(key).as_array();
    require(array != nullptr && !array->empty(), "{}.{} must be an array of one text or more", where_, key);
    for (const toml::node& node : *array) {
      const std::optional<std::string> value = node.value<std::string>();
      require(value.has_value(), "{}.{} must be an array of texts", where_, key);
      result.push_back(*value);
    }
    return result;
  }
  /// Returns a text that is one of `choices`.
  std::string one_of(const char* key, std::span<const std::string_view> choices) {
    std::string value = text(key);
    require(std::ranges::count(choices, value) > 0, "{}.{} is '{}'; expected one of {}", where_, key, value,
            fmt::join(choices, ", "));
    return value;
  }
  /// Throws Error if the table has none of these keys.
  void require_one_of(std::initializer_list<const char*> keys) const {
    require(std::ranges::any_of(keys, [&](const char* key) { return has(key); }), "{} needs one of {}", where_,
            fmt::join(keys, ", "));
  }
  bool has(std::string_view key) const { return table_.contains(key); }
  /// Returns the file and the table, for errors.
  const std::string& where() const { return where_; }
  TomlReader table(const char* key) {
    const toml::table* table = known(key).as_table();
    require(table != nullptr, "{}.{} must be a table", where_, key);
    return {*table, where_ + "." + key};
  }
  template <typename Each>
  void each_table(const char* key, const Each& each) {
    const toml::array* array = known(key).as_array();
    require(array != nullptr && !array->empty(), "{}.{} must be an array of tables: [[{}]]", where_, key, key);
    std::size_t idx = 0;
    for (const toml::node& node : *array) {
      require(node.is_table(), "{}.{} must be an array of tables: [[{}]]", where_, key, key);
      each(TomlReader(*node.as_table(), fmt::format("{}.{}[{}]", where_, key, idx++)));
    }
  }
  /// Throws Error if the table has a key that was not asked for.
  void require_all_known() const {
    for (const auto& [key, value] : table_) {
      require(known_.contains(std::string(key.str())), "{}.{}: no such key", where_, key.str());
    }
  }

 private:
  toml::node_view<const toml::node> known(std::string_view key) {
    known_.emplace(key);
    return table_[key];
  }

  const toml::table& table_;
  std::string where_;
  std::set<std::string> known_;
};

/// Parses a file. Throws Error, which names the file and the line, if that is not possible.
inline toml::table parse_toml_file(const std::filesystem::path& path) {
  try {
    return toml::parse(read_text_file(path), path.string());
  } catch (const toml::parse_error& error) {
    fail("'{}', line {}: {}", path.string(), error.source().begin.line, error.description());
  }
}

}  // namespace tessera
