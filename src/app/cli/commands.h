// The subcommands. Each function adds one (and its options) to the command line; its work runs in CLI11's callback.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

/// `tessera quickstart`: what Tessera does, in about two minutes. Sets `status` to the process's exit status.
void add_quickstart_command(CLI::App& app, int& status);

/// `tessera completion bash|zsh`: prints a script for the shell.
void add_completion_command(CLI::App& app);

/// `tessera train CONFIG [--section.key=value ...]`. Sets `status` to the process's exit status.
void add_train_command(CLI::App& app, int& status);

/// `tessera launch -- train CONFIG [--section.key=value ...]`. Sets `status` to the process's exit status.
void add_launch_command(CLI::App& app, int& status);

/// `tessera monitor`, which a launcher starts. Sets `status` to the process's exit status.
void add_monitor_command(CLI::App& app, int& status);

/// `tessera status RUN`.
void add_status_command(CLI::App& app);

/// `tessera watch RUN...`. Sets `status` to the process's exit status.
void add_watch_command(CLI::App& app, int& status);

/// `tessera undrain RUN NODE...`.
void add_undrain_command(CLI::App& app);

/// `tessera bench step [CONFIG] [--section.key=value ...]`: times training steps on random tokens; `tessera bench
/// gemm|grouped|attention|quantize|operators`: times operators on a GPU. Sets `status` to the process's exit status.
void add_bench_command(CLI::App& app, int& status);

/// `tessera health check|serve|act|links`. Sets `status` to the process's exit status.
void add_health_commands(CLI::App& app, int& status);
void add_health_links_command(CLI::App& health, int& status);

/// `tessera compare SIDE SIDE ... --out report.html`. Sets `status` to the process's exit status.
void add_compare_command(CLI::App& app, int& status);

/// `tessera report RUN`.
void add_report_command(CLI::App& app);

/// `tessera convert --to hf|tessera`. Sets `status` to the process's exit status if a signal stops it.
void add_convert_command(CLI::App& app, int& status);

/// `tessera generate --checkpoint DIR --prompt TEXT`.
void add_generate_command(CLI::App& app);

/// `tessera data prepare|tokenizer|inspect`. Sets `status` to the process's exit status if a signal stops it.
void add_data_commands(CLI::App& app, int& status);

/// `tessera doctor`: prints devices, driver, libraries, links, and what is missing.
void add_doctor_command(CLI::App& app, int& status);

/// `tessera plan schedule|memory`.
void add_plan_commands(CLI::App& app);

}  // namespace tessera
