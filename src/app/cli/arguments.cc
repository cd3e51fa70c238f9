#include "app/cli/arguments.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "app/cli/config_arguments.h"
#include "base/error.h"
#include "base/nearest.h"
#include "config/job_config.h"

namespace tessera {
namespace {

/// Returns a command's full name: "tessera data prepare".
std::string full_name(const CLI::App& command) {
  return command.get_parent() == nullptr ? command.get_name()
                                         : full_name(*command.get_parent()) + " " + command.get_name();
}

std::string did_you_mean(const std::string& nearest) {
  return nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest);
}

/// Throws Error unless the command has the option. `before` is the argument before it, or "".
void require_known_option(const CLI::App& command, const std::string& argument, const std::string& before) {
  const std::string name = argument.substr(0, argument.find('='));
  // The configuration checks its own keys, and `tessera compare` says where they belong.
  const bool is_key = name.find('.') != name.npos;
  if (command.get_option_no_throw(name) != nullptr || (is_key && command.get_allow_extras())) return;
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& long_name : option->get_lnames()) known.push_back("--" + long_name);
  }
  const CLI::Option* waiting = before.starts_with("--") ? command.get_option_no_throw(before) : nullptr;
  require(waiting == nullptr || waiting->get_type_size() == 0,
          "{}: {} needs a value, and one that begins with '--' needs a '=': {}={}", full_name(command), before, before,
          argument);
  const std::string nearest = nearest_word(name, known);
  if (takes_config(command) && nearest.empty()) {
    JobConfig config;
    config_table(config).apply_override(argument);  // throws, because every key has a section
  }
  const bool has_command_behind = is_key && command.get_option_no_throw("command") != nullptr;
  fail("{}: unknown option '{}'{} (`{} --help` lists all)", full_name(command), name,
       has_command_behind ? "; keys of the configuration go behind '--', as in -- train CONFIG " + name + "=VALUE"
                          : did_you_mean(nearest),
       full_name(command));
}

/// Returns whether the argument is a key without a value: "--section.key".
bool waits_for_value(std::string_view argument) {
  return argument.starts_with("--") && argument.find('.') != argument.npos && argument.find('=') == argument.npos;
}

}  // namespace

std::vector<std::string> subcommand_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* one : command.get_subcommands(nullptr)) {
    if (!one->get_group().empty()) names.push_back(one->get_name());  // --help hides those without a group
  }
  return names;
}

std::string command_in_use(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return full_name(*command);
}

bool takes_config(const CLI::App& command) { return command.get_option_no_throw(kConfigOption) != nullptr; }

std::vector<std::string> checked_arguments(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  auto word = words.begin();
  for (; word != words.end() && !word->starts_with("-"); ++word) {
    const std::vector<std::string> names = subcommand_names(*command);
    if (names.empty()) break;
    const auto all = command->get_subcommands(nullptr);
    require(std::ranges::find(all, *word, &CLI::App::get_name) != all.end(),
            "{}: unknown command '{}'{} (there are: {})", full_name(*command), *word,
            did_you_mean(nearest_word(*word, names)), fmt::join(names, ", "));
    command = command->get_subcommand(*word);
  }
  require(word != words.end() || subcommand_names(*command).empty(),
          "{} needs a command: {} (`{} --help` says what they do)", full_name(*command),
          fmt::join(subcommand_names(*command), ", "), full_name(*command));

  JobConfig config;
  const ConfigTable keys = config_table(config);
  std::vector<std::string> arguments(words.begin(), word);
  for (; word != words.end() && *word != "--"; ++word) {
    std::string& key = arguments.empty() ? arguments.emplace_back() : arguments.back();
    const bool is_option = word->starts_with("--");
    if (waits_for_value(key) && !is_option) {
      require(!word->starts_with('='), "'{} {}': a space before '='; expected {}=VALUE", key, *word, key);
      if (keys.takes_value(std::string_view(key).substr(2), *word)) {
        key += "=" + *word;
        continue;
      }
    }
    require(!waits_for_value(key.substr(0, key.size() - 1)) || !key.ends_with('=') || is_option ||
                std::filesystem::exists(*word),
            "'{} {}': a space behind '='; expected {}{}", key, *word, key, *word);
    if (is_option) require_known_option(*command, *word, arguments.empty() ? "" : arguments.back());
    arguments.push_back(*word);
  }
  arguments.insert(arguments.end(), word, words.end());
  return {arguments.rbegin(), arguments.rend()};
}

}  // namespace tessera
