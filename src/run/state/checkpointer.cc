#include "run/state/checkpointer.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "comm/together.h"
#include "run/record/run_folder.h"
#include "run/state/saved_model.h"
#include "run/state/training_state.h"
#include "system/progress_bar.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// The kinds of shards, in the order of Checkpointer::Pieces.
constexpr std::array kKinds = {kModelShards, kOptimizerShards};

/// How many seconds a save waits for the one before. If that takes longer, the storage hangs or is too slow for
/// checkpoint.interval.
constexpr double kPatience = 3.0;

/// Returns whether the last part of a key is one of these names.
bool is_one_of(std::string_view key, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, key.substr(key.rfind('.') + 1)) != names.end();
}

/// Returns whether a key of the model may change in the course of a run. DeepSeek-V3 trained its last tokens with other
/// values.
bool is_of_schedule(std::string_view key) {
  return is_one_of(key, {"load_balance_coeff", "seq_balance_loss_coeff", "mtp_loss_weight"});
}

/// Returns whether a key of the model says how it is trained, not what it is. original_seq_len is one, because files
/// without YaRN do not have it.
bool is_of_training(std::string_view key) {
  return is_of_schedule(key) || is_one_of(key, {"attn_mask_type", "eos_id", "original_seq_len", "rope_factor",
                                                "beta_fast", "beta_slow", "mscale"});
}

/// Throws Error if the checkpoint's run read other data. It is checked first: another tokenizer also changes the
/// model's eos_id, and an error about that would mislead.
void require_same_dataset(const fs::path& path, const CheckpointManifest& manifest, const data::Loader& loader) {
  const data::LoaderState saved = manifest.state.at("loader").get<data::LoaderState>(), now = loader.state();
  if (saved.dataset_checksum == now.dataset_checksum) return;
  const nlohmann::json& tokenizer = manifest.state.at("tokenizer");
  const JobConfig config = parse_job_config(manifest.state.at("config").get<std::string>());
  fail(
      "'{}' was trained on another dataset: '{}' with checksum {} (tokenizer {}, EOS {}); training.dataset_path is "
      "'{}' "
      "with checksum {} (tokenizer {}, EOS {}). Give that dataset to go on, or another job.dump_folder to start anew",
      path.string(), config.training.dataset_path, to_hex(saved.dataset_checksum),
      tokenizer.at("kind").get<std::string>(), tokenizer.at("eos_id").get<std::int64_t>(), loader.dataset().string(),
      to_hex(now.dataset_checksum), loader.manifest().tokenizer_kind, loader.manifest().eos_id);
}

/// Throws Error unless the checkpoint belongs to this run.
void require_same_run(const fs::path& path, const CheckpointManifest& manifest, std::int64_t step,
                      const JobConfig& config) {
  require(manifest.step == step, "'{}' says that it is of step {}", path.string(), manifest.step);
  const nlohmann::json identity = model_identity(config);
  for (const auto& [key, value] : identity.items()) {
    const std::string saved = manifest.state.at("model").value(key, "(absent)"), now = value.get<std::string>();
    require(saved == now || is_of_schedule(key), "'{}' was trained with {} = {}, this run has {}", path.string(), key,
            saved, now);
  }
  const auto seed = manifest.state.at("seed").get<std::int64_t>();
  require(seed == config.debug.seed, "'{}' was trained with debug.seed = {}, this run has {}", path.string(), seed,
          config.debug.seed);
}

bool has_optimizer(const CheckpointManifest& manifest) {
  return std::ranges::any_of(manifest.files,
                             [](const auto& file) { return is_shard_file_name(file.first, kOptimizerShards); });
}

/// Throws Error if the run cannot go on, because the checkpoint holds the weights alone.
void require_optimizer(const fs::path& path, const CheckpointManifest& manifest, const JobConfig& config) {
  require(
      has_optimizer(manifest) || manifest.step >= config.training.steps,
      "'{}' holds the weights alone (checkpoint.last_save_model_only), so a run of training.steps = {} cannot go on "
      "from it. Go on from an earlier one with --checkpoint.load_step, or start another run from these weights: "
      "--checkpoint.initial_load_path with another --job.dump_folder",
      path.string(), config.training.steps);
}

/// Returns the configuration that a checkpoint was saved with, or nullopt if it has keys that this program does not
/// know.
std::optional<JobConfig> saved_config(const CheckpointManifest& manifest) {
  try {
    return parse_job_config(manifest.state.at("config").get<std::string>());
  } catch (const Error& error) {
    spdlog::warn("the checkpoint's configuration cannot be compared with this run's: {}", error.what());
    return std::nullopt;
  }
}

/// Warns if YaRN differs. It is part of what the weights compute, and the sequences' length decides whether it is used.
void warn_of_other_yarn(const fs::path& path, const HfConfig& saved, const JobConfig& config) {
  const ModelConfig &before = saved.model, &now = config.model.args;
  if (saved.seq_len <= before.original_seq_len) return;
  if (config.training.seq_len <= now.original_seq_len) {
    spdlog::warn(
        "the weights in '{}' are for {} tokens with YaRN; training.seq_len = {} is not above "
        "model.args.original_seq_len = {}, so this run goes without",
        path.string(), saved.seq_len, config.training.seq_len, now.original_seq_len);
    return;
  }
  const auto numbers = [](const ModelConfig& m) {
    return fmt::format("original_seq_len = {}, rope_factor = {}, beta_fast = {}, beta_slow = {}, mscale = {}",
                       m.original_seq_len, m.rope_factor, m.beta_fast, m.beta_slow, m.mscale);
  };
  if (numbers(before) == numbers(now)) return;
  spdlog::warn("the weights in '{}' have model.args {}; this run has {}", path.string(), numbers(before), numbers(now));
}

/// Calls `read`, which reads a trainer's state from a manifest. Throws Error if the state is not there.
template <typename Read>
void require_trainer_state(const fs::path& path, Read&& read) {
  try {
    read();
  } catch (const nlohmann::json::exception& error) {
    fail("the manifest of '{}' does not hold a trainer's state: {}", path.string(), json_problem(error));
  }
}

/// Runs a check of a checkpoint that all ranks do together. Returns what is wrong, or nullopt if nothing is.
template <typename Check>
std::optional<std::string> error_of(Check&& check) {
  try {
    check();
    return std::nullopt;
  } catch (const RankFailure&) {
    throw;
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

nlohmann::json model_identity(JobConfig config) {
  nlohmann::json identity;
  for (const auto& entry : config_table(config).describe()) {
    if (entry.key.starts_with("model.args.") || entry.key == "training.mixed_precision_param") {
      identity[entry.key] = entry.value;
    }
  }
  return identity;
}

Checkpointer::Checkpointer(const JobConfig& config, Ranks& ranks, const Mesh& mesh, Parameters& parameters,
                           const data::Tokenizer& tokenizer)
    : config_(config),
      ranks_(ranks),
      mesh_(mesh),
      parameters_(parameters),
      tokenizer_(tokenizer),
      folder_(fs::path(config.job.dump_folder) / config.checkpoint.folder) {}

Checkpointer::~Checkpointer() { stop_.request_stop(); }

Checkpointer::StatePieces Checkpointer::pieces() const {
  StatePieces pieces;
  auto& [model, optimizer] = pieces;
  for (ParamId id = 0; id < parameters_.size(); ++id) {
    const Parameters::Range range = parameters_.shard_range(id);
    if (range.begin == range.end) continue;
    const std::string& name = parameters_.spec(id).name;
    const Piece piece{.slice = parameters_.slice(id), .begin = range.begin, .end = range.end};
    model.push_back({name, piece, parameters_.master_shard(id)});
    for (std::size_t i = 0; i < parameters_.optimizer_tensors().size(); ++i) {
      optimizer.push_back(
          {name + parameters_.optimizer_tensors()[i].suffix, piece, parameters_.optimizer_shard(i, id)});
    }
  }
  for (ParamId id = 0; id < parameters_.num_buffers(); ++id) {
    const Tensor buffer = parameters_.buffer(id);
    const ParamSpec& spec = parameters_.buffer_spec(id);
    model.push_back({spec.name, Piece::whole(spec.shape), buffer.reshape({buffer.num_elements()})});
  }
  return pieces;
}

Checkpointer::StatePieces Checkpointer::pieces_to_write() const {
  if (!is_writer()) return {};
  StatePieces pieces = this->pieces();
  // All ranks of a stage have its buffers; one rank writes them.
  std::vector<TensorPiece>& model = pieces.front();
  if (mesh_.shard_of_whole.rank() != 0) model.resize(model.size() - parameters_.num_buffers());
  return pieces;
}

std::span<const std::string_view> Checkpointer::kinds_at(std::int64_t step) const {
  const bool weights_alone = config_.checkpoint.last_save_model_only && step == config_.training.steps;
  return std::span(kKinds).first(weights_alone ? 1 : kKinds.size());
}

bool Checkpointer::takes_snapshot() const {
  return config_.checkpoint.async_mode == AsyncMode::kAsync || config_.device(ranks_.num_on_node()) == Device::kCuda;
}

std::size_t Checkpointer::snapshot_bytes() const {
  return config_.checkpoint.enable && takes_snapshot() ? num_bytes_to_write() : 0;
}

std::size_t Checkpointer::num_bytes_to_write() const {
  std::size_t sum = 0;
  for (const std::vector<TensorPiece>& tensors : pieces_to_write()) {
    for (const TensorPiece& tensor : tensors) sum += tensor.numbers.num_bytes();
  }
  return sum;
}

void Checkpointer::allocate_snapshot() { snapshot_ = Buffer(snapshot_bytes()); }

void Checkpointer::take_snapshot(StatePieces& pieces) {
  std::byte* next = snapshot_.data();
  for (std::vector<TensorPiece>& tensors : pieces) {
    for (TensorPiece& tensor : tensors) {
      const Tensor copy(next, tensor.numbers.shape(), tensor.numbers.dtype(), Device::kCpu);
      parameters_.read(tensor.numbers, copy);
      tensor.numbers = copy;
      next += copy.num_bytes();
    }
  }
}

void Checkpointer::save(std::int64_t step, const data::LoaderState& loader, bool is_last) {
  if (!finish_within(is_last ? std::numeric_limits<double>::infinity() : kPatience)) {
    if (is_first_rank()) {
      spdlog::warn("step {} is not saved: the storage is still busy with step {}, since {:.0f} s. Training goes on",
                   step, manifest_.step, since_start_.seconds());
    }
    return;
  }
  is_last_ = is_last;
  since_start_ = {};
  saved_ = {.step = step};
  phase_ = Phase::kWriting;
  manifest_ = {.step = step, .num_shards = mesh_.model.size()};
  JobConfig config = config_;
  config.training.global_batch_size = config.sequences_per_step(mesh_.num_data_ranks());
  manifest_.state = {{"seed", config.debug.seed},
                     {"loader", loader},
                     {"model", model_identity(config)},
                     {"tokenizer", tokenizer_state(tokenizer_)},
                     {"config", config_table(config).to_toml()}};
  if (is_writer()) {
    StatePieces pieces = pieces_to_write();
    for (std::size_t kind = kinds_at(step).size(); kind < pieces.size(); ++kind) pieces[kind].clear();
    if (takes_snapshot()) take_snapshot(pieces);
    task_ = std::async(std::launch::async, [this, pieces = std::move(pieces)] { write_shards(pieces); });
  }
  saved_.stall_seconds = since_start_.seconds();
  if (config_.checkpoint.async_mode == AsyncMode::kDisabled) finish();
}

void Checkpointer::write_shards(const StatePieces& pieces) {
  const fs::path partial = partial_path(folder_, manifest_.step, saver_);
  create_folder(partial);
  const ShardId id{.step = manifest_.step, .shard = mesh_.model.rank(), .num_shards = manifest_.num_shards};
  const auto kinds = kinds_at(manifest_.step);
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    const std::string name = shard_file_name(kinds[kind], id.shard, id.num_shards);
    written_[kind] = write_shard(partial / name, id, pieces[kind], stop_.get_token());
  }
}

bool Checkpointer::ready() const {
  return !task_.valid() || task_.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
}

void Checkpointer::advance() {
  if (phase_ == Phase::kIdle) return;
  const Stopwatch stall;
  try {
    run_together(ranks_.world(), "the checkpoint's files", [&] {
      if (task_.valid()) task_.get();
    });
  } catch (const RankFailure&) {
    throw;  // other ranks may still write
  } catch (const Error& error) {
    phase_ = Phase::kIdle;
    if (is_first_rank()) discard_partial(folder_, manifest_.step, saver_);
    if (is_last_ || error.status() != ExitStatus::kStorageFailed) throw;
    if (is_first_rank()) {
      spdlog::warn("step {} is not saved: {}. Training goes on, and the next save is tried", manifest_.step,
                   error.what());
    }
    return;
  }
  if (phase_ == Phase::kWriting) {
    phase_ = Phase::kCommitting;
    gather_files();
    if (is_first_rank()) task_ = std::async(std::launch::async, [this] { commit(); });
    saved_.stall_seconds += stall.seconds();
    return;
  }
  phase_ = Phase::kIdle;
  saved_.stall_seconds += stall.seconds();
  saved_.seconds = since_start_.seconds();
  if (is_first_rank()) {
    spdlog::info("saved {} in {:.2f} s; training waited {:.3f} s", checkpoint_path(folder_, saved_.step).string(),
                 saved_.seconds, saved_.stall_seconds);
  }
  if (on_saved_) on_saved_(saved_);
}

bool Checkpointer::finish_within(double seconds) {
  const Stopwatch since_begin;
  while (phase_ != Phase::kIdle) {
    const Stopwatch stall;
    const bool have_ended =
        wait_together(ranks_.world(), "whether files are written", task_, seconds - since_begin.seconds());
    saved_.stall_seconds += stall.seconds();
    if (!have_ended) return false;
    advance();
  }
  return true;
}

void Checkpointer::gather_files() {
  // A checksum is sent as two halves, which doubles hold exactly.
  std::vector<double> own = {is_writer() ? static_cast<double>(mesh_.model.rank()) : -1.0};
  for (const WrittenFile& file : written_) {
    for (const std::uint64_t number : {file.size, file.checksum >> 32, file.checksum & 0xffffffffu}) {
      own.push_back(static_cast<double>(number));
    }
  }
  const std::vector<double> all = ranks_.world().all_gather(own, "the checkpoint's files");
  const auto kinds = kinds_at(manifest_.step);
  for (std::size_t begin = 0; begin < all.size(); begin += own.size()) {
    const auto shard = static_cast<std::int64_t>(all[begin]);
    if (shard < 0) continue;
    for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
      const auto number = [&](std::size_t i) { return static_cast<std::uint64_t>(all[begin + 1 + 3 * kind + i]); };
      manifest_.files[shard_file_name(kinds[kind], shard, manifest_.num_shards)] = {
          .size = number(0), .checksum = number(1) << 32 | number(2)};
    }
  }
}

void Checkpointer::commit() {
  const fs::path partial = partial_path(folder_, manifest_.step, saver_);
  for (const auto& [name, written] : manifest_.files) {
    std::error_code missing;
    require(fs::file_size(partial / name, missing) == written.size,
            "'{}' was written by another rank but is not here: all machines of a run need the same checkpoint folder",
            (partial / name).string());
  }
  for (const CheckpointPart& part : tokenizer_parts(tokenizer_)) {
    manifest_.files[part.name] = part.write(partial / part.name);
  }
  if (before_commit_) before_commit_();
  commit_checkpoint(folder_, manifest_, saver_);
  damaged_.erase(manifest_.step);
  prune_checkpoints(folder_, saver_,
                    {.newest = config_.checkpoint.keep_latest_k, .last_saved = manifest_.step, .not_whole = damaged_});
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

std::optional<std::int64_t> Checkpointer::choose_step() {
  const std::int64_t asked = config_.checkpoint.load_step;
  run_together(ranks_.world(), "the choice of a checkpoint", [&] {
    if (!is_first_rank()) return;
    create_folder(folder_);
    prune_checkpoints(folder_, saver_);  // removes what a killed run has left
    if (asked < 0) return;
    const std::vector<std::int64_t> steps = steps_of_folders(folder_);
    const fs::path path = checkpoint_path(folder_, asked);
    require(!steps.empty(), "checkpoint.load_step is {}, but '{}' holds no checkpoint: leave the key out to start anew",
            asked, folder_.string());
    require(fs::exists(path), "there is no checkpoint '{}'; checkpoint.load_step is {}, saved are the steps {}",
            path.string(), asked, fmt::join(steps, ", "));
    if (asked < steps.back()) {
      spdlog::warn(
          "'{}' is not the newest checkpoint: a start without checkpoint.load_step goes on from step {}, unless those "
          "of later steps are moved away",
          path.string(), steps.back());
    }
  });
  return asked < 0 ? newest_below(std::numeric_limits<std::int64_t>::max()) : asked;
}

std::optional<std::int64_t> Checkpointer::newest_below(std::int64_t limit) {
  // Rank 0 decides, because other machines may see a new folder a little later.
  double newest = -1.0;
  if (is_first_rank()) {
    for (const std::int64_t step : steps_of_folders(folder_)) {
      if (step < limit) newest = static_cast<double>(step);
    }
  }
  newest = ranks_.world().all_gather(std::span(&newest, 1), "the newest checkpoint").front();
  return newest < 0.0 ? std::nullopt : std::optional(static_cast<std::int64_t>(newest));
}

std::optional<std::string> Checkpointer::read_manifest(Stored& stored) {
  return error_of([&] {
    run_together(ranks_.world(), "a checkpoint's manifest",
                 [&] { stored.manifest = read_checkpoint_manifest(stored.path); });
  });
}

std::optional<std::string> Checkpointer::open_files(Stored& stored) {
  return error_of([&] {
    run_long_together(ranks_.world(), "the check of a checkpoint", [&] {
      const CheckpointManifest& manifest = stored.manifest;
      for (const std::string_view kind : kKinds) {
        if (kind == kOptimizerShards && !has_optimizer(manifest)) continue;
        stored.shards.emplace_back(stored.path, kind, manifest.step, manifest.num_shards);
      }
      verify_files(stored.path, manifest, {}, {.rank = ranks_.rank(), .size = ranks_.size()});
    });
  });
}

void Checkpointer::fail_damaged(std::int64_t step, const std::string& damage, std::optional<std::int64_t> in_memory) {
  if (is_first_rank()) spdlog::warn("step {} is damaged; looking for a checkpoint that is whole", step);
  std::optional<std::int64_t> whole = newest_below(std::numeric_limits<std::int64_t>::max());
  for (; whole; whole = newest_below(*whole)) {
    Stored stored{.path = checkpoint_path(folder_, *whole)};
    if (*whole != step && !read_manifest(stored) && !open_files(stored)) break;
  }
  const std::string path = checkpoint_path(folder_, step).string();
  if (in_memory && (!whole || *in_memory > *whole)) {
    fail(
        "{}\nThe checkpoint '{}' is damaged. The copies in memory of step {} are whole: --checkpoint.fallback goes on "
        "from there",
        damage, path, *in_memory);
  }
  require(whole.has_value(),
          "{}\nThe checkpoint '{}' is damaged, and no other one is whole. Move it away to start without it", damage,
          path);
  fail(
      "{}\nThe checkpoint '{}' is damaged. That of step {} is whole, by its checksums: --checkpoint.load_step={} goes "
      "on from there. --checkpoint.fallback goes on from the newest whole one whenever the last is damaged",
      damage, path, *whole, *whole);
}

void Checkpointer::tell_what_was_passed_over(std::int64_t step, std::int64_t newest,
                                             const std::string& passed_over) const {
  if (!is_first_rank() || passed_over.empty()) return;
  warn_in_frame(fmt::format("THE RUN GOES BACK TO STEP {}: THE CHECKPOINT OF STEP {} IS DAMAGED", step, newest),
                fmt::format("Passed over (checkpoint.fallback), and left where they are until their step is saved "
                            "again:{}",
                            passed_over));
}

std::optional<ResumedFrom> Checkpointer::resume(data::Loader& loader, std::optional<std::int64_t> in_memory) {
  const std::optional<std::int64_t> first = choose_step();
  if (config_.checkpoint.load_step >= 0) in_memory.reset();  // a person has asked for that checkpoint
  if (!first || (in_memory && *in_memory > *first)) return std::nullopt;
  const bool falls_back = config_.checkpoint.fallback && config_.checkpoint.load_step < 0;
  ResumedFrom resumed{.step = *first, .config = {}};
  Stored stored;
  std::string passed_over;
  for (;;) {
    stored = {.path = checkpoint_path(folder_, resumed.step)};
    std::optional<std::string> damage = read_manifest(stored);
    if (!damage) {
      // The run is checked before the whole checkpoint is read.
      run_together(ranks_.world(), "whether the checkpoint is of this run", [&] {
        require_trainer_state(stored.path, [&] {
          require_same_dataset(stored.path, stored.manifest, loader);
          require_same_run(stored.path, stored.manifest, resumed.step, config_);
          require_optimizer(stored.path, stored.manifest, config_);
          if (is_first_rank()) resumed.config = saved_config(stored.manifest);
        });
      });
      damage = open_files(stored);
    }
    if (!damage) break;
    if (!falls_back) fail_damaged(resumed.step, *damage, in_memory);
    passed_over += fmt::format("\n  step {}: {}", resumed.step, *damage);
    damaged_.insert(resumed.step);
    const std::optional<std::int64_t> next = newest_below(resumed.step);
    if (in_memory && (!next || *in_memory > *next)) {
      tell_what_was_passed_over(*in_memory, *first, passed_over);
      return std::nullopt;
    }
    require(next.has_value(), "no checkpoint in '{}' is whole. Move them away to start without them:{}",
            folder_.string(), passed_over);
    resumed.step = *next;
  }
  run_together(ranks_.world(), "a checkpoint's numbers", [&] {
    require_trainer_state(stored.path,
                          [&] { loader.restore(stored.manifest.state.at("loader").get<data::LoaderState>()); });
    const StatePieces pieces = this->pieces();
    for (std::size_t kind = 0; kind < stored.shards.size(); ++kind) {
      for (const auto& [name, piece, numbers] : pieces[kind]) {
        const AssembledTensor saved = stored.shards[kind].at(name, piece.slice.global);
        parameters_.fill(numbers, [&, &piece = piece](float* target) { saved.read(piece, target); });
      }
    }
  });
  tell_what_was_passed_over(resumed.step, *first, passed_over);
  if (is_first_rank()) spdlog::info("resumed from {}", stored.path.string());
  return resumed;
}

bool load_initial_weights(const JobConfig& config, Ranks& ranks, Parameters& parameters) {
  const fs::path path = config.checkpoint.initial_load_path;
  if (path.empty()) return false;
  std::optional<SavedModel> files;
  run_long_together(ranks.world(), "the check of the initial weights",
                    [&] { files.emplace(path, VerifyShare{.rank = ranks.rank(), .size = ranks.size()}); });
  run_together(ranks.world(), "the initial weights", [&] {
    const SavedModel& saved = *files;
    require(saved.is_hf() == config.checkpoint.initial_load_in_hf,
            "checkpoint.initial_load_path '{}' is {}, but checkpoint.initial_load_in_hf is {}", path.string(),
            saved.is_hf() ? "a folder of Hugging Face files" : "a checkpoint of Tessera",
            config.checkpoint.initial_load_in_hf);
    // Weights can fit another configuration if all shapes agree, but then they are not this model's. So the keys are
    // compared.
    JobConfig given = config, other = config;
    other.model.args = saved.config().model;
    // One group of experts is the same as none, and Hugging Face's files do not distinguish the two.
    for (ModelConfig* model : {&given.model.args, &other.model.args}) {
      if (model->n_expert_groups <= 1) model->n_expert_groups = model->n_limited_groups = 0;
    }
    const auto values = config_table(given).describe(), saved_values = config_table(other).describe();
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!values[i].key.starts_with("model.args.") || is_of_training(values[i].key)) continue;
      require(values[i].value == saved_values[i].value, "'{}' has {} = {}, this run has {}", path.string(),
              values[i].key, saved_values[i].value, values[i].value);
    }
    if (ranks.rank() == 0) warn_of_other_yarn(path, saved.config(), config);
    saved.load(parameters, config.model.args);
  });
  if (ranks.rank() == 0) spdlog::info("initial weights from {}", path.string());
  return true;
}

}  // namespace tessera
