// Ranks that are processes, started by mpirun or srun.
#pragma once

#include <optional>

#include "comm/transport.h"

namespace tessera {

/// True if mpirun or srun started this process as a rank. A shell that salloc or sbatch has started is none, nor is
/// what runs in it.
bool launched_by_mpi();

/// Its rank, as the launcher says before MPI has started; none if it does not.
std::optional<int> launched_rank();

/// MPI for the lifetime of the process: at most one. Throws Error where MPI cannot run as needed.
class MpiRuntime {
 public:
  MpiRuntime();
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  std::unique_ptr<Transport> world() const;
};

}  // namespace tessera
