// A table of configuration keys. Each key is written down once, with its target, its type and its help. TOML files,
// --section.key=value overrides, printing and the answer to an unknown key all come from the table. Keys of another
// program that have no meaning here, or not yet, are entries too. So that program's files can be read.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// Says which numbers a key may have: those from `lowest` to `highest`, and `special` if there is one. NaN is never
/// among them.
struct NumberRange {
  double lowest;
  bool without_lowest = false;
  double highest = std::numeric_limits<double>::max();
  std::optional<double> special = {};
  std::string expected;  // for messages and documentation, as "0 to 1, or -1 for all steps"

  bool has(double number) const {
    const bool inside = without_lowest ? lowest < number : lowest <= number;
    return (inside && number <= highest) || number == special;
  }
};

inline NumberRange above_zero() { return {.lowest = 0.0, .without_lowest = true, .expected = "more than 0"}; }
inline NumberRange zero_or_more() { return {.lowest = 0.0, .expected = "0 or more"}; }

/// Throws Error if a key's number is not in its range.
void require_in_range(std::string_view key, std::int64_t number, const NumberRange& range);
void require_in_range(std::string_view key, double number, const NumberRange& range);

class ConfigTable {
 public:
  using List = std::vector<std::string>;
  using Lists = std::vector<List>;
  using Value = std::variant<bool, std::int64_t, double, std::string, List, Lists>;
  using Range = std::optional<NumberRange>;  // not set: any number

  /// Adds a key. `key` is "section.name". The targets must outlive the table.
  void add(std::string key, bool& target, std::string help);
  /// Adds a key for a whole number. On the command line, and in a string of TOML, it may have a unit, as 32k
  /// (parse_count.h).
  void add(std::string key, std::int64_t& target, std::string help, Range range = {});
  void add(std::string key, double& target, std::string help, Range range = {});
  void add(std::string key, float& target, std::string help, Range range = {});
  void add(std::string key, std::string& target, std::string help);
  /// Adds a key for a list. In TOML it is an array of strings, or one string with commas. On the command line it is
  /// a,b,c.
  void add(std::string key, List& target, std::string help);
  /// Adds a key for lists. In TOML it is an array of arrays of strings, or one string. On the command line it is
  /// a,b;c,d.
  void add(std::string key, Lists& target, std::string help);

  enum class Form { kFlag, kValue };  // whether "--key" can stand alone

  /// Adds a key that may have any value, which has no effect. `why` is for people. "section.*" stands for all keys
  /// below.
  void ignore(std::string key, Form form, std::string why);
  /// Adds a key whose feature does not exist. Setting it is an Error that says so, unless its value asks for nothing:
  /// false, "" or [].
  void refuse(std::string key, Form form, std::string feature);

  /// Adds a key that may have the values `accepted` only, as text. The program does what they ask for and nothing else.
  /// Another value is an Error that gives `why`.
  void accept_only(std::string key, Form form, List accepted, std::string why);

  /// Adds a key whose value is a string out of a list. Each string stands for a value of the target.
  template <typename Choice>
  void add(std::string key, Choice& target, const std::vector<std::pair<std::string, Choice>>& choices,
           std::string help) {
    std::vector<std::string> names;
    for (const auto& [name, value] : choices) names.push_back(name);
    add_choice(
        std::move(key), std::move(names), [&target, choices](std::size_t i) { target = choices[i].second; },
        [&target, choices] {
          std::size_t i = 0;
          while (i + 1 < choices.size() && choices[i].second != target) ++i;
          return i;
        },
        std::move(help));
  }

  /// Sets every key that the TOML text holds. `source` names the text in errors, which have the line. Throws Error for
  /// invalid TOML, values of a wrong type and unknown keys, with the nearest known one.
  void apply_toml(std::string_view text, const std::string& source);

  /// Sets one key from "section.key=value". A boolean key alone means true, and "section.no_key" means false. "-" in a
  /// key is read as "_".
  void apply_override(std::string_view assignment);

  /// Returns whether "--key value" gives the key that value. A key that stands alone may precede another word.
  bool takes_value(std::string_view key, std::string_view value) const;

  /// Returns whether a file or an override has set the key.
  bool was_set(std::string_view key) const;

  /// Returns the ignored keys that were set to something other than false, "" or [].
  const std::vector<std::string>& ignored() const { return ignored_; }

  /// Throws Error for the first key whose number is not in its range.
  void require_in_range() const;

  /// Returns all keys with their present values, as TOML that apply_toml reads back, if texts are UTF-8.
  std::string to_toml() const;

  struct Description {
    std::string key, type, value, help;
  };
  /// Returns all keys in order, with their present values, for documentation.
  std::vector<Description> describe() const;
  /// Returns the keys without a target. `type` is "ignored", "refused" or the accepted values. `help` says why.
  std::vector<Description> describe_foreign() const;

 private:
  struct Entry {
    std::string key;
    std::string help;
    std::string type;
    std::function<void(const Value&)> set;  // has the entry's type
    std::function<Value()> get;
    Value example;                     // of the entry's type
    std::vector<std::string> choices;  // empty: any value
    Range range = {};
  };
  /// Describes a key without a target.
  struct Foreign {
    std::string key;
    Form form;
    std::string why;
    bool refused;
    List accepted;  // empty: any value
  };

  void add_entry(std::string key, std::string help, std::string type, Value example,
                 std::function<void(const Value&)> set, std::function<Value()> get, Range range = {});
  void add_choice(std::string key, std::vector<std::string> names, std::function<void(std::size_t)> set,
                  std::function<std::size_t()> get, std::string help);
  const Entry* known(std::string_view key) const;
  const Foreign* foreign(std::string_view key) const;
  const Entry& find(std::string_view key, const std::string& where) const;
  void assign(const Entry& entry, const Value& value, const std::string& where);
  /// Accepts or refuses the value of a key without a target. `value` is null if it is of a type that no key has.
  void pass_over(const Foreign& foreign, std::string_view key, const Value* value, const std::string& where);

  std::vector<Entry> entries_;
  std::vector<Foreign> foreign_;
  std::vector<std::string> ignored_;
  std::vector<std::string> set_;  // keys of entries
};

}  // namespace tessera
