#include "run/state/checkpoint_reader.h"

#include <fmt/ranges.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "comm/together.h"
#include "run/state/saved_model.h"
#include "run/state/shard_pieces.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Returns whether the last part of a key is one of these names.
bool is_one_of(std::string_view key, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, key.substr(key.rfind('.') + 1)) != names.end();
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

// Rank 0 tells the others what is in a manifest: a line of JSON, and a line for each file.

std::string text_of(const CheckpointManifest& manifest) {
  std::string text = nlohmann::json{
      {"step", manifest.step},
      {"num_shards", manifest.num_shards},
      {"has_optimizer", has_optimizer(manifest)},
      {"state",
       manifest.state}}.dump();
  for (const auto& [name, file] : manifest.files) text += '\n' + nlohmann::json{name, file.size, file.checksum}.dump();
  return text;
}

/// Reads what text_of() has written. Keeps the files that this process verifies, as verify_files() shares them.
void parse_text(const std::string& text, const VerifyShare& share, CheckpointManifest& manifest, bool& has_optimizer) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  nlohmann::json json = nlohmann::json::parse(line);
  manifest = {.step = json.at("step"), .num_shards = json.at("num_shards"), .state = std::move(json.at("state"))};
  has_optimizer = json.at("has_optimizer");
  for (int i = 0; std::getline(lines, line); ++i) {
    if (i % share.size != share.rank) continue;
    const nlohmann::json file = nlohmann::json::parse(line);
    manifest.files[file.at(0)] = {.size = file.at(1), .checksum = file.at(2)};
  }
}

/// Throws Error if the run cannot go on, because the checkpoint holds the weights alone.
void require_optimizer(const fs::path& path, bool has_optimizer, const CheckpointManifest& manifest,
                       const JobConfig& config) {
  require(
      has_optimizer || manifest.step >= config.training.steps,
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

/// Calls `check`, which throws Error if files of a checkpoint are not as they should be. Returns what is wrong with
/// them, or "" if nothing is. Throws SystemError if a file is there but cannot be read, which says nothing about it.
template <typename Check>
std::string damage_of(Check&& check) {
  try {
    check();
    return "";
  } catch (const SystemError& error) {
    if (!is_missing(error.reason())) throw;
    return error.what();
  } catch (const Error& error) {
    return error.what();
  }
}

/// Returns, on all ranks, the damage that the first of them has found, with its rank, or nullopt if none has found any.
std::optional<std::string> first_damage(ProcessGroup& world, std::string damage, std::string_view name) {
  if (!damage.empty() && world.size() > 1) damage = fmt::format("rank {}: {}", world.rank(), damage);
  damage = broadcast_first_text(world, damage, name);
  return damage.empty() ? std::nullopt : std::optional(damage);
}

}  // namespace

bool is_of_schedule(std::string_view key) {
  return is_one_of(key, {"load_balance_coeff", "seq_balance_loss_coeff", "mtp_loss_weight"});
}

nlohmann::json model_identity(JobConfig config) {
  nlohmann::json identity;
  for (const auto& entry : config_table(config).describe()) {
    if (entry.key.starts_with("model.args.") || entry.key == "training.mixed_precision_param") {
      identity[entry.key] = entry.value;
    }
  }
  return identity;
}

std::optional<std::int64_t> CheckpointReader::choose_step(const Saver& saver) {
  const std::int64_t asked = config_.checkpoint.load_step;
  run_together(ranks_.world(), "the choice of a checkpoint", [&] {
    if (!is_first_rank()) return;
    create_folder(folder_);
    prune_checkpoints(folder_, saver);  // removes what a killed run has left
    if (asked < 0) return;
    const std::vector<std::int64_t> steps = steps_of_folders(folder_);
    const fs::path path = checkpoint_path(folder_, asked);
    require(!steps.empty(), "checkpoint.load_step is {}, but '{}' holds no checkpoint: leave the key out to start anew",
            asked, folder_.string());
    require(path_exists(path), "there is no checkpoint '{}'; checkpoint.load_step is {}, saved are the steps {}",
            path.string(), asked, fmt::join(steps, ", "));
    passed_over_.insert(std::ranges::upper_bound(steps, asked), steps.end());
    if (asked < steps.back()) {
      spdlog::warn(
          "'{}' is not the newest checkpoint: a start without checkpoint.load_step goes on from step {}, unless those "
          "of later steps are moved away",
          path.string(), steps.back());
    }
  });
  return asked < 0 ? newest_below(std::numeric_limits<std::int64_t>::max()) : asked;
}

std::optional<std::int64_t> CheckpointReader::newest_below(std::int64_t limit) {
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

std::optional<std::string> CheckpointReader::read_manifest(Stored& stored) {
  constexpr std::string_view kName = "a checkpoint's manifest";
  std::string text, found;
  run_together(ranks_.world(), kName, [&] {
    if (is_first_rank()) found = damage_of([&] { text = text_of(read_checkpoint_manifest(stored.path)); });
  });
  std::optional<std::string> damage = first_damage(ranks_.world(), found, kName);
  if (damage) return damage;
  text = broadcast_first_text(ranks_.world(), text, kName);
  parse_text(text, {.rank = ranks_.rank(), .size = ranks_.size()}, stored.manifest, stored.has_optimizer);
  return std::nullopt;
}

std::optional<std::string> CheckpointReader::check_files(const Stored& stored) {
  constexpr std::string_view kName = "the check of a checkpoint";
  const CheckpointManifest& manifest = stored.manifest;
  const auto check_together = [&](auto&& check) {
    std::string found;
    run_long_together(ranks_.world(), kName, [&] { found = damage_of(check); });
    return first_damage(ranks_.world(), found, kName);
  };
  // All files are read before any is mapped: a map of a file that cannot be read would end the process.
  const std::optional<std::string> wrong_sum = check_together([&] { verify_files(stored.path, manifest); });
  const std::optional<std::string> wrong_shard = check_together([&] {
    for (const std::string_view kind : kShardKinds) {
      if (kind == kOptimizerShards && !stored.has_optimizer) continue;
      // The ranks together open every file once. Each maps what it loads later (load_numbers).
      for (std::int64_t shard = ranks_.rank(); shard < manifest.num_shards; shard += ranks_.size()) {
        static_cast<void>(ShardFiles(stored.path, kind, manifest.step, manifest.num_shards, {shard}));
      }
    }
  });
  return wrong_shard ? wrong_shard : wrong_sum;  // the shard's own words say more, such as its step
}

void CheckpointReader::fail_damaged(std::int64_t step, const std::string& damage,
                                    std::optional<std::int64_t> in_memory) {
  if (is_first_rank()) spdlog::warn("step {} is damaged ({}); looking for a checkpoint that is whole", step, damage);
  std::optional<std::int64_t> whole = newest_below(std::numeric_limits<std::int64_t>::max());
  for (; whole; whole = newest_below(*whole)) {
    Stored stored{.path = checkpoint_path(folder_, *whole)};
    if (*whole != step && !read_manifest(stored) && !check_files(stored)) break;
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

void CheckpointReader::tell_what_was_passed_over(std::int64_t step, std::int64_t newest,
                                                 const std::string& passed_over) const {
  if (!is_first_rank() || passed_over.empty()) return;
  warn_in_frame(fmt::format("THE RUN GOES BACK TO STEP {}: THE CHECKPOINT OF STEP {} IS DAMAGED", step, newest),
                fmt::format("Passed over (checkpoint.fallback), and left where they are until their step is saved "
                            "again:{}",
                            passed_over));
}

void CheckpointReader::load_numbers(const Stored& stored) {
  const ShardPieces pieces = shard_pieces(parameters_);
  const CheckpointManifest& manifest = stored.manifest;
  const ProcessGroup& model = parameters_.mesh().model;
  std::size_t kind = 0, next = 0;  // the piece that is loaded next
  std::optional<ShardFiles> files;
  bool is_own = false;  // files are those of this mesh
  // The buffers of a stage are in the file of the first of its ranks (Checkpointer::pieces_to_write).
  const double own_shard = model.rank();
  const auto shard_of_buffers = static_cast<std::int64_t>(
      parameters_.mesh().shard_of_whole.all_gather(std::span(&own_shard, 1), "shards with buffers").front());
  run_steps_together(ranks_.world(), "a checkpoint's numbers", [&] {
    // Optimizer shards are the last kind.
    if (kind == kShardKinds.size() || (kShardKinds[kind] == kOptimizerShards && !stored.has_optimizer)) return false;
    if (!files) {
      // On the mesh that it was saved with, a rank needs no other files than its own and that of the buffers.
      is_own = manifest.num_shards == model.size();
      if (is_own) {
        std::set<std::int64_t> shards{model.rank()};
        if (kShardKinds[kind] == kModelShards && parameters_.num_buffers() > 0) shards.insert(shard_of_buffers);
        files.emplace(stored.path, kShardKinds[kind], manifest.step, manifest.num_shards, shards);
        is_own = files->has(pieces[kind]);
      }
      if (!is_own) files.emplace(stored.path, kShardKinds[kind], manifest.step, manifest.num_shards);
    }
    if (next < pieces[kind].size()) {
      const auto& [name, piece, numbers] = pieces[kind][next++];
      const AssembledTensor saved = is_own ? files->piece_at(name, piece) : files->at(name, piece.slice.global);
      parameters_.fill(numbers, [&, &piece = piece](float* target) { saved.read(piece, target); });
    } else {
      ++kind;
      next = 0;
      files.reset();
    }
    return true;
  });
}

std::optional<ResumedFrom> CheckpointReader::resume(data::Loader& loader, const Saver& saver,
                                                    std::optional<std::int64_t> in_memory) {
  const std::optional<std::int64_t> first = choose_step(saver);
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
          require_optimizer(stored.path, stored.has_optimizer, stored.manifest, config_);
          if (is_first_rank()) resumed.config = saved_config(stored.manifest);
        });
      });
      damage = check_files(stored);
    }
    if (!damage) break;
    if (!falls_back) fail_damaged(resumed.step, *damage, in_memory);
    passed_over += fmt::format("\n  step {}: {}", resumed.step, *damage);
    passed_over_.insert(resumed.step);
    const std::optional<std::int64_t> next = newest_below(resumed.step);
    if (in_memory && (!next || *in_memory > *next)) {
      tell_what_was_passed_over(*in_memory, *first, passed_over);
      return std::nullopt;
    }
    require(next.has_value(), "no checkpoint in '{}' is whole. Move them away to start without them:{}",
            folder_.string(), passed_over);
    resumed.step = *next;
  }
  run_together(ranks_.world(), "the place in the data", [&] {
    require_trainer_state(stored.path,
                          [&] { loader.restore(stored.manifest.state.at("loader").get<data::LoaderState>()); });
  });
  load_numbers(stored);
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
  });
  files->load(parameters, config.model.args, ranks.world());
  if (ranks.rank() == 0) spdlog::info("initial weights from {}", path.string());
  return true;
}

}  // namespace tessera
