// Runs a tiny model on many ranks, which are threads of this process, and counts what they send. It shows how the work
// between ranks grows with the world, without a cluster. Ranks, groups, trainer and checkpoints are those of a real
// run.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace tessera {

/// Describes what the busiest rank did in one phase.
struct WorldPhase {
  /// Counts what a rank sends, and to how many ranks, over all its groups.
  struct Sent {
    std::int64_t messages = 0, bytes = 0, receivers = 0;
  };
  std::string name;      // "start", "step", "save" or "resume"
  double seconds = 0.0;  // of rank 0
  /// What the host sends between ranks, on GPUs, too: agreements, losses and loads. Its bytes include a pipeline's
  /// activations, which NCCL moves on GPUs. Ranks that wait for each other vote ten times a second, so the number of
  /// messages depends on the time. The number of receivers does not.
  Sent host;
  /// What NCCL moves on GPUs: weights, gradients and tokens. On CPUs each rank sends to each other rank of its group.
  Sent tensors;
};

struct WorldRun {
  int num_ranks = 0;
  std::vector<WorldPhase> phases;
  std::size_t num_files = 0;          // of a checkpoint
  std::uintmax_t manifest_bytes = 0;  // of its manifest
};

/// Wraps the transport of every rank. What it sends is counted.
using WrapTransport = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

/// Starts a run of num_ranks ranks, takes one step, saves, and resumes. The number is a multiple of 8, and above 1024 a
/// multiple of 1024: each 1024 ranks are a replica. `folder` must be empty.
WorldRun run_world(int num_ranks, const std::filesystem::path& folder, const WrapTransport& wrap = {});

/// Returns the phases in which the number of ranks to which a rank sends grows faster than the logarithm of the world:
/// by more per doubling than it did up to the smaller world, and by more than one group's tree or rounds add.
std::vector<std::string> phases_that_grow_too_fast(const WorldRun& smaller, const WorldRun& larger);

}  // namespace tessera
