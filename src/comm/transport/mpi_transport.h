// Ranks that are processes started by mpirun or srun and that communicate through MPI.
#pragma once

#include <optional>

#include "comm/transport/transport.h"

namespace tessera {

/// Returns whether mpirun or srun started this process as a rank. A shell that salloc or sbatch started is not a rank,
/// and neither is a program that runs in such a shell.
bool launched_by_mpi();

/// Returns this process's rank as the launcher gives it before MPI has started, or nullopt if it does not.
std::optional<int> launched_rank();
/// Returns how many ranks the launcher has started, or nullopt if it does not say.
std::optional<int> launched_size();

/// Starts MPI and ends it with the object's life. A process makes at most one. Throws Error if MPI cannot run as
/// needed.
class MpiRuntime {
 public:
  MpiRuntime();
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  std::unique_ptr<Transport> world() const;
};

}  // namespace tessera
