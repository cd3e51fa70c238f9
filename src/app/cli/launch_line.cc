#include "app/cli/launch_line.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"
#include "system/shell_word.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Returns the number of cores without their hardware threads, as mpirun counts its slots.
std::int64_t num_physical_cores() {
  std::set<std::string> threads_of_cores;
  std::error_code unreadable;
  for (const auto& cpu : std::filesystem::directory_iterator("/sys/devices/system/cpu", unreadable)) {
    std::ifstream file(cpu.path() / "topology/thread_siblings_list");
    if (std::string threads; std::getline(file, threads)) threads_of_cores.insert(threads);
  }
  const std::int64_t num_threads = num_cores();
  return threads_of_cores.empty() ? num_threads
                                  : std::min(num_threads, static_cast<std::int64_t>(threads_of_cores.size()));
}

std::string this_command() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return shell_line(words);
}

}  // namespace

std::string lack_of_ranks(const JobConfig& config, int num_ranks) {
  const MeshDegrees degrees = config.mesh_degrees();
  const std::int64_t needed = fewest_ranks(degrees);
  if (needed <= num_ranks) return "";
  // More ranks do not help if the mesh itself is wrong, so that is reported first.
  config.validate();
  if (needed <= kMaxRanks) config.validate_on(resolve(degrees, needed), /*on_any_ranks=*/true);
  std::string asked;
  for (const auto& [key, degree] : {std::pair{"pipeline_parallel_degree", degrees.pp},
                                    {"tensor_parallel_degree", degrees.tp},
                                    {"context_parallel_degree", degrees.cp},
                                    {"data_parallel_replicate_degree", degrees.dp_replicate},
                                    {"data_parallel_shard_degree", degrees.dp_shard},
                                    {"expert_parallel_degree", degrees.ep}}) {
    if (degree > 1) asked += fmt::format("{}parallelism.{} = {}", asked.empty() ? "" : ", ", key, degree);
  }
  return fmt::format("the mesh needs {} ranks{} ({})", needed, degrees.dp_shard == -1 ? " or a multiple of that" : "",
                     asked);
}

void require_enough_ranks(const JobConfig& config, int num_ranks) {
  const std::string lack = lack_of_ranks(config, num_ranks);
  if (lack.empty()) return;
  const std::int64_t needed = fewest_ranks(config.mesh_degrees());
  const std::string command = this_command();
  fail("{}, but {}. Start them with\n  mpirun {}{}-np {} {}\nor, under Slurm, with\n  srun --mpi=pmix -n {} {}",
       num_ranks == 1 ? "1 rank was started" : fmt::format("{} ranks were started", num_ranks), lack,
       geteuid() == 0 ? "--allow-run-as-root " : "", needed > num_physical_cores() ? "--oversubscribe " : "", needed,
       command, needed, command);
}

}  // namespace tessera
