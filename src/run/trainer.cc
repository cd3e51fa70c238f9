#include "run/trainer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/log.h"
#include "comm/together.h"
#include "config/resolve_recipes.h"
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

/// Calls `body` and logs what it throws. It is for a run that ends with another error, which is the one to report.
void log_errors_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    spdlog::error("{}", error.what());
  }
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
      data_(config_, *mesh_),
      step_(config_, mesh_, cuda_ == nullptr ? Device::kCpu : Device::kCuda, cuda_),
      checkpointer_(config_, ranks_, *mesh_, step_.model().parameters(), data_.tokenizer()),
      guard_(config_, ranks_, *mesh_, step_.model().parameters()) {
  data_.require_tokenizer_of_assets();
  data_.open_validation();
  guard_.place_copies(state_read_done(StateReader::kMemoryCopy));
  const std::vector<RankMemory> memory = memory_of_ranks();
  if (is_first_rank()) {
    run_folder_.emplace(config_, checkpointer_.folder());
    require(guard_.copies() == nullptr || !run_folder_->run().is_new,
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
  guard_.open(run, data_.loader());
  step_.allocate();
  step_.set_trace(&trace_);
  batches_.allocate(step_, config_.micro_batches_per_step(mesh_->num_data_ranks()));
  ranks_.set_section(Section::kLoading);
  if (config_.checkpoint.enable) resume();
  if (first_step() > 1 || load_initial_weights(config_, ranks_, step_.model().parameters())) step_.refresh_weights();
  if (guard_.copies() != nullptr) guard_.copies()->allocate();  // last: a start that fails before leaves nothing
}

RunIdentity Trainer::share_run_identity() {
  RunIdentity run;
  if (run_folder_) run = run_folder_->run();
  run.id = broadcast_first_text(ranks_.world(), run.id, "the run's identity");
  const double attempt[] = {static_cast<double>(run.attempt), run.is_counted ? 1.0 : 0.0};
  const std::vector<double> all = ranks_.world().all_gather(attempt, "the run's attempt");
  run.attempt = static_cast<std::int64_t>(all[0]);
  run.is_counted = all[1] > 0.0;
  return run;
}

void Trainer::resume() {
  checkpointer_.prepare_snapshot(state_read_done(StateReader::kCheckpoint));
  MemoryCopies* const copies = guard_.copies();
  const auto in_memory = copies != nullptr ? copies->newest_step() : std::nullopt;
  std::optional<ResumedFrom> resumed = checkpointer_.resume(data_.loader(), in_memory);
  if (!resumed && in_memory) resumed = copies->load(data_.loader());
  if (!resumed) return;
  resumed_ = std::move(*resumed);
  keep_initial_weights();
}

void Trainer::keep_initial_weights() {
  auto& given = config_.checkpoint;
  const auto& saved = resumed_.config ? resumed_.config->checkpoint : given;  // rank 0 has it
  if (is_first_rank() && !given.initial_load_path.empty() && given.initial_load_path != saved.initial_load_path) {
    spdlog::warn("checkpoint.initial_load_path = '{}' has no effect: the run has checkpoints of its own",
                 given.initial_load_path);
  }
  constexpr const char* kName = "the weights that the run began with";
  const double in_hf = saved.initial_load_in_hf ? 1.0 : 0.0;
  given.initial_load_in_hf = ranks_.world().all_gather(std::span(&in_hf, 1), kName).front() > 0.0;
  given.initial_load_path = broadcast_first_text(ranks_.world(), saved.initial_load_path, kName);
}

std::vector<Trainer::RankMemory> Trainer::memory_of_ranks() {
  constexpr auto kUses = std::to_array({&MemoryPlan::weights, &MemoryPlan::gradients, &MemoryPlan::optimizer_state,
                                        &MemoryPlan::activations, &MemoryPlan::windows, &MemoryPlan::batches});
  static_assert(sizeof(MemoryPlan) == kUses.size() * sizeof(std::size_t));
  std::array<double, kUses.size() + 3> own{};  // doubles hold sizes up to 2^53 exactly
  std::ranges::transform(kUses, own.begin(), [&](auto use) { return static_cast<double>(step_.memory_plan().*use); });
  own[kUses.size()] = static_cast<double>(checkpointer_.snapshot_bytes());
  own[kUses.size() + 1] = static_cast<double>(guard_.copies() != nullptr ? guard_.copies()->num_bytes() : 0);
  own[kUses.size() + 2] = static_cast<double>(resident_bytes()) / ranks_.num_in_process();
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
    spdlog::info("precisions of the GEMMs{} (bf16: training.mixed_precision_param, {}):\n{}",
                 mesh_->degrees.pp == 1 ? "" : " of rank 0's stages of the pipeline",
                 name_of(parameters.compute_dtype()),
                 describe_precisions(parameters, step_.model().quantized_weights().table()));
  }
  const ModelConfig& model = config_.model.args;
  const ParameterCounts counts = step_.whole_model().count_parameters();
  spdlog::info("model {}: {:.1f}M parameters ({:.1f}M active), {} layers, {} experts, top {}", config_.model.flavor,
               static_cast<double>(counts.total) * 1e-6, static_cast<double>(counts.active) * 1e-6, model.n_layers,
               model.num_experts, model.top_k);
  spdlog::info("data {}: {} sequences of {} tokens per epoch, {} per step", config_.training.dataset_path,
               data_.loader().num_samples(), config_.training.seq_len,
               config_.sequences_per_step(mesh_->num_data_ranks()));
  if (const data::Loader* validation = data_.validation_loader()) {
    const std::int64_t needed = config_.validation.steps * config_.sequences_per_step(mesh_->num_data_ranks());
    if (needed > static_cast<std::int64_t>(validation->num_samples())) {
      spdlog::warn(
          "each validation takes {} sequences (validation.steps = {}), but the validation split has {}: it counts some "
          "more than once",
          needed, config_.validation.steps, validation->num_samples());
    }
  }
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
               format_gib(plan.weights), format_gib(plan.gradients), format_gib(plan.optimizer_state),
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
  data::Loader& loader = *data_.validation_loader();
  loader.seek(0);
  double sum = 0.0;
  const std::int64_t num_batches = config_.validation.steps * config_.micro_batches_per_step(mesh_->num_data_ranks());
  for (std::int64_t i = 0; i < num_batches; ++i) {
    double stops = stop_signal != 0 ? 1.0 : 0.0;
    ranks_.world().all_reduce(std::span(&stops, 1), "whether to stop validating");
    if (stops > 0.0) return std::nullopt;
    sum += step_.evaluate(batches_.load_one(loader));
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
  StepResult result;
  try {
    result = step_.finish();
  } catch (FailedStep& error) {
    error.result.seconds.data = batches_.seconds(error.result.step);
    if (metrics != nullptr) log_errors_of([&] { metrics->step(error.result); });  // the files show how it ended
    finish_after_error();
    if (const auto* not_finite = dynamic_cast<const NonFiniteStep*>(&error)) fail_not_finite(*not_finite);
    throw;
  }
  result.seconds.data = batches_.seconds(result.step);
  if (is_first_rank() && !result.repeated_for.empty()) {
    if (metrics != nullptr) metrics->clear_progress();
    spdlog::warn("step {}: {}; made again from the same batches: {}", result.step, result.repeated_for,
                 result.is_skipped ? "the same. The step is left out (training.skip_loss_spikes)"
                                   : "it is well. A transient fault; the run goes on with the second result");
  }
  if (run_folder_) run_folder_->require_held();
  if (metrics != nullptr) metrics->step(result);
  if (step_callback_) step_callback_(result.step, result);
}

void Trainer::guard_state(std::int64_t step, const StateGuard::Due& due, MetricsWriter* metrics) {
  if (!due.any()) return;
  const TraceScope trace(&trace_, due.copies || due.has_copied ? "copy in memory" : "comparison of replicas");
  StateGuard::Tell tell;
  if (metrics != nullptr) {
    tell = [step, metrics](std::uint64_t checksum) { metrics->state_checksum(step, checksum); };
  }
  try {
    guard_.run(step, due, data_.loader(), tell);
  } catch (const StateMismatch&) {  // all ranks throw it
    finish_after_error();
    throw;
  }
}

void Trainer::finish_after_error() {
  log_errors_of([this] { checkpointer_.finish(); });
  log_errors_of([this] { guard_.finish(); });
}

void Trainer::write_start() {
  const std::int64_t num_data_ranks = mesh_->num_data_ranks();
  if (resumed_.config) tell_config_changes(*resumed_.config, recorded_config(config_, num_data_ranks), first_step());
  write_run_info(dump_folder_, {.run = run_folder_->run(),
                                .config = config_,
                                .num_data_ranks = num_data_ranks,
                                .first_step = first_step(),
                                .saved = resumed_.config,
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
          .first_step = first_step(),
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
          .validates = data_.validation_loader() != nullptr && (step % config_.validation.freq == 0 || is_last),
          .saves = config_.checkpoint.enable && step % config_.checkpoint.interval == 0,
          .is_last = is_last};
}

Trainer::Votes Trainer::agree(const volatile std::sig_atomic_t& stop_signal) {
  double votes[] = {stop_signal != 0 ? 1.0 : 0.0, checkpointer_.ready() ? 1.0 : 0.0, guard_.has_copied() ? 1.0 : 0.0};
  ranks_.world().all_reduce(votes, "whether to stop, and whether files are written and copies taken");
  return {.stops = votes[0] > 0.0, .has_written = votes[1] == ranks_.size(), .has_copied = votes[2] == ranks_.size()};
}

void Trainer::finish_steps(std::size_t left, MetricsWriter* metrics) {
  while (step_.num_started() > left) finish_step(metrics);
}

void Trainer::start_step(std::int64_t step, const StepPlan& plan, MetricsWriter* metrics) {
  const TraceScope trace(&trace_, "step");
  const std::span<const Batch> micro_batches = batches_.load(step, data_.loader(), &trace_);
  step_.start(step, micro_batches, plan.measures);
  // A GPU gets this step before the host reads the results of the step before.
  finish_steps(plan.is_alone() ? 0 : step_.max_started() - 1, metrics);
}

void Trainer::save(std::int64_t step, bool is_last) {
  const TraceScope trace(&trace_, "checkpoint");
  ranks_.set_section(Section::kCheckpoint);
  checkpointer_.save(step, data_.loader().state(), is_last);
}

Trainer::StepOutcome Trainer::end_step(std::int64_t step, const StepPlan& plan,
                                       const volatile std::sig_atomic_t& stop_signal, StepTrace* trace,
                                       MetricsWriter* metrics) {
  const Votes agreed = agree(stop_signal);
  bool is_done = plan.is_last, ends = is_done || agreed.stops;
  const bool copies = guard_.copies_after(step);
  const bool is_alone =
      ends || plan.validates || plan.saves || copies || agreed.has_copied || guard_.verifies_after(step, plan.saves);
  if (is_alone) finish_steps(0, metrics);
  if (metrics != nullptr && (is_alone || agreed.has_written)) metrics->clear_progress();  // what follows may log
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
  guard_state(
      step,
      {.verifies = guard_.verifies_after(step, saves), .copies = copies && !ends, .has_copied = agreed.has_copied},
      metrics);
  if (agreed.has_written) checkpointer_.advance();
  if (saves) save(step, ends);
  if (ends) {
    checkpointer_.finish();
    guard_.finish();
  }
  if (pauses) metrics->resume();
  if (!ends) return StepOutcome::kNextStep;
  return is_done ? StepOutcome::kDone : StepOutcome::kStopped;
}

void Trainer::tell_signal(int own_signal, std::int64_t step) {
  const double own = own_signal;
  const std::vector<double> signals = ranks_.world().all_gather(std::span(&own, 1), "which signal stops the run");
  if (!is_first_rank()) return;
  spdlog::warn("stopped by signal {:.0f} after step {} of {}", std::ranges::max(signals), step, config_.training.steps);
}

int Trainer::run_without_steps(const volatile std::sig_atomic_t& stop_signal) {
  const std::int64_t step = first_step() - 1;
  double lacks = 0.0;
  run_together(ranks_.world(), "the metrics of the last step", [&] {
    if (!is_first_rank() || data_.validation_loader() == nullptr || step != config_.training.steps) return;
    lacks = has_validation_loss(dump_folder_ / kMetricsName, step) ? 0.0 : 1.0;
  });
  lacks = ranks_.world().all_gather(std::span(&lacks, 1), "whether the last validation is missing").front();
  std::optional<double> loss;
  if (lacks > 0.0) {
    ranks_.set_section(Section::kValidation);
    loss = validate(stop_signal);
    if (!loss) tell_signal(stop_signal, step);
    if (is_first_rank() && loss) MetricsWriter(metrics_options()).validation(step, *loss);
  } else {
    spdlog::info("nothing to do: step {} of {} is done", step, config_.training.steps);
  }
  guard_.remove_copies();
  return lacks > 0.0 && !loss ? static_cast<int>(stop_signal) : 0;
}

int Trainer::run(const volatile std::sig_atomic_t& stop_signal, std::atomic<std::int64_t>* current_step) {
  const std::int64_t num_steps = config_.training.steps;
  if (is_first_rank()) write_start();
  if (first_step() > num_steps) return run_without_steps(stop_signal);
  std::optional<MetricsWriter> writer;
  if (is_first_rank()) writer.emplace(metrics_options());
  MetricsWriter* const metrics = writer ? &*writer : nullptr;
  checkpointer_.set_on_saved([metrics](const SavedCheckpoint& saved) {
    if (metrics != nullptr) metrics->checkpoint(saved.step, saved.stall_seconds, saved.seconds);
  });
  std::int64_t step = first_step();
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
  guard_.remove_copies();  // the checkpoint has everything
  if (after == StepOutcome::kStopped) tell_signal(stop_signal, step);
  if (config_.checkpoint.enable) {
    spdlog::info("checkpoint: {}", checkpoint_path(checkpointer_.folder(), step).string());
  }
  spdlog::info("metrics: {}", (dump_folder_ / kMetricsName).string());
  return after == StepOutcome::kDone ? 0 : static_cast<int>(stop_signal);  // ignores a signal after the end
}

}  // namespace tessera
