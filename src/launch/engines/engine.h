// What a launcher needs from a cluster: to run a program on one node, and to start ranks on several. The launcher does
// everything else. An engine only makes command lines. Slurm and MPI over hosts differ in nothing else.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Holds a program and its arguments.
using CommandLine = std::vector<std::string>;

class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::string name() const = 0;
  /// Returns all nodes that it may use, in order. The first ones train, and the others are spares.
  virtual std::vector<std::string> nodes() const = 0;
  /// Returns whether the only node is this machine, so that no other machine has to reach the launcher.
  virtual bool is_one_machine() const { return false; }
  /// Returns the command that runs the program on the node, with our standard input.
  virtual CommandLine on_node(const std::string& node, const CommandLine& program) const = 0;
  /// Returns the command that starts `ranks_per_node` ranks of the program on each node, in the order of the nodes.
  /// `variables` has the names of environment variables that the ranks get.
  virtual CommandLine on_ranks(const std::vector<std::string>& nodes, int ranks_per_node,
                               const std::vector<std::string>& variables, const CommandLine& program) const = 0;
  /// Returns the command that tells the scheduler not to use the node. Returns nullopt if there is no scheduler to
  /// tell.
  virtual std::optional<CommandLine> drain(const std::string& node, const std::string& reason) const;
  /// Returns the command that tells the scheduler to use the node again if it is still drained for `reason`. If
  /// `reason` is empty, the command does so in any case. Returns nullopt if there is no scheduler to tell.
  virtual std::optional<CommandLine> undrain(const std::string& node, const std::string& reason) const;
  /// Returns the command that waits until the scheduler has given the launch one more node, however long that takes.
  /// Returns nullopt if the scheduler never does. Throws Error if the scheduler does not answer within 2 s, during
  /// which the launcher is silent. So does grown_nodes().
  virtual std::optional<CommandLine> grow() const { return std::nullopt; }
  /// Returns all nodes, including those that such commands have added.
  virtual std::vector<std::string> grown_nodes() { return nodes(); }
  /// Returns the id of the scheduler's job that the launch runs in, or "" if there is no scheduler. The scheduler
  /// starts the job again if the launch ends with ExitStatus::kRequeue.
  virtual std::string job() const { return ""; }
};

/// Makes the engine for this machine alone. Its one node has the machine's name.
std::unique_ptr<Engine> make_local_engine(std::vector<std::string> mpirun_options);

/// Makes the engine for MPI over hosts, by ssh and mpirun. `hosts` has their names.
std::unique_ptr<Engine> make_hosts_engine(std::vector<std::string> hosts, std::vector<std::string> mpirun_options);

/// Makes the engine for an allocation of Slurm, by srun and scontrol. Its nodes are those of SLURM_JOB_NODELIST. Throws
/// Error outside of an allocation, or if srun cannot start ranks through PMIx.
std::unique_ptr<Engine> make_slurm_engine(std::vector<std::string> srun_options);

/// Returns the names in a list of hosts, "n1,n2", or in a file with a host per line in mpirun's format: "n1 slots=8",
/// with comments after '#'. Throws Error if there is none, or if one occurs twice.
std::vector<std::string> read_hosts(const std::string& list_or_file);

}  // namespace tessera
