#include "launch/engines/engine.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/error.h"
#include "launch/engines/slurm.h"
#include "system/host_name.h"
#include "system/nccl_settings.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

/// Returns the options that mpirun needs wherever it starts ranks.
CommandLine mpirun(std::int64_t num_ranks, const std::vector<std::string>& variables,
                   const std::vector<std::string>& options) {
  CommandLine command = {"mpirun", "-np", std::to_string(num_ranks), "--bind-to", "none"};
  if (geteuid() == 0) command.emplace_back("--allow-run-as-root");
  for (const std::string& name : variables) command.insert(command.end(), {"-x", name});
  command.insert(command.end(), options.begin(), options.end());
  return command;
}

void append(CommandLine& command, const CommandLine& more) { command.insert(command.end(), more.begin(), more.end()); }

class LocalEngine : public Engine {
 public:
  explicit LocalEngine(std::vector<std::string> mpirun_options) : options_(std::move(mpirun_options)) {}

  std::string name() const override { return "local"; }
  std::vector<std::string> nodes() const override { return {host_name()}; }
  bool is_one_machine() const override { return true; }
  CommandLine on_node(const std::string&, const CommandLine& program) const override { return program; }
  CommandLine on_ranks(const std::vector<std::string>&, int ranks_per_node, const std::vector<std::string>& variables,
                       const CommandLine& program) const override {
    if (ranks_per_node == 1) return program;
    CommandLine command = mpirun(ranks_per_node, variables, options_);
    command.emplace_back("--oversubscribe");  // slots are physical cores, and ranks on GPUs hardly need those
    append(command, program);
    return command;
  }

 private:
  std::vector<std::string> options_;
};

class HostsEngine : public Engine {
 public:
  HostsEngine(std::vector<std::string> hosts, std::vector<std::string> mpirun_options)
      : hosts_(std::move(hosts)), options_(std::move(mpirun_options)) {}

  std::string name() const override { return "hosts"; }
  std::vector<std::string> nodes() const override { return hosts_; }
  CommandLine on_node(const std::string& node, const CommandLine& program) const override {
    CommandLine command = {"ssh"};
    append(command, ssh_options());
    command.insert(command.end(), {node, "exec " + shell_line(program)});
    return command;
  }
  CommandLine on_ranks(const std::vector<std::string>& nodes, int ranks_per_node,
                       const std::vector<std::string>& variables, const CommandLine& program) const override {
    std::vector<std::string> slots;
    for (const std::string& node : nodes) slots.push_back(fmt::format("{}:{}", node, ranks_per_node));
    std::vector<std::string> handed_on = variables;
    // mpirun passes only its own variables (OMPI_*) to other hosts.
    for (const auto& [name, value] : nccl_settings()) handed_on.push_back(name);
    CommandLine command = mpirun(static_cast<std::int64_t>(nodes.size()) * ranks_per_node, handed_on, options_);
    append(command, {"-H", fmt::format("{}", fmt::join(slots, ",")), "--map-by", "slot"});
    append(command, {"--mca", "plm_rsh_args", fmt::format("{}", fmt::join(ssh_options(), " "))});
    append(command, program);
    return command;
  }

 private:
  static CommandLine ssh_options() {
    return {"-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=2", "-oServerAliveCountMax=2"};
  }

  std::vector<std::string> hosts_, options_;
};

class SlurmEngine : public Engine {
 public:
  explicit SlurmEngine(std::vector<std::string> srun_options) : options_(std::move(srun_options)) {
    const char *list = std::getenv("SLURM_JOB_NODELIST"), *job = std::getenv("SLURM_JOB_ID");
    require(list != nullptr && job != nullptr,
            "the engine slurm needs an allocation (SLURM_JOB_ID is not set): start it in a job of sbatch or salloc, or "
            "give --hosts");
    job_ = job;
    nodes_ = names_of(list, 20);
    const std::vector<std::string> kinds = words_of(output_of("srun --mpi=list"));
    require(std::ranges::find(kinds, "pmix") != kinds.end(),
            "srun has no PMIx here (srun --mpi=list: {}), which starts ranks: install Slurm's PMIx plugin, or give "
            "--hosts to start them by mpirun",
            fmt::join(kinds, " "));
  }

  std::string name() const override { return "slurm"; }
  std::vector<std::string> nodes() const override { return nodes_; }
  CommandLine on_node(const std::string& node, const CommandLine& program) const override {
    CommandLine command = srun();
    append(command, {"--quiet", "-N1", "-n1", "-w", node});
    append(command, program);
    return command;
  }
  CommandLine on_ranks(const std::vector<std::string>& nodes, int ranks_per_node, const std::vector<std::string>&,
                       const CommandLine& program) const override {
    std::vector<std::string> node_of_rank;
    for (const std::string& node : nodes) {
      node_of_rank.insert(node_of_rank.end(), static_cast<std::size_t>(ranks_per_node), node);
    }
    CommandLine command = srun();
    append(command,
           {"--kill-on-bad-exit=0",  // the launcher ends the ranks when it has found out which rank failed
            "--mpi=pmix",
            "--distribution=arbitrary",  // the order of -w; others have Slurm's own order of the nodes
            fmt::format("-N{}", nodes.size()), fmt::format("-n{}", node_of_rank.size()), "-w",
            fmt::format("{}", fmt::join(node_of_rank, ","))});
    append(command, options_);
    append(command, program);
    return command;
  }
  std::optional<CommandLine> drain(const std::string& node, const std::string& reason) const override {
    return CommandLine{"scontrol", "update", "nodename=" + node, "state=drain", "reason=" + reason};
  }
  std::optional<CommandLine> undrain(const std::string& node, const std::string& reason) const override {
    CommandLine resume = {"scontrol", "update", "nodename=" + node, "state=resume"};
    if (reason.empty()) return resume;
    // An operator may have drained it for something else meanwhile.
    return CommandLine{"sh", "-c",
                       fmt::format("scontrol -o show node {} | grep -qF {} && {}", shell_word(node),
                                   shell_word(" Reason=" + reason + " ["), shell_line(resume))};
  }
  std::string job() const override { return job_; }
  /// Starts a job that expands ours (Slurm's FAQ, "job size"). When it has a node, it gives the node up, and ours takes
  /// it.
  std::optional<CommandLine> grow() const override {
    const SlurmJob job = find_job();
    const std::string merge =
        fmt::format("scontrol update jobid=$SLURM_JOB_ID NumNodes=0 && scontrol update jobid={} NumNodes=ALL", job_);
    // Slurm leaves files in the folder that nobody needs.
    const std::string ask = fmt::format(
        "folder=$(mktemp -d) && cd \"$folder\" && salloc -N1 --exclusive --quiet --dependency=expand:{} -p {} -x {} "
        "sh -c '{}'; status=$?; rm -rf \"$folder\"; exit $status",
        job_, shell_word(job.partition), fmt::join(names_of(job.nodes, 1), ","), merge);
    return CommandLine{"sh", "-c", ask};
  }
  std::vector<std::string> grown_nodes() override {
    const SlurmJob job = find_job();
    nodes_ = names_of(job.nodes, 1);
    // PMIx learns the job's nodes from srun's environment, which dates from the time before the job grew.
    environment_ = {"env", "-u", "SLURM_JOB_CPUS_PER_NODE", "-u", "SLURM_TASKS_PER_NODE"};
    for (const char* name : {"SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      environment_.push_back(fmt::format("{}={}", name, job.nodes));
    }
    for (const char* name : {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}) {
      environment_.push_back(fmt::format("{}={}", name, nodes_.size()));
    }
    return nodes_;
  }

 private:
  /// Returns the options of each srun. An earlier step keeps its cores until Slurm has noticed that its node is gone,
  /// so steps overlap. A job of `sbatch --export=NONE` would hand on no variables.
  CommandLine srun() const {
    CommandLine command = environment_;
    append(command, {"srun", "--overlap", "--no-kill", "--export=ALL", "--cpu-bind=none"});
    return command;
  }
  SlurmJob find_job() const { return parse_slurm_job(output_of("scontrol -o show job " + job_, 1)); }
  /// Returns the names in a list such as "n[1-3]".
  static std::vector<std::string> names_of(const std::string& list, int seconds) {
    return words_of(output_of("scontrol show hostnames " + shell_word(list), seconds));
  }

  std::vector<std::string> nodes_, options_;
  CommandLine environment_;  // goes in front of srun, once the job has grown
  std::string job_;
};

}  // namespace

std::optional<CommandLine> Engine::drain(const std::string&, const std::string&) const { return std::nullopt; }
std::optional<CommandLine> Engine::undrain(const std::string&, const std::string&) const { return std::nullopt; }

std::unique_ptr<Engine> make_local_engine(std::vector<std::string> mpirun_options) {
  return std::make_unique<LocalEngine>(std::move(mpirun_options));
}

std::unique_ptr<Engine> make_hosts_engine(std::vector<std::string> hosts, std::vector<std::string> mpirun_options) {
  return std::make_unique<HostsEngine>(std::move(hosts), std::move(mpirun_options));
}

std::unique_ptr<Engine> make_slurm_engine(std::vector<std::string> srun_options) {
  return std::make_unique<SlurmEngine>(std::move(srun_options));
}

std::vector<std::string> read_hosts(const std::string& list_or_file) {
  std::vector<std::string> hosts;
  std::error_code unreadable;
  const bool is_file = fs::is_regular_file(list_or_file, unreadable);
  if (is_file) {
    std::ifstream file(list_or_file);
    for (std::string line; std::getline(file, line);) {
      const std::vector<std::string> words = words_of(line.substr(0, line.find('#')));
      if (!words.empty()) hosts.push_back(words.front());
    }
  } else {
    require(list_or_file.find('/') == std::string::npos,
            "--hosts: there is no file '{}'; expected a file with a host per line, or names as in n1,n2,n3",
            list_or_file);
    std::istringstream list(list_or_file);
    for (std::string host; std::getline(list, host, ',');) {
      if (!host.empty()) hosts.push_back(host);
    }
  }
  require(!hosts.empty(), "--hosts '{}' names no host; expected {}", list_or_file,
          is_file ? "a host per line" : "names as in n1,n2,n3, or a file with a host per line");
  std::set<std::string> seen;
  for (const std::string& host : hosts) require(seen.insert(host).second, "--hosts names '{}' twice", host);
  return hosts;
}

}  // namespace tessera
