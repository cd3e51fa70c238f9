// Sets up a rank before it builds anything: its threads, its GPU and its place in the mesh.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/ranks.h"
#include "config/job_config.h"
#include "ops/runtime/runtime.h"
#include "parallel/mesh.h"

namespace tessera {

/// Sets the number of threads of a rank to training.num_threads. If that is 0, OMP_NUM_THREADS counts. Without either,
/// the ranks of a node that may run on the same cores share these evenly. All ranks must call it together.
void set_threads(const JobConfig& config, Ranks& ranks);

/// Returns how many ranks of a rank's node have the same cores, with itself. node_of_rank[r] is the node of rank r, and
/// cores_of_rank[r] identifies the cores that it may run on.
int num_sharing_cores(std::span<const int> node_of_rank, std::span<const std::uint64_t> cores_of_rank, int rank);

/// Makes one of several ranks use GPU number `device` of this machine. From then on `world`, and groups that are split
/// from it, communicate tensors in GPU memory. A wait for the GPU then also watches the other ranks. `world` must
/// outlive the result. All ranks must call it together.
std::shared_ptr<cuda::Runtime> join_gpus(ProcessGroup& world, int device);

/// Returns this rank's GPU, or null if the run computes on CPUs. All ranks must call it together.
std::shared_ptr<cuda::Runtime> join_gpus(const JobConfig& config, Ranks& ranks);

/// Returns the largest number of neighbours on one node that every domain of an expert-parallel group can have. The
/// group has `ep` ranks, and node_of_rank[r] is the node of rank r. Returns 1 if no neighbours are on one node.
std::int64_t max_ranks_per_domain(std::span<const int> node_of_rank, std::int64_t ep);

/// Makes the mesh that the configuration asks for. Throws Error if it is impossible. All ranks must call it together.
std::shared_ptr<Mesh> make_mesh(const JobConfig& config, Ranks& ranks);

}  // namespace tessera
