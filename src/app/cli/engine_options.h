// The options with which a command chooses the engine that starts programs on nodes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "app/cli/arguments.h"
#include "launch/engines/engine.h"

namespace tessera {

struct EngineOptions {
  std::string engine = "auto", hosts;
  std::vector<std::string> starter_options;  // passed to mpirun or srun
};

/// Adds the options. `options` must exist while the command is parsed.
void add_engine_options(CLI::App& command, EngineOptions& options);

/// Makes the engine. Throws Error if the options contradict each other, or if that engine is not available here.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

}  // namespace tessera
