#include "config/config_table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include "base/error.h"
#include "base/nearest.h"
#include "base/parse_count.h"
#include "base/parse_number.h"
#include "base/text.h"

namespace tessera {
namespace {

using Value = ConfigTable::Value;

std::string_view last_part(std::string_view key) { return key.substr(key.rfind('.') + 1); }

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string to_text(const Value& value) {
  struct Visitor {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(std::int64_t i) const { return fmt::format("{}", i); }
    std::string operator()(double d) const {
      // The shortest text that reads back to the same number, and looks like a float to TOML.
      std::string text = fmt::format("{}", d);
      if (text.find_first_of(".en") == std::string::npos) text += ".0";
      return text;
    }
    std::string operator()(const std::string& s) const { return quoted(s); }
    std::string operator()(const ConfigTable::List& list) const {
      std::vector<std::string> items;
      for (const std::string& item : list) items.push_back(quoted(item));
      return fmt::format("[{}]", fmt::join(items, ", "));
    }
    std::string operator()(const ConfigTable::Lists& lists) const {
      std::vector<std::string> items;
      for (const ConfigTable::List& list : lists) items.push_back((*this)(list));
      return fmt::format("[{}]", fmt::join(items, ", "));
    }
  };
  return std::visit(Visitor{}, value);
}

/// Returns a string as it is, a list with commas, and anything else as TOML.
std::string unquoted_text(const Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* list = std::get_if<ConfigTable::List>(&value)) return fmt::format("{}", fmt::join(*list, ","));
  return to_text(value);
}

std::string with_underscores(std::string_view key) {
  std::string result(key);
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

std::string_view without_quotes(std::string_view text) {
  const bool quoted = text.size() >= 2 && (text.front() == '"' || text.front() == '\'') && text.back() == text.front();
  return quoted ? text.substr(1, text.size() - 2) : text;
}

/// Returns the items of "a, b", and none of "".
ConfigTable::List split(std::string_view text, char separator = ',') {
  ConfigTable::List items;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    std::string_view item = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    if (!item.empty()) items.emplace_back(item);
  }
  return items;
}

/// Returns the lists of "a, b; c".
ConfigTable::Lists split_lists(std::string_view text) {
  ConfigTable::Lists lists;
  for (const std::string& list : split(text, ';')) lists.push_back(split(list));
  return lists;
}

/// Returns, for messages, how a value of the example's type is written. Returns "" where any text will do.
std::string expected_form(const Value& example) {
  if (std::holds_alternative<bool>(example)) return ": true or false";
  if (std::holds_alternative<std::int64_t>(example)) return fmt::format(": {}", kCountForm);
  if (std::holds_alternative<double>(example)) return ", as 0.1 or 4e-4";
  return "";
}

/// Returns the text of an override as a value of `example`'s type, or nullopt if it does not parse.
std::optional<Value> parse_as(const Value& example, std::string_view text) {
  if (std::holds_alternative<bool>(example)) {
    if (text == "true" || text == "True") return true;
    if (text == "false" || text == "False") return false;
    return std::nullopt;
  }
  if (std::holds_alternative<std::int64_t>(example)) {
    if (const auto count = parse_count(text)) return *count;
    return std::nullopt;
  }
  if (std::holds_alternative<double>(example)) {
    if (const auto number = parse_number<double>(text)) return *number;
    return std::nullopt;
  }
  if (std::holds_alternative<ConfigTable::List>(example)) return split(without_quotes(text));
  if (std::holds_alternative<ConfigTable::Lists>(example)) return split_lists(without_quotes(text));
  return std::string(without_quotes(text));
}

/// Returns the value of a node of TOML. Returns nullopt for dates, and for arrays of anything but strings or arrays of
/// strings. An empty array is a List.
std::optional<Value> value_of(const toml::node& node) {
  if (const auto boolean = node.as_boolean()) return boolean->get();
  if (const auto integer = node.as_integer()) return integer->get();
  if (const auto number = node.as_floating_point()) return number->get();
  if (const auto string = node.as_string()) return string->get();
  const toml::array* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  ConfigTable::List list;
  ConfigTable::Lists lists;
  for (const toml::node& item : *array) {
    const std::optional<Value> value = value_of(item);
    if (value && std::holds_alternative<std::string>(*value)) {
      list.push_back(std::get<std::string>(*value));
    } else if (value && std::holds_alternative<ConfigTable::List>(*value)) {
      lists.push_back(std::get<ConfigTable::List>(*value));
    } else {
      return std::nullopt;
    }
  }
  if (lists.empty()) return list;
  if (!list.empty()) return std::nullopt;
  return lists;
}

/// Returns the place behind the string of TOML that begins at `begin`. A line's end also ends a string that does not
/// have three quotes at either end.
std::size_t end_of_string(std::string_view text, std::size_t begin) {
  const char quote = text[begin];
  const std::string three(3, quote);
  const bool has_lines = text.substr(begin, 3) == three;
  for (std::size_t i = begin + (has_lines ? 3 : 1); i < text.size(); ++i) {
    if (!has_lines && text[i] == '\n') return i;
    if (quote == '"' && text[i] == '\\' && text.substr(i + 1, 1) != "\n") {
      ++i;
    } else if (!has_lines && text[i] == quote) {
      return i + 1;
    } else if (has_lines && text.substr(i, 3) == three) {
      // One or two quotes before the closing ones belong to the text.
      return std::min({text.find_first_not_of(quote, i), i + 5, text.size()});
    }
  }
  return text.size();
}

/// toml++ 3.3 makes a table for each part of a dotted key, without a limit, and frees them by recursion: a key
/// "a.a.a..." of some hundred kilobytes overflows the stack. Counts the dots between two characters that end a key.
void check_dotted_keys(std::string_view text, const std::string& source) {
  constexpr int kMaxDots = 8;  // no key here has more than three
  int dots = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' || c == '\'') {
      i = end_of_string(text, i) - 1;
    } else if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '.') {
      if (++dots <= kMaxDots) continue;
      fail("{}:{}: a key of more than {} parts", source, 1 + std::ranges::count(text.substr(0, i), '\n'), kMaxDots + 1);
    } else if (c == '\n' || c == '=' || c == '[' || c == ']' || c == '{' || c == '}' || c == ',') {
      dots = 0;
    }
  }
}

/// Throws Error for what is no text in UTF-8.
void require_text(std::string_view text, const std::string& source) {
  const bool is_utf16 = text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF");
  require(!is_utf16, "{}: this is UTF-16; expected TOML in UTF-8: iconv -f UTF-16 -t UTF-8 IN > OUT", source);
  require(text.find('\0') == text.npos, "{}: this is a binary file; expected a configuration in TOML", source);
}

/// Throws Error, with a hint how the same is written in TOML, if `text` seems to be JSON or YAML.
void require_neither_json_nor_yaml(std::string_view text, const std::string& source) {
  text = without_byte_order_mark(text);
  // The first line that is neither empty nor a comment.
  std::string_view line;
  while (!text.empty() && (line.empty() || line.starts_with('#'))) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
  }
  constexpr const char* kHint = "is a line \"[training]\" and below it a line \"steps = 100\"";
  require(!line.starts_with('{'), "{}: this is JSON; expected TOML, where {{\"training\": {{\"steps\": 100}}}} {}",
          source, kHint);
  const std::size_t colon = line.find(':');
  const bool is_yaml = line.starts_with("---") || (colon != line.npos && colon < line.find_first_of("=[\"'"));
  require(!is_yaml, "{}: this is YAML; expected TOML, where \"training:\" and below it \"  steps: 100\" {}", source,
          kHint);
}

bool asks_for_something(const Value* value) {
  return value == nullptr ||
         (*value != Value(false) && *value != Value(std::string()) && *value != Value(ConfigTable::List()));
}

}  // namespace

void ConfigTable::add_entry(std::string key, std::string help, std::string type, Value example,
                            std::function<void(const Value&)> set, std::function<Value()> get, Range range) {
  entries_.push_back({.key = std::move(key),
                      .help = std::move(help),
                      .type = std::move(type),
                      .set = std::move(set),
                      .get = std::move(get),
                      .example = std::move(example),
                      .choices = {},
                      .range = std::move(range)});
}

void ConfigTable::add(std::string key, bool& target, std::string help) {
  add_entry(
      std::move(key), std::move(help), "boolean", false, [&target](const Value& v) { target = std::get<bool>(v); },
      [&target] { return Value(target); });
}

void ConfigTable::add(std::string key, std::int64_t& target, std::string help, Range range) {
  add_entry(
      std::move(key), std::move(help), "integer", std::int64_t{0},
      [&target](const Value& v) { target = std::get<std::int64_t>(v); }, [&target] { return Value(target); },
      std::move(range));
}

void ConfigTable::add(std::string key, double& target, std::string help, Range range) {
  add_entry(
      std::move(key), std::move(help), "number", 0.0, [&target](const Value& v) { target = std::get<double>(v); },
      [&target] { return Value(target); }, std::move(range));
}

void ConfigTable::add(std::string key, float& target, std::string help, Range range) {
  add_entry(
      std::move(key), std::move(help), "number", 0.0,
      [&target](const Value& v) { target = static_cast<float>(std::get<double>(v)); },
      // Through text, so that 0.7f prints as 0.7.
      [&target] { return Value(std::stod(fmt::format("{}", target))); }, std::move(range));
}

void ConfigTable::add(std::string key, std::string& target, std::string help) {
  add_entry(
      std::move(key), std::move(help), "string", std::string(),
      [&target](const Value& v) { target = std::get<std::string>(v); }, [&target] { return Value(target); });
}

void ConfigTable::add(std::string key, List& target, std::string help) {
  add_entry(
      std::move(key), std::move(help), "list of strings", List(),
      [&target](const Value& v) { target = std::get<List>(v); }, [&target] { return Value(target); });
}

void ConfigTable::add(std::string key, Lists& target, std::string help) {
  add_entry(
      std::move(key), std::move(help), "list of lists of strings", Lists(),
      [&target](const Value& v) { target = std::get<Lists>(v); }, [&target] { return Value(target); });
}

void ConfigTable::ignore(std::string key, Form form, std::string why) {
  foreign_.push_back({.key = std::move(key), .form = form, .why = std::move(why), .refused = false, .accepted = {}});
}

void ConfigTable::refuse(std::string key, Form form, std::string feature) {
  foreign_.push_back({.key = std::move(key), .form = form, .why = std::move(feature), .refused = true, .accepted = {}});
}

void ConfigTable::accept_only(std::string key, Form form, List accepted, std::string why) {
  foreign_.push_back(
      {.key = std::move(key), .form = form, .why = std::move(why), .refused = false, .accepted = std::move(accepted)});
}

void ConfigTable::add_choice(std::string key, std::vector<std::string> names, std::function<void(std::size_t)> set,
                             std::function<std::size_t()> get, std::string help) {
  add_entry(
      std::move(key), std::move(help), "string", std::string(),
      [set = std::move(set), names](const Value& v) {
        const auto found = std::find(names.begin(), names.end(), std::get<std::string>(v));
        set(static_cast<std::size_t>(found - names.begin()));
      },
      [get = std::move(get), names] { return Value(names[get()]); });
  entries_.back().choices = std::move(names);
}

const ConfigTable::Entry* ConfigTable::known(std::string_view key) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
  return found == entries_.end() ? nullptr : &*found;
}

const ConfigTable::Foreign* ConfigTable::foreign(std::string_view key) const {
  for (const Foreign& foreign : foreign_) {
    const std::string_view prefix(foreign.key.data(), foreign.key.size() - (foreign.key.ends_with(".*") ? 1 : 0));
    if (prefix.size() < foreign.key.size() ? key.starts_with(prefix) : key == prefix) return &foreign;
  }
  return nullptr;
}

const ConfigTable::Entry& ConfigTable::find(std::string_view key, const std::string& where) const {
  if (const Entry* entry = known(key)) return *entry;
  // A name without a section can only be like a key's last part.
  const bool is_bare = key.find('.') == std::string_view::npos;
  const std::string_view name = last_part(key);
  const Entry* nearest = nullptr;
  std::size_t nearest_distance = std::numeric_limits<std::size_t>::max();
  for (const Entry& entry : entries_) {
    const std::string_view entry_name = last_part(entry.key);
    std::size_t distance = 2 * edit_distance(is_bare ? entry_name : entry.key, key);
    // Nearer than any misspelling is the right name in a wrong section, and then what is an end of one: batch_size.
    if (entry_name.ends_with(fmt::format("_{}", name))) distance = std::min<std::size_t>(distance, 3);
    if (entry_name == name) distance = 1;
    if (distance < nearest_distance) {
      nearest = &entry;
      nearest_distance = distance;
    }
  }
  TESSERA_CHECK(nearest != nullptr, "the table is empty");
  require(nearest_distance <= 3 || is_slip(key, nearest_distance / 2),
          "{}: unknown key '{}'; expected section.name (`tessera train --list-keys` lists all)", where, printable(key));
  fail("{}: unknown key '{}'; did you mean '{}'?", where, printable(key), nearest->key);
}

void ConfigTable::assign(const Entry& entry, const Value& value, const std::string& where) {
  Value converted = value;
  // TOML users write 1 for 1.0.
  if (std::holds_alternative<double>(entry.example) && std::holds_alternative<std::int64_t>(value)) {
    converted = static_cast<double>(std::get<std::int64_t>(value));
  }
  if (std::holds_alternative<List>(entry.example) && std::holds_alternative<std::string>(value)) {
    converted = split(std::get<std::string>(value));
  }
  if (std::holds_alternative<Lists>(entry.example)) {
    if (std::holds_alternative<std::string>(value)) converted = split_lists(std::get<std::string>(value));
    if (value == Value(List())) converted = Lists();
  }
  if (std::holds_alternative<std::int64_t>(entry.example) && std::holds_alternative<std::string>(value)) {
    if (const auto count = parse_count(std::get<std::string>(value))) converted = *count;
  }
  // TOML reads 2e9 as a float.
  if (std::holds_alternative<std::int64_t>(entry.example) && std::holds_alternative<double>(value)) {
    const double number = std::get<double>(value);
    if (std::abs(number) <= 0x1p53 && number == std::trunc(number)) converted = static_cast<std::int64_t>(number);
  }
  require(converted.index() == entry.example.index(), "{}: {} is {}; expected a value of type {}{}", where, entry.key,
          to_text(value), entry.type, expected_form(entry.example));
  if (!entry.choices.empty()) {
    const auto& name = std::get<std::string>(converted);
    require(std::find(entry.choices.begin(), entry.choices.end(), name) != entry.choices.end(),
            "{}: {} is {}; expected one of {}", where, entry.key, to_text(converted), fmt::join(entry.choices, ", "));
  }
  entry.set(converted);
  set_.push_back(entry.key);
}

bool ConfigTable::was_set(std::string_view key) const { return std::find(set_.begin(), set_.end(), key) != set_.end(); }

void ConfigTable::pass_over(const Foreign& foreign, std::string_view key, const Value* value,
                            const std::string& where) {
  if (!foreign.accepted.empty()) {
    const std::string text = value == nullptr ? "a date or an array" : unquoted_text(*value);
    require(text.empty() || std::find(foreign.accepted.begin(), foreign.accepted.end(), text) != foreign.accepted.end(),
            "{}: {} is {}; expected {}, or no such key: {}", where, key, text, fmt::join(foreign.accepted, " or "),
            foreign.why);
    return;
  }
  if (!asks_for_something(value)) return;
  require(!foreign.refused, "{}: {}: {} is not built; leave the key out", where, key, foreign.why);
  if (std::find(ignored_.begin(), ignored_.end(), key) == ignored_.end()) ignored_.emplace_back(key);
}

void ConfigTable::apply_toml(std::string_view text, const std::string& source) {
  require_text(text, source);
  check_dotted_keys(text, source);
  toml::table root;
  try {
    root = toml::parse(text, source);
  } catch (const toml::parse_error& error) {
    require_neither_json_nor_yaml(text, source);
    const auto says = [&](const char* what) { return error.description().find(what) != std::string_view::npos; };
    fail("{}:{}: {}{}", source, error.source().begin.line, error.description(),
         says("could not determine value type") ? "; expected a text in quotes, a number, true or false"
         : says("digit, saw ")                  ? "; in TOML a number with a unit is a string: steps = \"10k\""
                                                : "");
  }
  const std::function<void(const toml::table&, const std::string&)> visit = [&](const toml::table& table,
                                                                                const std::string& prefix) {
    for (const auto& [name, node] : table) {
      const std::string key = prefix + std::string(name.str());
      const std::string where = fmt::format("{}:{}", source, node.source().begin.line);
      if (const toml::table* section = node.as_table()) {
        visit(*section, key + ".");
        continue;
      }
      const std::optional<Value> value = value_of(node);
      if (const Foreign* skipped = foreign(key)) {
        pass_over(*skipped, key, value ? &*value : nullptr, where);
        continue;
      }
      const Entry& entry = find(key, where);
      require(value.has_value(), "{}: {} is a date or an array; expected a value of type {}", where, key, entry.type);
      assign(entry, *value, where);
    }
  };
  visit(root, "");
}

void ConfigTable::apply_override(std::string_view assignment) {
  while (assignment.starts_with('-')) assignment.remove_prefix(1);
  const std::size_t equals = assignment.find('=');
  const std::string where = fmt::format("--{}", assignment);
  std::string key = with_underscores(assignment.substr(0, equals));
  std::optional<std::string_view> text;
  if (equals != std::string_view::npos) text = assignment.substr(equals + 1);
  if (!text && known(key) == nullptr && last_part(key).starts_with("no_")) {
    std::string flag = key;
    flag.erase(flag.size() - last_part(flag).size(), 3);
    const Entry* entry = known(flag);
    if (entry == nullptr || std::holds_alternative<bool>(entry->example)) {
      key = flag;
      text = "false";
    }
  }
  if (const Foreign* skipped = foreign(key)) {
    Value value = true;
    if (text) {
      const std::optional<Value> boolean = parse_as(Value(false), *text);
      value = boolean ? *boolean : Value(std::string(without_quotes(*text)));
    }
    return pass_over(*skipped, key, &value, where);
  }
  const Entry& entry = find(key, where);
  if (!text) {
    require(std::holds_alternative<bool>(entry.example), "{}: expected --{}=VALUE", where, entry.key);
    return assign(entry, true, where);
  }
  const std::optional<Value> value = parse_as(entry.example, *text);
  require(value.has_value(), "{}: '{}' is not a value of type {}{}", where, *text, entry.type,
          expected_form(entry.example));
  assign(entry, *value, where);
}

bool ConfigTable::takes_value(std::string_view given, std::string_view value) const {
  const std::string key = with_underscores(given);
  const Entry* entry = known(key);
  const Foreign* skipped = foreign(key);
  const bool is_flag = entry != nullptr
                           ? std::holds_alternative<bool>(entry->example)
                           : last_part(key).starts_with("no_") || (skipped != nullptr && skipped->form == Form::kFlag);
  return !is_flag || parse_as(Value(false), value).has_value();
}

std::string ConfigTable::to_toml() const {
  std::string text, section;
  for (const Entry& entry : entries_) {
    const std::string this_section = entry.key.substr(0, entry.key.rfind('.'));
    if (this_section != section) {
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", this_section);
      section = this_section;
    }
    text += fmt::format("{} = {}\n", last_part(entry.key), to_text(entry.get()));
  }
  return text;
}

void require_in_range(std::string_view key, std::int64_t number, const NumberRange& range) {
  require(range.has(static_cast<double>(number)), "{} is {}; expected {}", key, number, range.expected);
}

void require_in_range(std::string_view key, double number, const NumberRange& range) {
  require(range.has(number), "{} is {}; expected {}{}", key, number, range.expected,
          std::isinf(number) ? ", and finite" : "");
}

void ConfigTable::require_in_range() const {
  for (const Entry& entry : entries_) {
    if (!entry.range) continue;
    const Value value = entry.get();
    if (const auto* integer = std::get_if<std::int64_t>(&value)) {
      tessera::require_in_range(entry.key, *integer, *entry.range);
    } else {
      tessera::require_in_range(entry.key, std::get<double>(value), *entry.range);
    }
  }
}

std::vector<ConfigTable::Description> ConfigTable::describe() const {
  std::vector<Description> descriptions;
  for (const Entry& entry : entries_) {
    const std::string type = entry.choices.empty() ? entry.type : fmt::format("{}", fmt::join(entry.choices, " \\| "));
    descriptions.push_back({.key = entry.key,
                            .type = entry.range ? fmt::format("{}: {}", type, entry.range->expected) : type,
                            .value = to_text(entry.get()),
                            .help = entry.help});
  }
  return descriptions;
}

std::vector<ConfigTable::Description> ConfigTable::describe_foreign() const {
  std::vector<Description> descriptions;
  for (const Foreign& foreign : foreign_) {
    const std::string type = foreign.refused            ? "refused"
                             : foreign.accepted.empty() ? "ignored"
                                                        : fmt::format("{} only", fmt::join(foreign.accepted, ", "));
    descriptions.push_back({.key = foreign.key, .type = type, .value = {}, .help = foreign.why});
  }
  return descriptions;
}

}  // namespace tessera
