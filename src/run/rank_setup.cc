#include "run/rank_setup.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "base/file.h"
#include "base/log.h"
#include "comm/halves.h"
#include "comm/together.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Warns if there are more threads than cores. Threads that share a core wait for each other at the end of every
/// parallel loop. `setting` is what asked for so many.
void warn_of_too_many_threads(std::string_view setting, std::int64_t num_threads, const Ranks& ranks) {
  if (ranks.rank_on_node() != 0) return;
  // A launcher may give each rank its own cores. Then this rank's cores say nothing about those of the others.
  const std::int64_t of_machine = sysconf(_SC_NPROCESSORS_ONLN), on_node = ranks.num_on_node();
  if (num_threads > num_cores()) {
    spdlog::warn(
        "{} = {} is more than the {} core{} that a rank may use here: expect a slow run, or leave it out, and the "
        "number of threads is chosen",
        setting, num_threads, num_cores(), num_cores() == 1 ? "" : "s");
  } else if (num_threads * on_node > of_machine) {
    spdlog::warn(
        "{} ranks with {} = {} are {} threads on a machine of {} cores: expect a slow run, or leave it out, and the "
        "number of threads is chosen",
        on_node, setting, num_threads, num_threads * on_node, of_machine);
  }
}

/// Returns how many ranks of this node share the cores of this rank, with itself.
int num_on_own_cores(Ranks& ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  std::vector<double> own;
  append_halves(checksum(as_bytes_of(cores)), own);
  const std::vector<double> all = ranks.world().all_gather(own, "the cores of ranks");
  std::vector<std::uint64_t> cores_of_rank;
  for (std::size_t begin = 0; begin < all.size(); begin += own.size()) {
    cores_of_rank.push_back(join_halves(&all[begin]));
  }
  return num_sharing_cores(ranks.first_ranks_on_nodes(), cores_of_rank, ranks.rank());
}

}  // namespace

int num_sharing_cores(std::span<const int> node_of_rank, std::span<const std::uint64_t> cores_of_rank, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  int count = 0;
  for (std::size_t i = 0; i < node_of_rank.size(); ++i) {
    count += node_of_rank[i] == node_of_rank[own] && cores_of_rank[i] == cores_of_rank[own] ? 1 : 0;
  }
  return count;
}

void set_threads(const JobConfig& config, Ranks& ranks) {
  if (config.training.num_threads > 0) {
    set_num_threads(static_cast<int>(config.training.num_threads));
    warn_of_too_many_threads("training.num_threads", config.training.num_threads, ranks);
  } else if (ranks.size() > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    set_num_threads(std::max(1, num_cores() / num_on_own_cores(ranks)));
  } else {
    warn_of_too_many_threads("OMP_NUM_THREADS", num_threads(), ranks);
  }
}

std::shared_ptr<cuda::Runtime> join_gpus(ProcessGroup& world, int device) {
  cuda::use_device(device);
  const std::shared_ptr<cuda::Runtime> runtime = cuda::make_runtime();
  world.use_gpu(runtime->stream(), runtime->stream_of_calls());
  runtime->set_wait([&world](const cuda::Event& event, const std::function<void()>& check) {
    world.wait_for_gpu(event, "the GPU's work", check);
  });
  return runtime;
}

std::shared_ptr<cuda::Runtime> join_gpus(const JobConfig& config, Ranks& ranks) {
  const bool on_cpu = config.device(ranks.num_on_node()) == Device::kCpu;
  if (config.training.device == DeviceChoice::kAuto) {
    // The ranks agree first: a rank without a GPU must not leave the others waiting for it.
    const std::string why_not = on_cpu ? config.why_no_gpu(ranks.num_on_node()) : "";
    if (ranks.size() > 1) {
      double num_on_cpu = on_cpu ? 1.0 : 0.0;
      ranks.world().all_reduce(std::span(&num_on_cpu, 1), "who has a GPU");
      const std::string first = broadcast_first_text(
          ranks.world(), on_cpu ? fmt::format("rank {}: {}", ranks.rank(), why_not) : "", "who has no GPU");
      require(num_on_cpu == 0.0 || num_on_cpu == ranks.size(),
              "training.device is auto, and {:.0f} of {} ranks have no GPU ({}): mend that, or set it to cpu",
              num_on_cpu, ranks.size(), first);
    }
    if (on_cpu && ranks.rank() == 0) spdlog::info("training.device is auto: on CPUs ({})", why_not);
  }
  if (on_cpu) return nullptr;
  if (ranks.size() == 1) return cuda::make_runtime();
  return join_gpus(ranks.world(), ranks.rank_on_node() % cuda::num_devices());
}

std::int64_t max_ranks_per_domain(std::span<const int> node_of_rank, std::int64_t ep) {
  // Expert-parallel groups and their domains are runs of consecutive ranks that begin at multiples of their length.
  std::int64_t common = ep;
  std::size_t begin = 0;
  for (std::size_t rank = 1; rank <= node_of_rank.size(); ++rank) {
    if (rank < node_of_rank.size() && node_of_rank[rank] == node_of_rank[begin]) continue;
    common = std::gcd(common, static_cast<std::int64_t>(rank - begin));
    begin = rank;
  }
  return common;
}

namespace {

/// Returns the degrees with ep_domain set for direct expert parallelism on these ranks.
MeshDegrees with_domains(MeshDegrees degrees, const JobConfig& config, Ranks& ranks) {
  const bool is_direct = config.parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect;
  if (!is_direct || degrees.ep == 1) return degrees;
  constexpr std::string_view kInOrder =
      "start the ranks of a node one after the other (mpirun --map-by slot, srun --distribution=block)";
  const std::int64_t most = max_ranks_per_domain(ranks.first_ranks_on_nodes(), degrees.ep);
  if (degrees.ep_domain == 0) {
    require(
        most > 1,
        "parallelism.expert_parallel_comm_backend is direct, but groups of {} ranks cannot be cut into neighbours on "
        "one node each: {}, or set \"standard\"",
        degrees.ep, kInOrder);
    degrees.ep_domain = most;
  }
  // GPUs may be linked beyond a node. If they are not, allocating the window fails later.
  require(
      config.device(ranks.num_on_node()) == Device::kCuda || most % degrees.ep_domain == 0,
      "parallelism.expert_parallel_ranks_per_domain is {}, but not all of these ranks are on one node; expected {} or "
      "a divisor of it: {}",
      degrees.ep_domain, most, kInOrder);
  return degrees;
}

}  // namespace

std::shared_ptr<Mesh> make_mesh(const JobConfig& config, Ranks& ranks) {
  const MeshDegrees asked = resolve(config.mesh_degrees(), ranks.size());
  const MeshDegrees degrees = with_domains(asked, config, ranks);
  config.validate_on(degrees);
  return std::make_shared<Mesh>(ranks.world(), degrees);
}

}  // namespace tessera
