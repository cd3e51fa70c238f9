#include "app/cli/engine_options.h"

#include <cstdlib>

#include "base/error.h"

namespace tessera {

void add_engine_options(CLI::App& command, EngineOptions& options) {
  command
      .add_option("--engine", options.engine,
                  "local (this machine), hosts (ssh and mpirun) or slurm; auto: hosts with --hosts, slurm in a job "
                  "of Slurm, else local")
      ->check(CLI::IsMember({"auto", "local", "hosts", "slurm"}));
  command.add_option("--hosts", options.hosts, "A file with a host per line, or names: n1,n2,n3");
  command
      .add_option("--starter-option", options.starter_options,
                  "An option for mpirun or srun, as in --starter-option=--oversubscribe; may be given several times")
      ->allow_extra_args(false);  // else a -- behind it would end its values, and not begin the training command
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options) {
  std::string name = options.engine;
  if (name == "auto") {
    name = !options.hosts.empty() ? "hosts" : std::getenv("SLURM_JOB_NODELIST") != nullptr ? "slurm" : "local";
  }
  require(options.hosts.empty() || name == "hosts", "--hosts goes with --engine hosts, not with {}", name);
  require(!options.hosts.empty() || name != "hosts", "--engine hosts needs --hosts: a file, or names as in n1,n2");
  if (name == "slurm") return make_slurm_engine(options.starter_options);
  if (name == "hosts") return make_hosts_engine(read_hosts(options.hosts), options.starter_options);
  return make_local_engine(options.starter_options);
}

}  // namespace tessera
