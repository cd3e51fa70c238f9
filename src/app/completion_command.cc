// `tessera completion` prints a script with which a shell completes commands, options, keys of the configuration and
// their values. The script is made from the command line's own tables, so it cannot fall behind them.
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "app/cli/arguments.h"
#include "app/cli/commands.h"
#include "base/error.h"
#include "config/job_config.h"

namespace tessera {
namespace {

/// A command, named by its path below `tessera`: "/data/prepare".
struct CommandWords {
  std::string path;
  std::vector<std::string> subcommands, options;  // options with a value end in "="
};

void collect(const CLI::App& command, const std::string& path, const std::vector<std::string>& keys,
             std::vector<CommandWords>& all) {
  CommandWords words{.path = path, .subcommands = subcommand_names(command), .options = {}};
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      words.options.push_back("--" + name + (option->get_items_expected_max() > 0 ? "=" : ""));
    }
  }
  if (takes_config(command)) words.options.insert(words.options.end(), keys.begin(), keys.end());
  std::ranges::sort(words.options);
  words.options.erase(std::ranges::unique(words.options).begin(), words.options.end());
  all.push_back(words);
  for (const CLI::App* one : command.get_subcommands(nullptr)) collect(*one, path + "/" + one->get_name(), keys, all);
}

/// Returns two shell functions that run in bash and in zsh. `_tessera_words` sets `names` to the subcommands and
/// `options` to the options of the command in $1. `_tessera_values` sets `names` to the values of the key in $1.
std::string word_tables(const CLI::App& app) {
  JobConfig config;
  std::vector<std::string> keys;
  std::string values;
  for (const ConfigTable::Description& key : config_table(config).describe()) {
    keys.push_back("--" + key.key + "=");
    std::string choices = key.type == "boolean" ? "true false" : "";
    if (key.type.find(" \\| ") != std::string::npos) {
      choices = key.type;
      for (std::size_t at = 0; (at = choices.find(" \\| ", at)) != std::string::npos;) choices.replace(at, 4, " ");
    }
    if (!choices.empty()) values += fmt::format("    --{}) names=({}) ;;\n", key.key, choices);
    if (key.key == "training.device") values += fmt::format("    --device) names=({}) ;;\n", choices);
  }
  std::vector<CommandWords> all;
  collect(app, "", keys, all);
  std::string commands;
  for (const CommandWords& words : all) {
    commands += fmt::format("    '{}') names=({}) options=({}) ;;\n", words.path, fmt::join(words.subcommands, " "),
                            fmt::join(words.options, " "));
  }
  return fmt::format(
      "_tessera_words() {{\n  names=() options=()\n  case \"$1\" in\n{}    *) return 1 ;;\n  esac\n}}\n\n"
      "_tessera_values() {{\n  names=()\n  case \"$1\" in\n{}  esac\n}}\n\n",
      commands, values);
}

constexpr const char* kBash = R"(_tessera() {
  local current=${COMP_WORDS[COMP_CWORD]} command='' word names options
  # bash takes the "=" of --key=value for a word of its own.
  local before=${COMP_WORDS[COMP_CWORD - 1]} key=''
  if [[ $current == = ]]; then key=$before current=''
  elif [[ $before == = ]]; then key=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  COMPREPLY=()
  if [[ -n $key ]]; then
    _tessera_values "$key"
    COMPREPLY=($(compgen -W "${names[*]}" -- "$current"))
    return
  fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    _tessera_words "$command/$word" && command=$command/$word
  done
  _tessera_words "$command"
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "${options[*]}" -- "$current"))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  else
    COMPREPLY=($(compgen -W "${names[*]}" -- "$current"))
  fi
}
complete -o default -F _tessera tessera
)";

constexpr const char* kZsh = R"(_tessera() {
  local command='' word
  local -a names options
  for word in ${words[2,CURRENT-1]}; do
    _tessera_words "$command/$word" && command=$command/$word
  done
  _tessera_words "$command"
  if [[ $PREFIX == --*=* ]]; then
    _tessera_values "${PREFIX%%=*}"
    compset -P '*='
    if (( $#names )); then compadd -a names; else _files; fi
  elif [[ $PREFIX == -* ]]; then
    compadd -S '' -- ${(M)options:#*=}
    compadd -- ${options:#*=}
  elif (( $#names )); then
    compadd -a names
  else
    _files
  fi
}
if [[ ${funcstack[1]} == _tessera ]]; then _tessera "$@"; else compdef _tessera tessera; fi
)";

}  // namespace

void add_completion_command(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("completion", "Print the script by which a shell completes this program's words");
  command->add_option("SHELL", *shell, "bash or zsh")->required()->check(CLI::IsMember({"bash", "zsh"}));
  command->footer(
      "For this shell:  source <(tessera completion bash)\n"
      "For all of bash: tessera completion bash > ~/.local/share/bash-completion/completions/tessera\n"
      "For all of zsh:  tessera completion zsh > FOLDER/_tessera, where FOLDER is in $fpath");
  command->callback([&app, shell] {
    std::cout << (*shell == "zsh" ? "#compdef tessera\n" : "") << word_tables(app) << (*shell == "zsh" ? kZsh : kBash);
  });
}

}  // namespace tessera
