// Runs a tiny model on many ranks, which are threads of this process, and counts what they send. It shows how the work
// between ranks grows with the world, without a cluster. Ranks, groups, trainer and checkpoints are those of a real
// run.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/counting_transport.h"

namespace tessera {

/// Describes what the busiest rank did in one phase.
struct WorldPhase {
  std::string name;      // "start", "step", "save" or "resume"
  double seconds = 0.0;  // of rank 0
  /// What the host sends between ranks, on GPUs, too: agreements, losses and loads.
  SentMessages::Count host;
  /// What NCCL moves on GPUs: weights, gradients and tokens. On CPUs each rank sends to each other rank of its group.
  SentMessages::Count tensors;
};

struct WorldRun {
  int num_ranks = 0;
  std::vector<WorldPhase> phases;
  std::size_t num_files = 0;          // of a checkpoint
  std::uintmax_t manifest_bytes = 0;  // of its manifest
};

/// Wraps the transport of every rank.
using WrapTransport = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

/// Starts a run of num_ranks ranks (a multiple of 8), takes one step, saves, and resumes. `folder` must be empty.
WorldRun run_world(int num_ranks, const std::filesystem::path& folder, const WrapTransport& wrap = {});

/// Returns the phases in which a rank of the larger world sends more than logarithmic growth allows: more messages per
/// doubling than from a world of one rank to the smaller world.
std::vector<std::string> phases_that_grow_too_fast(const WorldRun& smaller, const WorldRun& larger);

}  // namespace tessera
