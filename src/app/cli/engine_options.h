// The options by which a command chooses the engine that starts programs on nodes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "app/cli/arguments.h"
#include "launch/engines/engine.h"

namespace tessera {

struct EngineOptions {
  std::string engine = "auto", hosts;
  std::vector<std::string> starter_options;  // of mpirun or srun
};

/// `options` must stay while the command is parsed.
void add_engine_options(CLI::App& command, EngineOptions& options);

/// Throws Error if the options contradict each other, or there is no such engine here.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

}  // namespace tessera
