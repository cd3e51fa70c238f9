#include "run/state/checkpointer.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "comm/halves.h"
#include "comm/together.h"
#include "run/record/run_folder.h"
#include "run/record/run_info.h"
#include "run/state/saved_model.h"
#include "system/progress_bar.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// How many seconds a save waits for the one before. If that takes longer, the storage hangs or is too slow for
/// checkpoint.interval.
constexpr double kPatience = 3.0;

}  // namespace

Checkpointer::Checkpointer(const JobConfig& config, Ranks& ranks, const Mesh& mesh, Parameters& parameters,
                           const data::Tokenizer& tokenizer)
    : config_(config),
      ranks_(ranks),
      mesh_(mesh),
      parameters_(parameters),
      tokenizer_(tokenizer),
      folder_(fs::path(config.job.dump_folder) / config.checkpoint.folder),
      reader_(config, ranks, parameters, folder_) {}

Checkpointer::~Checkpointer() { stop_.request_stop(); }

ShardPieces Checkpointer::pieces_to_write() const {
  if (!is_writer()) return {};
  ShardPieces pieces = shard_pieces(parameters_);
  // All ranks of a stage have its buffers; one rank writes them.
  std::vector<TensorPiece>& model = pieces.front();
  if (mesh_.shard_of_whole.rank() != 0) model.resize(model.size() - parameters_.num_buffers());
  return pieces;
}

std::span<const std::string_view> Checkpointer::kinds_at(std::int64_t step) const {
  const bool weights_alone = config_.checkpoint.last_save_model_only && step == config_.training.steps;
  return std::span(kShardKinds).first(weights_alone ? 1 : kShardKinds.size());
}

bool Checkpointer::takes_snapshot() const { return Snapshot::is_taken(config_, config_.device(ranks_.num_on_node())); }

std::size_t Checkpointer::snapshot_bytes() const {
  if (!config_.checkpoint.enable || !takes_snapshot() || !is_writer()) return 0;
  return Snapshot::peak_bytes(num_bytes_to_write(), config_.device(ranks_.num_on_node()));
}

std::size_t Checkpointer::num_bytes_to_write() const {
  std::size_t sum = 0;
  for (const std::vector<TensorPiece>& tensors : pieces_to_write()) {
    for (const TensorPiece& tensor : tensors) sum += tensor.numbers.num_bytes();
  }
  return sum;
}

void Checkpointer::prepare_snapshot(cuda::Event* state_read_done) {
  if (!takes_snapshot() || !is_writer()) return;
  const Device device = state_read_done == nullptr ? Device::kCpu : Device::kCuda;
  snapshot_.emplace(state_read_done, Snapshot::piece_bytes(num_bytes_to_write(), device));
}

void Checkpointer::save(std::int64_t step, const data::LoaderState& loader, bool is_last) {
  if (!finish_within(is_last ? std::numeric_limits<double>::infinity() : kPatience)) {
    if (is_first_rank()) {
      spdlog::warn("step {} is not saved: the storage is still busy with step {}, since {:.0f} s. Training goes on",
                   step, save_.manifest.step, save_.since_start.seconds());
    }
    return;
  }
  save_ = {.phase = Phase::kWriting,
           .is_last = is_last,
           .manifest = {.step = step, .num_shards = mesh_.model.size()},
           .result = {.step = step}};
  JobConfig config = recorded_config(config_, mesh_.num_data_ranks());
  save_.manifest.state = {{"seed", config.debug.seed},
                          {"loader", loader},
                          {"model", model_identity(config)},
                          {"tokenizer", tokenizer_state(tokenizer_)},
                          {"config", config_table(config).to_toml()}};
  if (is_writer()) {
    try {
      start_writing();
    } catch (const Error&) {  // no memory for the copy; all ranks see it in advance()
      std::promise<void> failed;
      failed.set_exception(std::current_exception());
      task_ = failed.get_future();
    }
  }
  save_.result.stall_seconds = save_.since_start.seconds();
  if (config_.checkpoint.async_mode == AsyncMode::kDisabled) finish();
}

void Checkpointer::start_writing() {
  ShardPieces pieces = pieces_to_write();
  for (std::size_t kind = kinds_at(save_.manifest.step).size(); kind < pieces.size(); ++kind) pieces[kind].clear();
  TESSERA_CHECK(snapshot_.has_value() == takes_snapshot());
  if (snapshot_) {
    std::vector<Tensor> tensors;
    for (const std::vector<TensorPiece>& of_kind : pieces) {
      for (const TensorPiece& piece : of_kind) tensors.push_back(piece.numbers);
    }
    snapshot_->start(tensors);
  }
  task_ = std::async(std::launch::async, [this, pieces = std::move(pieces)] {
    try {
      write_shards(pieces);
    } catch (...) {
      if (snapshot_) snapshot_->drop();
      throw;
    }
  });
}

void Checkpointer::write_shards(const ShardPieces& pieces) {
  const fs::path partial = partial_path(folder_, save_.manifest.step, saver_);
  create_folder(partial);
  const ShardId id{.step = save_.manifest.step, .shard = mesh_.model.rank(), .num_shards = save_.manifest.num_shards};
  const auto kinds = kinds_at(save_.manifest.step);
  const ReadTensor from_snapshot = [this](const Tensor& tensor, const ByteSink& sink) {
    snapshot_->read(tensor.num_bytes(), sink, stop_.get_token());
  };
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    const std::string name = shard_file_name(kinds[kind], id.shard, id.num_shards);
    save_.written[kind] =
        write_shard(partial / name, id, pieces[kind], stop_.get_token(), snapshot_ ? from_snapshot : read_from_host);
  }
}

bool Checkpointer::ready() const {
  return !task_.valid() || task_.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
}

void Checkpointer::advance() {
  if (save_.phase == Phase::kIdle) return;
  const Stopwatch stall;
  try {
    run_together(ranks_.world(), "the checkpoint's files", [&] {
      if (task_.valid()) task_.get();
    });
  } catch (const RankFailure&) {
    throw;  // other ranks may still write
  } catch (const Error& error) {
    save_.phase = Phase::kIdle;
    if (is_first_rank()) discard_partial(folder_, save_.manifest.step, saver_);
    if (save_.is_last || error.status() != ExitStatus::kStorageFailed) throw;
    if (is_first_rank()) {
      spdlog::warn("step {} is not saved: {}. Training goes on, and the next save is tried", save_.manifest.step,
                   error.what());
    }
    return;
  }
  if (save_.phase == Phase::kWriting) {
    save_.phase = Phase::kCommitting;
    gather_files();
    if (is_first_rank()) task_ = std::async(std::launch::async, [this] { commit(); });
    save_.result.stall_seconds += stall.seconds();
    return;
  }
  save_.phase = Phase::kIdle;
  save_.result.stall_seconds += stall.seconds();
  save_.result.seconds = save_.since_start.seconds();
  if (is_first_rank()) {
    spdlog::info("saved {} in {:.2f} s; training waited {:.3f} s", checkpoint_path(folder_, save_.result.step).string(),
                 save_.result.seconds, save_.result.stall_seconds);
  }
  if (on_saved_) on_saved_(save_.result);
}

bool Checkpointer::finish_within(double seconds) {
  const Stopwatch since_begin;
  while (save_.phase != Phase::kIdle) {
    const Stopwatch stall;
    const bool have_ended =
        wait_together(ranks_.world(), "whether files are written", task_, seconds - since_begin.seconds());
    save_.result.stall_seconds += stall.seconds();
    if (!have_ended) return false;
    advance();
  }
  return true;
}

void Checkpointer::gather_files() {
  std::vector<double> own = {is_writer() ? static_cast<double>(mesh_.model.rank()) : -1.0};
  for (const WrittenFile& file : save_.written) {
    own.push_back(static_cast<double>(file.size));
    append_halves(file.checksum, own);
  }
  const std::vector<double> all = ranks_.world().all_gather(own, "the checkpoint's files");
  if (!is_first_rank()) return;  // it writes the manifest
  const auto kinds = kinds_at(save_.manifest.step);
  for (std::size_t begin = 0; begin < all.size(); begin += own.size()) {
    const auto shard = static_cast<std::int64_t>(all[begin]);
    if (shard < 0) continue;
    for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
      const double* file = &all[begin + 1 + 3 * kind];
      save_.manifest.files[shard_file_name(kinds[kind], shard, save_.manifest.num_shards)] = {
          .size = static_cast<std::uint64_t>(file[0]), .checksum = join_halves(file + 1)};
    }
  }
}

void Checkpointer::commit() {
  const fs::path partial = partial_path(folder_, save_.manifest.step, saver_);
  for (const auto& [name, written] : save_.manifest.files) {
    const std::string path = partial / name;
    std::error_code error;
    const std::uintmax_t size = fs::file_size(path, error);
    if (error && !is_missing(error.value())) throw SystemError(fmt::format("look for '{}'", path), error.value());
    require(!error && size == written.size,
            "'{}' was written by another rank but is not here: all machines of a run need the same checkpoint folder",
            path);
  }
  for (const CheckpointPart& part : tokenizer_parts(tokenizer_)) {
    save_.manifest.files[part.name] = part.write(partial / part.name);
  }
  if (before_commit_) before_commit_();
  commit_checkpoint(folder_, save_.manifest, saver_);
  reader_.note_saved(save_.manifest.step);
  try {
    prune_checkpoints(folder_, saver_,
                      {.newest = config_.checkpoint.keep_latest_k,
                       .last_saved = save_.manifest.step,
                       .not_counted = reader_.passed_over()});
  } catch (const Error& error) {
    spdlog::warn("{}; step {} is saved, and the next save tries again to delete older ones", error.what(),
                 save_.manifest.step);
  }
}

std::optional<ResumedFrom> Checkpointer::resume(data::Loader& loader, std::optional<std::int64_t> in_memory) {
  return reader_.resume(loader, saver_, in_memory);
}

void Checkpointer::require_writable() {
  run_together(ranks_.world(), "whether checkpoints can be written", [&] {
    if (is_writer())
      require_writable_folder(folder_, "checkpoint.folder", fmt::format("probe-of-rank-{}", ranks_.rank()));
  });
  const auto own = static_cast<double>(num_bytes_to_write());
  const std::vector<double> all = ranks_.world().all_gather(std::span(&own, 1), "the size of a checkpoint");
  const double needed = std::accumulate(all.begin(), all.end(), 0.0);
  run_together(ranks_.world(), "whether a checkpoint fits the storage", [&] {
    std::error_code unknown;
    const fs::space_info space = fs::space(folder_, unknown);
    if (!is_first_rank() || unknown || space.capacity == 0) return;  // some network file systems do not tell
    require(
        needed <= static_cast<double>(space.available),
        "a checkpoint of this run takes {}, but the storage of '{}' (checkpoint.folder) has {} free; expected room "
        "for at least one. Free some, give another --checkpoint.folder, or train without: --checkpoint.enable=false",
        format_quantity(needed, "B"), folder_.string(), format_quantity(static_cast<double>(space.available), "B"));
  });
}

}  // namespace tessera
