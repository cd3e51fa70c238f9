// Runs bodies of tests on several ranks. The ranks are threads of the test or, under mpirun, its processes.
#pragma once

#include <functional>

#include "comm/ranks.h"
#include "comm/transport/mpi_transport.h"
#include "comm/transport/thread_transport.h"

namespace tessera::comm_test {

struct RankOptions {
  Progress::Seconds timeout{60.0};
  /// Wraps the transport of every rank.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> wrap = {};
  std::function<void(const std::exception&)> failure_handler = {};  // argument of Progress::set_failure_handler()
};

inline void run_rank(std::unique_ptr<Transport> transport, const RankOptions& options,
                     const std::function<void(ProcessGroup&)>& body) {
  if (options.wrap) transport = options.wrap(std::move(transport));
  Ranks ranks(std::move(transport), options.timeout);
  ranks.set_failure_handler(options.failure_handler);
  body(ranks.world());
}

/// Runs `body` on `num_ranks` ranks. Under mpirun the first `num_ranks` processes run it. If there are fewer, none
/// does.
inline void with_ranks(int num_ranks, const std::function<void(ProcessGroup&)>& body, const RankOptions& options = {}) {
  if (!launched_by_mpi()) {
    run_rank_threads(num_ranks,
                     [&](std::unique_ptr<Transport> transport) { run_rank(std::move(transport), options, body); });
    return;
  }
  static const MpiRuntime runtime;
  const std::unique_ptr<Transport> world = runtime.world();
  const bool takes_part = world->rank() < num_ranks && num_ranks <= world->size();
  std::unique_ptr<Transport> part = world->split(takes_part ? 0 : 1, world->rank(), "world");
  if (takes_part) run_rank(std::move(part), options, body);
}

/// Runs a body that needs Ranks, on one rank without a transport or on several threads.
inline void on_ranks(int num_ranks, const std::function<void(Ranks&)>& body) {
  if (num_ranks == 1) {
    Ranks one;
    return body(one);
  }
  run_rank_threads(num_ranks, [&](std::unique_ptr<Transport> transport) {
    Ranks ranks(std::move(transport), Progress::Seconds(60.0));
    body(ranks);
  });
}

}  // namespace tessera::comm_test
