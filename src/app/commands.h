// The subcommands. Each function adds one (and its options) to the command line; its work runs in CLI11's callback.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

/// `tessera train CONFIG [--section.key=value ...]`. Sets `status` to the process's exit status.
void add_train_command(CLI::App& app, int& status);

/// `tessera data prepare|tokenizer|inspect`.
void add_data_commands(CLI::App& app);

}  // namespace tessera
