// What a rank of a run has before it builds anything: its GPU and its place in the mesh.
#pragma once

#include <memory>
#include <span>

#include "comm/ranks.h"
#include "config/job_config.h"
#include "ops/runtime/runtime.h"
#include "parallel/mesh.h"

namespace tessera {

/// Sets the threads of a rank: training.num_threads, or, of several ranks, the node's cores shared evenly.
void set_threads(const JobConfig& config, const Ranks& ranks);

/// GPU number `device` of this machine, for one of several ranks: `world`, which must stay, and the groups that are
/// split from it then move what lies there, and waiting for the GPU is waiting for other ranks. Together with all
/// ranks.
std::shared_ptr<cuda::Runtime> join_gpus(ProcessGroup& world, int device);

/// This rank's GPU; null if the run computes on CPUs. Together with all ranks.
std::shared_ptr<cuda::Runtime> join_gpus(const JobConfig& config, Ranks& ranks);

/// The most ranks of an expert-parallel group of `ep` that every domain of it can have on one node, where node_of_rank
/// says which ranks are on one node. Neighbours: 1 if there are none on one node.
std::int64_t max_ranks_per_domain(std::span<const int> node_of_rank, std::int64_t ep);

/// The mesh that the configuration asks for. Throws Error if there can be none. Together with all ranks.
std::shared_ptr<Mesh> make_mesh(const JobConfig& config, Ranks& ranks);

}  // namespace tessera
