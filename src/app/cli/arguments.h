// Checks the words of a command line before CLI11 reads them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera {

/// Returns the names of the subcommands, in the order of --help.
std::vector<std::string> subcommand_names(const CLI::App& command);

/// Returns whether the command reads a configuration and accepts its keys as options.
bool takes_config(const CLI::App& command);

/// Returns `words`, the arguments of `app`, as CLI11's parse() expects them: in reverse. "--section.key value" becomes
/// "--section.key=value", because only the configuration knows which keys have a value. Throws Error for a missing or
/// unknown subcommand and for an unknown option, and names the nearest known one.
std::vector<std::string> checked_arguments(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace tessera
