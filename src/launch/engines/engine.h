// What a cluster has to do for a launcher: run a program on a node, and start ranks on several. Everything else is the
// launcher's. An engine only makes command lines, which is all that Slurm and MPI over hosts differ in.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A program and its arguments.
using CommandLine = std::vector<std::string>;

class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::string name() const = 0;
  /// All nodes that it may use, in order: the first ones are to train, the others are spares.
  virtual std::vector<std::string> nodes() const = 0;
  /// Whether all nodes are this machine, so that nobody else need reach the launcher.
  virtual bool is_one_machine() const { return false; }
  /// Runs the program on the node, with our standard input.
  virtual CommandLine on_node(const std::string& node, const CommandLine& program) const = 0;
  /// Starts `ranks_per_node` ranks of the program on each node, in the order of the nodes. `variables`: names of
  /// variables of the environment that the ranks are to get.
  virtual CommandLine on_ranks(const std::vector<std::string>& nodes, int ranks_per_node,
                               const std::vector<std::string>& variables, const CommandLine& program) const = 0;
  /// Tells the scheduler that the node is not to be used; none if nobody is to be told.
  virtual std::optional<CommandLine> drain(const std::string& node, const std::string& reason) const;
  /// Tells the scheduler that the node may be used again, if it is still drained for `reason`; in any case if that is
  /// empty. None if nobody is to be told.
  virtual std::optional<CommandLine> undrain(const std::string& node, const std::string& reason) const;
  /// Waits until the scheduler has given the launch one more node, for as long as that takes; none if it never does.
  /// Throws Error if the scheduler does not answer within 2 s, in which the launcher is silent; so does grown_nodes().
  virtual std::optional<CommandLine> grow() const { return std::nullopt; }
  /// All nodes, with those that such commands have added.
  virtual std::vector<std::string> grown_nodes() { return nodes(); }
  /// The id of the scheduler's job that the launch runs in. The scheduler starts the job again if the launch ends with
  /// ExitStatus::kRequeue. Empty: there is no scheduler.
  virtual std::string job() const { return ""; }
};

/// This machine alone. Its one node has the name of the machine.
std::unique_ptr<Engine> make_local_engine(std::vector<std::string> mpirun_options);

/// MPI over hosts, by ssh and mpirun. `hosts`: names.
std::unique_ptr<Engine> make_hosts_engine(std::vector<std::string> hosts, std::vector<std::string> mpirun_options);

/// An allocation of Slurm, by srun and scontrol. Its nodes are those of SLURM_JOB_NODELIST. Throws Error outside of an
/// allocation, or where srun cannot start ranks by PMIx.
std::unique_ptr<Engine> make_slurm_engine(std::vector<std::string> srun_options);

/// The names in a list of hosts, "n1,n2", or in a file with a host per line as mpirun reads it: "n1 slots=8", with
/// comments after '#'. Throws Error if there is none, or one occurs twice.
std::vector<std::string> read_hosts(const std::string& list_or_file);

}  // namespace tessera
