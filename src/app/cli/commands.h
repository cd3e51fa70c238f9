// The subcommands. Each function adds one, with its options, to the command line. CLI11's callback runs its work.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

/// Adds `tessera quickstart`, which shows what Tessera does in about two minutes. Sets `status` to the process's exit
/// status.
void add_quickstart_command(CLI::App& app, int& status);

/// Adds `tessera completion bash|zsh`, which prints a script for the shell.
void add_completion_command(CLI::App& app);

/// Adds `tessera train CONFIG [--section.key=value ...]`. Sets `status` to the process's exit status.
void add_train_command(CLI::App& app, int& status);

/// Adds `tessera launch -- train CONFIG [--section.key=value ...]`. Sets `status` to the process's exit status.
void add_launch_command(CLI::App& app, int& status);

/// Adds `tessera monitor`, which a launcher starts. Sets `status` to the process's exit status.
void add_monitor_command(CLI::App& app, int& status);

/// Adds `tessera status RUN`.
void add_status_command(CLI::App& app);

/// Adds `tessera watch RUN...`. Sets `status` to the process's exit status.
void add_watch_command(CLI::App& app, int& status);

/// Adds `tessera undrain RUN NODE...`.
void add_undrain_command(CLI::App& app);

/// Adds `tessera bench step [CONFIG] [--section.key=value ...]`, which times training steps on random tokens, and
/// `tessera bench gemm|grouped|attention|quantize|operators`, which times operators on a GPU. Also adds `tessera bench
/// calibrate`, which measures rates for `tessera plan`, and `tessera bench world`, which counts what many ranks send.
/// Sets `status` to the process's exit status.
void add_bench_command(CLI::App& app, int& status);

/// Adds `tessera health check|serve|act|links`. Sets `status` to the process's exit status.
void add_health_commands(CLI::App& app, int& status);
/// Adds `links` to the commands of `tessera health`. Only add_health_commands() calls it.
void add_health_links_command(CLI::App& health, int& status);

/// Adds `tessera compare SIDE SIDE ... --out report.html`. Sets `status` to the process's exit status.
void add_compare_command(CLI::App& app, int& status);

/// Adds `tessera report RUN`.
void add_report_command(CLI::App& app);

/// Adds `tessera convert --to hf|tessera`. Sets `status` to the process's exit status if a signal stops it.
void add_convert_command(CLI::App& app, int& status);

/// Adds `tessera generate --checkpoint DIR --prompt TEXT`.
void add_generate_command(CLI::App& app);

/// Adds `tessera data prepare|tokenizer|inspect`. Sets `status` to the process's exit status if a signal stops it.
void add_data_commands(CLI::App& app, int& status);

/// Adds `tessera doctor`, which prints devices, driver, libraries, links, and what is missing. With --cluster it
/// examines all nodes, and sets `status` to the process's exit status.
void add_doctor_command(CLI::App& app, int& status);

/// Adds `tessera plan schedule|memory|time|search`.
void add_plan_commands(CLI::App& app);

}  // namespace tessera
