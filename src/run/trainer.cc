#include "run/trainer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "comm/together.h"
#include "config/resolve_recipes.h"
#include "data/load_tokenizer.h"
#include "ops/runtime/inventory.h"
#include "ops/runtime/kernel_profile.h"
#include "run/memory_advice.h"
#include "run/rank_setup.h"
#include "run/record/run_files.h"
#include "run/record/run_info.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Opens a dataset's split. `key` is the configuration's key that names the dataset's folder.
std::unique_ptr<data::Loader> make_loader(const JobConfig& config, const Mesh& mesh, const char* key,
                                          const std::string& folder, const std::string& split) {
  return data::read_for_key(key, [&] {
    return std::make_unique<data::Loader>(data::LoaderConfig{.dataset = folder,
                                                             .split = split,
                                                             .seq_len = config.training.seq_len,
                                                             .local_batch_size = config.micro_batch_size(),
                                                             .dp_rank = mesh.data_rank(),
                                                             .dp_size = mesh.num_data_ranks(),
                                                             .seed = static_cast<std::uint64_t>(config.debug.seed),
                                                             .vocab_size = config.model.args.vocab_size,
                                                             .shuffle = split == "train"});
  });
}

std::unique_ptr<data::Tokenizer> load_tokenizer_of(const std::string& dataset) {
  return data::read_for_key(kTrainDataKey,
                            [&] { return data::load_dataset_tokenizer(dataset, data::read_manifest(dataset)); });
}

/// Checks the configuration, sets the threads and finds the token that ends a document, before anything else is built.
JobConfig prepared(JobConfig config, Ranks& ranks) {
  JobConfig common = config;
  common.job.node_folder = {};  // each node may have another one
  ranks.require_same(config_table(common).to_toml(), "configuration");
  config.validate();
  set_threads(config, ranks);
  config.require_data();
  set_document_end(config);
  return config;
}

/// Throws Error if model.hf_assets_path has another tokenizer than the data.
void require_tokenizer_of_assets(const JobConfig& config, const data::Tokenizer& of_data) {
  const fs::path assets = config.model.hf_assets_path;
  std::error_code unreadable;
  const bool has_one = !assets.empty() && (fs::exists(assets / data::kTokenizerJsonName, unreadable) ||
                                           fs::exists(assets / data::kTokenizerModelName, unreadable));
  if (!has_one) return;
  require(data::load_tokenizer(assets.string())->checksum() == of_data.checksum(),
          "model.hf_assets_path '{}' has another tokenizer than training.dataset_path '{}' was prepared with: prepare "
          "the data with `tessera data prepare --tokenizer {}`, or leave model.hf_assets_path out",
          assets.string(), config.training.dataset_path, assets.string());
}

}  // namespace

/// Traces one step: the host's scopes, and a GPU's kernels.
class Trainer::StepTrace {
 public:
  StepTrace(TraceRecorder& recorder, bool on_gpu) : recorder_(recorder) {
    recorder_.start();
    if (on_gpu) kernels_.emplace();
  }
  void write(const fs::path& path) {
    recorder_.stop();
    if (kernels_) add_to_trace(kernels_->finish(), recorder_);
    create_folder(path.parent_path());
    recorder_.write(path);
  }

 private:
  TraceRecorder& recorder_;
  std::optional<cuda::KernelProfile> kernels_;
};

Trainer::Trainer(JobConfig config, Ranks* ranks)
    : ranks_(ranks == nullptr ? one_rank_ : *ranks),
      config_(prepared(std::move(config), ranks_)),
      cuda_(join_gpus(config_, ranks_)),
      mesh_(make_mesh(config_, ranks_)),
      dump_folder_(config_.job.dump_folder),
      tokenizer_(load_tokenizer_of(config_.training.dataset_path)),
      loader_(make_loader(config_, *mesh_, kTrainDataKey, config_.training.dataset_path, "train")),
      step_(config_, mesh_, cuda_ == nullptr ? Device::kCpu : Device::kCuda, cuda_),
      checkpointer_(config_, ranks_, *mesh_, step_.model().parameters(), *tokenizer_),
      state_(step_.model().parameters()) {
  require_tokenizer_of_assets(config_, *tokenizer_);
  if (config_.validation.enable) {
    const bool is_other = !config_.validation.dataset_path.empty();
    const std::string& folder = is_other ? config_.validation.dataset_path : config_.training.dataset_path;
    validation_loader_ = make_loader(config_, *mesh_, is_other ? kValidationDataKey : kTrainDataKey, folder, "val");
    require(validation_loader_->manifest().tokenizer_checksum == loader_->manifest().tokenizer_checksum,
            "'{}' (validation.dataset_path) was prepared with another tokenizer than '{}'", folder,
            config_.training.dataset_path);
  }
  if (config_.checkpoint.memory_interval > 0) {
    memory_copies_.emplace(config_, ranks_, *mesh_, state_,
                           step_.device() == Device::kCuda ? &step_.state_is_read() : nullptr);
  }
  const std::vector<RankMemory> memory = memory_of_ranks();
  if (is_first_rank()) {
    run_folder_.emplace(config_, checkpointer_.folder());
    require(!memory_copies_ || !run_folder_->run().is_new,
            "checkpoint.memory_interval is {}, but job.run_id is empty; expected a name by which the next start finds "
            "this run's copies in memory",
            config_.checkpoint.memory_interval);
    checkpointer_.set_before_commit([this] { run_folder_->require_held(); });
    print_plan(memory);
    step_.warn_of_slow_operators();
    require_memory(memory);
  }
  ranks_.world().barrier("whether the run fits the memory");
  if (config_.checkpoint.enable) checkpointer_.require_writable();
  const RunIdentity run = share_run_identity();
  checkpointer_.set_saver({.run = run.id, .attempt = run.attempt});
  if (memory_copies_ || config_.checkpoint.verify_interval > 0) {
    replica_check_.emplace(ranks_, *mesh_, state_, dump_folder_, run.attempt);
    if (memory_copies_) memory_copies_->open(run, loader_->state());
    if (config_.checkpoint.verify_interval > 0 && !replica_check_->sees_weights() && is_first_rank()) {
      spdlog::warn(
          "checkpoint.verify_interval: no weights of this mesh are held by two ranks "
          "(parallelism.data_parallel_replicate_degree = 1), so flipped bits are not seen{}",
          ranks_.size() > 1 ? ", but in the experts' biases" : "");
    }
  }
  step_.allocate();
  step_.set_trace(&trace_);
  micro_batches_.resize(step_.max_started());
  data_seconds_.resize(micro_batches_.size());
  for (std::vector<Batch>& batches : micro_batches_) {
    for (std::int64_t i = 0; i < config_.micro_batches_per_step(mesh_->num_data_ranks()); ++i)
      batches.push_back(step_.make_batch());
  }
  tokens_.resize(static_cast<std::size_t>(config_.micro_batch_size() * (config_.training.seq_len + 1)));
  ranks_.set_section(Section::kLoading);
  if (config_.checkpoint.enable) resume();
  if (first_step_ > 1 || load_initial_weights(config_, ranks_, step_.model().parameters())) step_.refresh_weights();
}

RunIdentity Trainer::share_run_identity() {
  RunIdentity run;
  if (run_folder_) run = run_folder_->run();
  run.id = broadcast_first_text(ranks_.world(), run.id, "the run's identity");
  const auto attempt = static_cast<double>(run.attempt);
  run.attempt =
      static_cast<std::int64_t>(ranks_.world().all_gather(std::span(&attempt, 1), "the run's attempt").front());
  return run;
}

void Trainer::resume() {
  checkpointer_.allocate_snapshot();
  const auto in_memory = memory_copies_ ? memory_copies_->newest_step() : std::nullopt;
  std::optional<ResumedFrom> resumed = checkpointer_.resume(*loader_, in_memory);
  if (!resumed && in_memory) resumed = memory_copies_->load(*loader_);
  if (memory_copies_) memory_copies_->allocate();
  if (!resumed) return;
  first_step_ = 1 + resumed->step;
  resumed_config_ = std::move(resumed->config);
}

std::vector<Trainer::RankMemory> Trainer::memory_of_ranks() {
  constexpr auto kUses = std::to_array({&MemoryPlan::weights, &MemoryPlan::gradients, &MemoryPlan::moments,
                                        &MemoryPlan::activations, &MemoryPlan::windows, &MemoryPlan::batches});
  static_assert(sizeof(MemoryPlan) == kUses.size() * sizeof(std::size_t));
  std::array<double, kUses.size() + 3> own{};  // doubles hold sizes up to 2^53 exactly
  std::ranges::transform(kUses, own.begin(), [&](auto use) { return static_cast<double>(step_.memory_plan().*use); });
  own[kUses.size()] = static_cast<double>(checkpointer_.snapshot_bytes());
  own[kUses.size() + 1] = static_cast<double>(memory_copies_ ? memory_copies_->num_bytes() : 0);
  own[kUses.size() + 2] = static_cast<double>(resident_bytes());
  const std::vector<double> all = ranks_.world().all_gather(own, "the ranks' memory");
  std::vector<RankMemory> ranks;
  for (auto next = all.begin(); next != all.end();) {
    RankMemory& rank = ranks.emplace_back();
    for (const auto use : kUses) rank.plan.*use = static_cast<std::size_t>(*next++);
    rank.snapshot = static_cast<std::size_t>(*next++);
    rank.copies = static_cast<std::size_t>(*next++);
    rank.process = static_cast<std::size_t>(*next++);
  }
  return ranks;
}

void Trainer::print_plan(const std::vector<RankMemory>& ranks) const {
  if (config_.job.print_config) {
    JobConfig printed = config_;
    spdlog::info("configuration:\n{}", config_table(printed).to_toml());
  }
  if (config_.model.print_after_conversion) {
    const Parameters& parameters = step_.model().parameters();
    spdlog::info("precisions of the GEMMs (bf16: training.mixed_precision_param, {}):\n{}",
                 name_of(parameters.compute_dtype()),
                 describe_precisions(parameters, step_.model().quantized_weights().table()));
  }
  const ModelConfig& model = config_.model.args;
  const ParameterCounts counts = step_.whole_model().count_parameters();
  spdlog::info("model {}: {:.1f}M parameters ({:.1f}M active), {} layers, {} experts, top {}", config_.model.flavor,
               static_cast<double>(counts.total) * 1e-6, static_cast<double>(counts.active) * 1e-6, model.n_layers,
               model.num_experts, model.top_k);
  spdlog::info("data {}: {} sequences of {} tokens per epoch, {} per step", config_.training.dataset_path,
               loader_->num_samples(), config_.training.seq_len, config_.sequences_per_step(mesh_->num_data_ranks()));
  // The memory of processes differs a little from rank to rank, so it does not decide which rank is named.
  const auto largest =
      std::ranges::max_element(ranks, {}, [](const RankMemory& rank) { return rank.total() - rank.process; });
  const MemoryPlan& plan = largest->plan;
  const std::size_t total = largest->total();
  if (ranks_.size() > 1) {
    const auto rank = largest - ranks.begin();
    const std::string which = mesh_->degrees.pp == 1
                                  ? "memory per rank"
                                  : fmt::format("memory of rank {} (rank {} of the pipeline), which takes most", rank,
                                                place_of(mesh_->degrees, rank).pp);
    spdlog::info("mesh: {} ranks = {}; {}:", ranks_.size(), describe(mesh_->degrees), which);
  }
  const auto if_any = [&](const char* use, std::size_t bytes) {
    return bytes < total / 200 ? "" : fmt::format("  {} {}", use, format_gib(bytes));
  };
  spdlog::info("memory: weights {}  gradients {}  moments {}  activations {}{}{}{}{}  program {}  peak {}",
               format_gib(plan.weights), format_gib(plan.gradients), format_gib(plan.moments),
               format_gib(plan.activations), if_any("windows", plan.windows), if_any("batches", plan.batches),
               if_any("checkpoint's copy", largest->snapshot), if_any("copies in memory", largest->copies),
               format_gib(largest->process), format_gib(total));
}

void Trainer::require_memory(const std::vector<RankMemory>& ranks) const {
  const bool on_gpu = step_.device() == Device::kCuda;
  // The memory of a step is on the GPU, if there is one. The rest, and a copy of the batches, is on the host.
  const auto besides_step = [](const RankMemory& rank) { return rank.process + rank.snapshot + rank.copies; };
  // Returns the most that the ranks of a node or a GPU take together. Ranks fill nodes and GPUs in order.
  const auto most = [&](std::int64_t sharing, const auto& of_rank) {
    std::size_t found = 0;
    for (std::size_t begin = 0; begin < ranks.size(); begin += static_cast<std::size_t>(sharing)) {
      std::size_t sum = 0;
      for (std::size_t i = begin; i < std::min(begin + static_cast<std::size_t>(sharing), ranks.size()); ++i) {
        sum += of_rank(ranks[i]);
      }
      found = std::max(found, sum);
    }
    return found;
  };
  const RankMemory& own = ranks.front();
  const std::int64_t on_node = ranks_.num_on_node();
  const std::size_t host = machine_memory_bytes();
  if (on_gpu) {
    const std::size_t needed =
        most(on_node, [&](const RankMemory& rank) { return besides_step(rank) + rank.plan.batches; });
    require(
        needed <= host,
        "besides the GPUs the run needs {} of memory on this machine, where it may take {}: for {} ranks {} of "
        "program and {} of batches each, {} for the checkpoint's copy of each that writes (checkpoint.enable), and {} "
        "for copies in memory (checkpoint.memory_interval)",
        format_gib(needed), format_gib(host), on_node, format_gib(own.process), format_gib(own.plan.batches),
        format_gib(own.snapshot), format_gib(own.copies));
  }
  const std::optional<WindowRoom> room = on_gpu ? std::nullopt : ranks_.world().window_room();
  if (room) {
    const std::size_t windows = most(on_node, [](const RankMemory& rank) { return rank.plan.windows; });
    require(windows <= room->available,
            "parallelism.expert_parallel_comm_backend = \"direct\" needs {} of shared memory for the windows of {} "
            "ranks on this machine, but '{}' has {}, of which {} are free. Enlarge it (mount -o remount,size={}G {}; "
            "docker run --shm-size={}g), give --parallelism.expert_parallel_capacity_factor for smaller windows, or "
            "--parallelism.expert_parallel_comm_backend=standard, which needs none",
            format_gib(windows), on_node, room->folder, format_gib(room->size), format_gib(room->available),
            1 + (windows >> 30), room->folder, 1 + (windows >> 30));
  }
  const std::int64_t sharing = on_gpu ? 1 : on_node;
  const std::size_t available = on_gpu ? cuda::free_memory_bytes() : host;
  const std::size_t needed =
      most(sharing, [&](const RankMemory& rank) { return rank.plan.total() + (on_gpu ? 0 : besides_step(rank)); });
  if (needed <= available) return;
  const std::size_t of_rank = available / static_cast<std::size_t>(sharing);
  fail("the run needs {} of memory on this {} {}{}:\n{}", format_gib(needed),
       on_gpu ? "GPU, of which are free" : "machine, where it may take", format_gib(available),
       sharing == 1 ? "" : fmt::format(", {} for each of its {} ranks", format_gib(of_rank), sharing),
       memory_advice({config_, step_.device(), mesh_->degrees}, on_gpu ? 0 : besides_step(own), of_rank));
}

bool Trainer::measures_sqnr(std::int64_t step) const {
  const std::int64_t freq = config_.metrics.quantization_error_freq;
  const bool due = step == 1 || step % std::max<std::int64_t>(freq, 1) == 0 || step == config_.training.steps;
  // The configuration decides, not this rank's pipeline stage, because all ranks sum what they have measured.
  return freq > 0 && due && !config_.model.converters.empty();
}

std::optional<double> Trainer::validate(const volatile std::sig_atomic_t& stop_signal) {
  validation_loader_->seek(0);
  Batch& batch = micro_batches_.front().front();
  double sum = 0.0;
  const std::int64_t num_batches = config_.validation.steps * config_.micro_batches_per_step(mesh_->num_data_ranks());
  for (std::int64_t i = 0; i < num_batches; ++i) {
    double stops = stop_signal != 0 ? 1.0 : 0.0;
    ranks_.world().all_reduce(std::span(&stops, 1), "whether to stop validating");
    if (stops > 0.0) return std::nullopt;
    validation_loader_->next(tokens_);
    batch.fill(tokens_);
    sum += step_.evaluate(batch);
  }
  return sum / static_cast<double>(num_batches);
}

void Trainer::fail_not_finite(const NonFiniteStep& error) {
  const double own = error.begins_here ? 1.0 : 0.0;
  const std::vector<double> all = ranks_.world().all_gather(std::span(&own, 1), "where a step is not finite");
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] > 0.0) ranks.push_back(rank);
  }
  if (ranks.empty() || ranks.size() == all.size()) throw NonFiniteStep(error);
  // A launcher looks for the rank that ends with kNonFinite, and replaces the node of that rank.
  throw NonFiniteStep(
      fmt::format("{} It began on rank{} {}.", error.what(), ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", ")),
      error.result, error.begins_here, error.begins_here ? ExitStatus::kNonFinite : ExitStatus::kRankFailed);
}

void Trainer::finish_step(MetricsWriter* metrics) {
  const auto data_seconds = [&](const StepResult& result) {
    return data_seconds_[static_cast<std::size_t>(result.step) % data_seconds_.size()];
  };
  StepResult result;
  try {
    result = step_.finish();
  } catch (NonFiniteStep& error) {
    error.result.seconds.data = data_seconds(error.result);
    if (metrics != nullptr) metrics->step(error.result);  // so that the run's files show how it ended
    checkpointer_.finish();
    if (memory_copies_) memory_copies_->finish();
    fail_not_finite(error);
  }
  result.seconds.data = data_seconds(result);
  if (is_first_rank() && !result.repeated_for.empty()) {
    spdlog::warn("step {}: {}; made again from the same batches: {}", result.step, result.repeated_for,
                 result.is_skipped ? "the same. The step is left out (training.skip_loss_spikes)"
                                   : "it is well. A transient fault; the run goes on with the second result");
  }
  if (run_folder_) run_folder_->require_held();
  if (metrics != nullptr) metrics->step(result);
  if (step_callback_) step_callback_(result.step, result);
}

bool Trainer::verifies(std::int64_t step, bool saves) const {
  const std::int64_t interval = config_.checkpoint.verify_interval;
  return replica_check_ && ((interval > 0 && step % interval == 0) || saves || replica_check_->explains(step));
}

void Trainer::guard_state(std::int64_t step, bool verifies, bool copies, bool has_copied, MetricsWriter* metrics) {
  if (!verifies && !copies && !has_copied) return;
  const TraceScope trace(&trace_, copies || has_copied ? "copy in memory" : "comparison of replicas");
  // A copy may be compared in a later step, after this function has returned.
  const auto compare = [this, step, verifies, metrics](const TrainingState::Checksums& checksums) {
    const std::uint64_t of_model = replica_check_->compare(step, checksums);
    if (metrics != nullptr && verifies) metrics->state_checksum(step, of_model);
  };
  try {
    if (has_copied) memory_copies_->advance();
    const bool is_compared = copies && memory_copies_->take(step, loader_->state(), compare, verifies);
    if (verifies && !is_compared) compare(state_.read());
  } catch (const StateMismatch&) {  // all ranks throw it
    checkpointer_.finish();
    if (memory_copies_) memory_copies_->finish();
    throw;
  }
}

void Trainer::write_start() {
  JobConfig now = config_;
  now.training.global_batch_size = now.sequences_per_step(mesh_->num_data_ranks());
  if (resumed_config_) tell_config_changes(*resumed_config_, now, first_step_);
  write_run_info(dump_folder_, {.run = run_folder_->run(),
                                .config = now,
                                .num_data_ranks = mesh_->num_data_ranks(),
                                .first_step = first_step_,
                                .saved = resumed_config_,
                                .gpus = on_gpu() ? cuda::gpu_names() : std::vector<std::string>()});
  if (config_.profiling.enable_profiling) create_folder(trace_folder());
}

MetricsOptions Trainer::metrics_options() const {
  const Model& whole = step_.whole_model();
  std::vector<std::string> moe_layers;
  for (std::size_t i = 0; i < whole.num_moe_layers(); ++i) moe_layers.push_back(whole.moe_layer(i).name());
  const auto& metrics = config_.metrics;
  return {.path = dump_folder_ / kMetricsName,
          .tensorboard_folder = metrics.enable_tensorboard ? dump_folder_ / metrics.save_tb_folder : "",
          .first_step = first_step_,
          .num_steps = config_.training.steps,
          .log_freq = metrics.log_freq,
          .flop_per_token = flop_per_token(config_.model.args, whole.count_parameters(), config_.training.seq_len),
          .peak_flops = peak_tflops(config_, step_.device()) * 1e12,
          .device = step_.device(),
          .memory_bytes = on_gpu() ? cuda::total_memory_bytes() : machine_memory_bytes(),
          .moe_layers = moe_layers,
          .num_ranks = ranks_.size(),
          .prometheus_address = metrics.prometheus_port == 0
                                    ? ""
                                    : fmt::format("{}:{}", metrics.prometheus_address, metrics.prometheus_port),
          .run_id = run_folder_->run().id};
}

Trainer::StepPlan Trainer::plan_of(std::int64_t step) const {
  const bool is_last = step == config_.training.steps;
  return {.profiles = config_.profiling.enable_profiling && step % config_.profiling.profile_freq == 0,
          .measures = measures_sqnr(step),
          .validates = validation_loader_ && (step % config_.validation.freq == 0 || is_last),
          .saves = config_.checkpoint.enable && step % config_.checkpoint.interval == 0,
          .is_last = is_last};
}

Trainer::Votes Trainer::agree(const volatile std::sig_atomic_t& stop_signal) {
  double votes[] = {stop_signal != 0 ? 1.0 : 0.0, checkpointer_.ready() ? 1.0 : 0.0,
                    memory_copies_ && memory_copies_->ready() ? 1.0 : 0.0};
  ranks_.world().all_reduce(votes, "whether to stop, and whether files are written and copies taken");
  return {.stops = votes[0] > 0.0, .has_written = votes[1] == ranks_.size(), .has_copied = votes[2] == ranks_.size()};
}

void Trainer::finish_steps(std::size_t left, MetricsWriter* metrics) {
  while (step_.num_started() > left) finish_step(metrics);
}

void Trainer::start_step(std::int64_t step, const StepPlan& plan, MetricsWriter* metrics) {
  const TraceScope trace(&trace_, "step");
  const std::size_t slot = static_cast<std::size_t>(step) % micro_batches_.size();
  const Stopwatch data_watch;
  {
    const TraceScope data_trace(&trace_, "data");
    for (Batch& batch : micro_batches_[slot]) {
      loader_->next(tokens_);
      batch.fill(tokens_);
    }
  }
  data_seconds_[slot] = data_watch.seconds();
  step_.start(step, micro_batches_[slot], plan.measures);
  // A GPU gets this step before the host reads the results of the step before.
  finish_steps(plan.is_alone() ? 0 : step_.max_started() - 1, metrics);
}

void Trainer::save(std::int64_t step, bool is_last) {
  const TraceScope trace(&trace_, "checkpoint");
  ranks_.set_section(Section::kCheckpoint);
  checkpointer_.save(step, loader_->state(), is_last);
}

Trainer::StepOutcome Trainer::end_step(std::int64_t step, const StepPlan& plan,
                                       const volatile std::sig_atomic_t& stop_signal, StepTrace* trace,
                                       MetricsWriter* metrics) {
  const Votes agreed = agree(stop_signal);
  bool is_done = plan.is_last, ends = is_done || agreed.stops;
  const bool copies = memory_copies_ && memory_copies_->is_due(step);
  if (ends || plan.validates || plan.saves || copies || agreed.has_copied || verifies(step, plan.saves)) {
    finish_steps(0, metrics);
  }
  const bool pauses = metrics != nullptr && step_.num_started() == 0;
  if (pauses) metrics->pause();
  if (trace != nullptr) trace->write(trace_folder() / fmt::format("step-{}.json", step));
  if (plan.validates) {
    ranks_.set_section(Section::kValidation);
    const std::optional<double> loss = validate(stop_signal);
    if (metrics != nullptr && loss) metrics->validation(step, *loss);
    if (!loss) {
      ends = true;
      is_done = false;
    }
  }
  const bool saves = plan.saves || (config_.checkpoint.enable && ends);
  guard_state(step, verifies(step, saves), copies && !ends, agreed.has_copied, metrics);
  if (agreed.has_written) checkpointer_.advance();
  if (saves) save(step, ends);
  if (ends) {
    checkpointer_.finish();
    if (memory_copies_) memory_copies_->finish();
  }
  if (pauses) metrics->resume();
  if (!ends) return StepOutcome::kNextStep;
  return is_done ? StepOutcome::kDone : StepOutcome::kStopped;
}

int Trainer::run(const volatile std::sig_atomic_t& stop_signal, std::atomic<std::int64_t>* current_step) {
  const std::int64_t num_steps = config_.training.steps;
  if (is_first_rank()) write_start();
  if (first_step_ > num_steps) {
    spdlog::info("nothing to do: step {} of {} is done", first_step_ - 1, num_steps);
    if (memory_copies_) memory_copies_->remove();
    return 0;
  }
  std::optional<MetricsWriter> writer;
  if (is_first_rank()) writer.emplace(metrics_options());
  MetricsWriter* const metrics = writer ? &*writer : nullptr;
  checkpointer_.set_on_saved([metrics](const SavedCheckpoint& saved) {
    if (metrics != nullptr) metrics->checkpoint(saved.step, saved.stall_seconds, saved.seconds);
  });
  std::int64_t step = first_step_;
  StepOutcome after = StepOutcome::kNextStep;
  for (;; ++step) {
    ranks_.set_step(step);
    if (current_step != nullptr) *current_step = step;
    const StepPlan plan = plan_of(step);
    if (plan.is_alone()) finish_steps(0, metrics);
    std::optional<StepTrace> trace;
    if (plan.profiles && is_first_rank()) trace.emplace(trace_, on_gpu());
    start_step(step, plan, metrics);
    after = end_step(step, plan, stop_signal, trace ? &*trace : nullptr, metrics);
    if (after != StepOutcome::kNextStep) break;
  }
  if (memory_copies_) memory_copies_->remove();  // the checkpoint has everything
  const int stopped_by =
      after == StepOutcome::kDone ? 0 : static_cast<int>(stop_signal);  // ignores a signal after the end
  if (stopped_by != 0) spdlog::warn("stopped by signal {} after step {} of {}", stopped_by, step, num_steps);
  if (config_.checkpoint.enable) {
    spdlog::info("checkpoint: {}", checkpoint_path(checkpointer_.folder(), step).string());
  }
  spdlog::info("metrics: {}", (dump_folder_ / kMetricsName).string());
  return stopped_by;
}

}  // namespace tessera
