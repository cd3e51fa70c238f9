#include "run/state/state_guard.h"

#include "base/json.h"
#include "base/log.h"
#include "run/record/run_info.h"

namespace tessera {
namespace {

/// Returns a checksum of all that decides a run's numbers: its mesh, configuration and data.
std::string identity_of_run(const JobConfig& config, const Mesh& mesh, const data::Loader& loader) {
  nlohmann::ordered_json identity = {{"mesh", describe(mesh.degrees)},
                                     {"dataset.train", to_hex(loader.state().dataset_checksum)}};
  for (const auto& [key, value] : config_values(recorded_config(config, mesh.num_data_ranks()))) {
    if (makes_the_run(key)) identity[key] = value;
  }
  return checksum_of_rest(identity);
}

}  // namespace

void StateGuard::place_copies(cuda::Event* state_read_done) {
  if (config_.checkpoint.memory_interval > 0) copies_.emplace(config_, ranks_, mesh_, state_, state_read_done);
}

void StateGuard::open(const RunIdentity& run, const data::Loader& loader) {
  if (!copies_ && config_.checkpoint.verify_interval <= 0) return;
  replica_check_.emplace(ranks_, mesh_, state_, config_.job.dump_folder, run.attempt,
                         identity_of_run(config_, mesh_, loader));
  if (copies_) copies_->open(run, loader.state());
  if (config_.checkpoint.verify_interval > 0 && !replica_check_->sees_weights() && ranks_.rank() == 0) {
    spdlog::warn(
        "checkpoint.verify_interval: no weights of this mesh are held by two ranks "
        "(parallelism.data_parallel_replicate_degree = 1), so flipped bits are not seen{}",
        ranks_.size() > 1 ? ", but in the experts' biases" : "");
  }
}

bool StateGuard::verifies_after(std::int64_t step, bool saves) const {
  const std::int64_t interval = config_.checkpoint.verify_interval;
  return replica_check_ && ((interval > 0 && step % interval == 0) || saves || replica_check_->explains(step));
}

void StateGuard::run(std::int64_t step, const Due& due, const data::Loader& loader, const Tell& tell) {
  const auto compare = [this, step, verifies = due.verifies, tell](const TrainingState::Checksums& checksums) {
    const std::uint64_t of_model = replica_check_->compare(step, checksums);
    if (tell && verifies) tell(of_model);
  };
  if (due.has_copied) copies_->advance();
  const bool is_compared = due.copies && copies_->take(step, loader.state(), compare, due.verifies);
  if (due.verifies && !is_compared) compare(state_.read());
}

void StateGuard::finish() {
  if (copies_) copies_->finish();
}

void StateGuard::remove_copies() {
  if (copies_) copies_->remove();
}

}  // namespace tessera
