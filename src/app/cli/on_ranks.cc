#include "app/cli/on_ranks.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "app/cli/launch_line.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "comm/transport/mpi_transport.h"
#include "system/host_name.h"

namespace tessera {
namespace {

Progress::Seconds seconds(std::int64_t count) { return Progress::Seconds(static_cast<double>(count)); }

/// Returns this rank's file, or null without job.node_folder.
std::unique_ptr<RankFile> make_rank_file(const JobConfig& config, int rank) {
  if (config.job.node_folder.empty()) return nullptr;
  return std::make_unique<RankFile>(config.job.node_folder, config.job.attempt, rank);
}

/// Returns what body() returns, and records in the rank's file how the rank ends.
template <typename Body>
int tell_end(Ranks& ranks, Body&& body) {
  try {
    const int status = body();
    ranks.set_end(static_cast<ExitStatus>(status), "");
    return status;
  } catch (const std::exception& error) {
    ranks.set_end(exit_status_of(error), error.what());
    throw;
  }
}

}  // namespace

int run_on_ranks(const std::function<JobConfig()>& read_config,
                 const std::function<int(const JobConfig& config, Ranks& ranks)>& body) {
  if (!launched_by_mpi()) {
    const JobConfig config = read_config();
    Ranks one(make_rank_file(config, 0));
    return tell_end(one, [&] {
      require_enough_ranks(config, 1);
      return body(config, one);
    });
  }
  JobConfig config;
  std::unique_ptr<RankFile> file;  // created before MPI starts, which may wait for ranks that do not arrive
  std::exception_ptr unreadable;   // one rank reports it
  try {
    config = read_config();
    file = make_rank_file(config, launched_rank().value_or(0));
  } catch (...) {
    unreadable = std::current_exception();
  }
  const Progress::Seconds timeout = seconds(config.comm.init_timeout_seconds);
  // Ranks do not know each other yet, and MPI_Abort is not available: the launcher ends the others when one exits.
  Progress start(nullptr, timeout);
  start.set_failure_handler([&file](const std::exception& error) {
    const int status = static_cast<int>(exit_status_of(error));
    if (file != nullptr) set_end(file->entry(), status, error.what());
    spdlog::error("{}", error.what());
    std::_Exit(status);
  });
  std::optional<Progress::Watched> watched(std::in_place, start, "the start of MPI on all ranks");
  const MpiRuntime runtime;
  std::unique_ptr<Transport> transport = runtime.world();
  Transport& world = *transport;
  const int launched = launched_size().value_or(world.size());
  require(launched == world.size(),
          "the launcher has started {} ranks, but MPI sees {}: expected a start by the mpirun of the MPI library that "
          "this program was built with, or by srun --mpi=pmix",
          launched, world.size());
  TESSERA_CHECK(file == nullptr || file->world_rank() == world.rank(), "the launcher calls rank {} {}", world.rank(),
                file->world_rank());
  Ranks ranks(std::move(transport), timeout, std::move(file));
  watched.reset();
  if (ranks.rank() != 0) {
    spdlog::set_level(spdlog::level::warn);
    spdlog::set_pattern(fmt::format("[%H:%M:%S] %^%l%$ [rank {} on {}] %v", ranks.rank(), host_name()));
  }
  const auto end = [&](const std::exception& error) {
    const ExitStatus status = exit_status_of(error);
    const bool is_of_ranks = status == ExitStatus::kRankFailed;
    ranks.set_end(status, error.what());
    // An error that all ranks see is reported once, on the first node. Each node reports those of its own ranks that
    // wait for others.
    if (!is_of_ranks && !ranks.on_first_node()) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (ranks.may_report()) {
      spdlog::error("{}", error.what());
      if (is_of_ranks && ranks.size() > ranks.num_on_node()) std::this_thread::sleep_for(std::chrono::seconds(1));
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(2));  // the rank that reports ends this one
    }
    world.abort(static_cast<int>(status));
    return static_cast<int>(status);
  };
  ranks.set_failure_handler([end](const std::exception& error) { end(error); });
  try {
    if (unreadable) std::rethrow_exception(unreadable);
    const MappedFile program("/proc/self/exe");
    const auto* text = reinterpret_cast<const char*>(program.bytes().data());
    ranks.require_same({text, program.bytes().size()}, "program");
    require_enough_ranks(config, ranks.size());
    const int status = body(config, ranks);
    ranks.world().barrier("the end of the run");  // MPI's own end waits without a timeout
    ranks.set_end(static_cast<ExitStatus>(status), "");
    return status;
  } catch (const std::exception& error) {
    return end(error);
  }
}

}  // namespace tessera
