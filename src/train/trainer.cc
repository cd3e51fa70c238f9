#include "train/trainer.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "tensor/parallel.h"
#include "train/run_files.h"
#include "train/run_info.h"
#include "train/saved_model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::size_t machine_memory_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
}

data::LoaderConfig loader_config(const JobConfig& config, const std::string& folder, const std::string& split) {
  return {.dataset = folder,
          .split = split,
          .seq_len = config.training.seq_len,
          .local_batch_size = config.training.local_batch_size,
          .seed = static_cast<std::uint64_t>(config.debug.seed),
          .vocab_size = config.model.args.vocab_size,
          .shuffle = split == "train"};
}

/// The keys that make the model and the numbers that it computes, with their values.
nlohmann::json model_identity(JobConfig config) {
  nlohmann::json identity;
  for (const auto& entry : config_table(config).describe()) {
    if (entry.key.starts_with("model.args.") || entry.key == "training.mixed_precision_param") {
      identity[entry.key] = entry.value;
    }
  }
  return identity;
}

/// Keys of the model that say how it is trained, not what it is. original_seq_len is one, because it is not known of
/// files without YaRN.
bool is_of_training(std::string_view key) {
  for (const char* name : {"load_balance_coeff", "seq_balance_loss_coeff", "attn_mask_type", "eos_id",
                           "original_seq_len", "rope_factor", "beta_fast", "beta_slow", "mscale", "mtp_loss_weight"}) {
    if (key.substr(key.rfind('.') + 1) == name) return true;
  }
  return false;
}

/// Checks the config, sets the threads and finds out which token ends a document, before anything is built on it.
JobConfig prepared(JobConfig config) {
  config.validate();
  if (config.training.num_threads > 0) set_num_threads(static_cast<int>(config.training.num_threads));
  set_document_end(config);
  return config;
}

}  // namespace

Trainer::Trainer(JobConfig config)
    : config_(prepared(std::move(config))),
      dump_folder_(config_.job.dump_folder),
      checkpoint_folder_(dump_folder_ / config_.checkpoint.folder),
      tokenizer_(data::load_dataset_tokenizer(config_.training.dataset_path,
                                              data::read_manifest(config_.training.dataset_path))),
      loader_(std::make_unique<data::Loader>(loader_config(config_, config_.training.dataset_path, "train"))),
      step_(config_) {
  if (config_.validation.enable) {
    const std::string& folder =
        config_.validation.dataset_path.empty() ? config_.training.dataset_path : config_.validation.dataset_path;
    validation_loader_ = std::make_unique<data::Loader>(loader_config(config_, folder, "val"));
  }
  create_folder(dump_folder_);
  lock_.emplace(dump_folder_ / kRunLockName, fmt::format("the folder '{}' (job.dump_folder)", dump_folder_.string()));
  print_plan();
  step_.allocate();
  step_.set_trace(&trace_);
  for (std::int64_t i = 0; i < config_.micro_batches_per_step(); ++i) micro_batches_.push_back(step_.make_batch());
  tokens_.resize(static_cast<std::size_t>(config_.training.local_batch_size * (config_.training.seq_len + 1)));
  if (config_.checkpoint.enable) {
    create_folder(checkpoint_folder_);
    resume();
  }
  if (first_step_ == 1) load_initial_weights();
}

void Trainer::print_plan() const {
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
  const ParameterCounts counts = step_.model().count_parameters();
  const MemoryPlan& plan = step_.memory_plan();
  spdlog::info("model {}: {:.1f}M parameters ({:.1f}M active), {} layers, {} experts, top {}", config_.model.flavor,
               static_cast<double>(counts.total) * 1e-6, static_cast<double>(counts.active) * 1e-6, model.n_layers,
               model.num_experts, model.top_k);
  spdlog::info("data {}: {} sequences of {} tokens per epoch, {} per step", config_.training.dataset_path,
               loader_->num_samples(), config_.training.seq_len, config_.sequences_per_step());
  const std::size_t process = resident_bytes(), total = process + plan.total();
  spdlog::info("memory: weights {}  gradients {}  moments {}  activations {}  program {}  peak {}",
               format_gib(plan.weights), format_gib(plan.gradients), format_gib(plan.moments),
               format_gib(plan.activations), format_gib(process), format_gib(total));
  const std::size_t available = machine_memory_bytes();
  require(total <= available,
          "the run needs {} of memory, the machine has {}; try a smaller training.local_batch_size or seq_len, or "
          "activation_checkpoint.mode = \"full\"",
          format_gib(total), format_gib(available));
}

std::vector<CheckpointFile> Trainer::checkpoint_files() {
  CheckpointFile model{.name = kModelFileName, .tensors = {}}, optimizer{.name = kOptimizerFileName, .tensors = {}};
  Parameters& parameters = step_.model().parameters();
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const std::string& name = parameters.spec(id).name;
    model.tensors.push_back({name, parameters.master(id)});
    optimizer.tensors.push_back({name + ".exp_avg", parameters.first_moment(id)});
    optimizer.tensors.push_back({name + ".exp_avg_sq", parameters.second_moment(id)});
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    model.tensors.push_back({parameters.buffer_spec(id).name, parameters.buffer(id)});
  }
  return {model, optimizer};
}

void Trainer::save(std::int64_t step) {
  const TraceScope trace(&trace_, "checkpoint");
  nlohmann::json state = {{"step", step},
                          {"seed", config_.debug.seed},
                          {"loader", loader_->state()},
                          {"model", model_identity(config_)},
                          {"tokenizer", tokenizer_state(*tokenizer_)},
                          {"config", config_table(config_).to_toml()}};
  std::vector<CheckpointPart> parts;
  for (CheckpointFile& file : checkpoint_files()) parts.push_back(tensors_part(std::move(file)));
  for (CheckpointPart& part : tokenizer_parts(*tokenizer_)) parts.push_back(std::move(part));
  save_checkpoint(checkpoint_folder_, step, parts, state);
  prune_checkpoints(checkpoint_folder_, config_.checkpoint.keep_latest_k, step);
  spdlog::info("saved {}", checkpoint_path(checkpoint_folder_, step).string());
}

void Trainer::resume() {
  const std::vector<std::int64_t> steps = checkpoint_steps(checkpoint_folder_);
  std::int64_t step = config_.checkpoint.load_step;
  if (step < 0) {
    if (steps.empty()) return;
    step = steps.back();
  }
  const fs::path path = checkpoint_path(checkpoint_folder_, step);
  require(fs::exists(path), "there is no checkpoint '{}'; checkpoint.load_step is {}, saved are the steps {}",
          path.string(), step, fmt::join(steps, ", "));
  const nlohmann::json state = verify_checkpoint(path);
  try {
    const nlohmann::json identity = model_identity(config_);
    for (const auto& [key, value] : identity.items()) {
      const std::string saved = state.at("model").value(key, "(absent)");
      require(saved == value, "'{}' was trained with {} = {}, this run has {}", path.string(), key, saved,
              value.get<std::string>());
    }
    const auto seed = state.at("seed").get<std::int64_t>();
    require(seed == config_.debug.seed, "'{}' was trained with debug.seed = {}, this run has {}", path.string(), seed,
            config_.debug.seed);
    require(state.at("step") == step, "'{}' says that it is of step {}", path.string(), state.at("step").dump());
    loader_->restore(state.at("loader").get<data::LoaderState>());
  } catch (const nlohmann::json::exception& error) {
    fail("the manifest of '{}' does not hold a trainer's state: {}", path.string(), error.what());
  }
  load_checkpoint(path, checkpoint_files());
  step_.refresh_weights();
  first_step_ = step + 1;
  spdlog::info("resumed from {}", path.string());
}

void Trainer::load_initial_weights() {
  const fs::path path = config_.checkpoint.initial_load_path;
  if (path.empty()) return;
  const SavedModel saved(path);
  require(saved.is_hf() == config_.checkpoint.initial_load_in_hf,
          "checkpoint.initial_load_path '{}' is {}, but checkpoint.initial_load_in_hf is {}", path.string(),
          saved.is_hf() ? "a folder of Hugging Face files" : "a checkpoint of Tessera",
          config_.checkpoint.initial_load_in_hf);
  // Weights fit other numbers as well, as long as no shape differs; then they are not this model's.
  JobConfig given = config_, other = config_;
  other.model.args = saved.config().model;
  const auto values = config_table(given).describe(), saved_values = config_table(other).describe();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i].key.starts_with("model.args.") || is_of_training(values[i].key)) continue;
    require(values[i].value == saved_values[i].value, "'{}' has {} = {}, this run has {}", path.string(), values[i].key,
            saved_values[i].value, values[i].value);
  }
  saved.load(step_.model().parameters());
  step_.refresh_weights();
  spdlog::info("initial weights from {}", path.string());
}

bool Trainer::measures_sqnr(std::int64_t step) const {
  const std::int64_t freq = config_.metrics.quantization_error_freq;
  const bool due = step == 1 || step % std::max<std::int64_t>(freq, 1) == 0 || step == config_.training.steps;
  return freq > 0 && due && !step_.model().quantized_weights().table().empty();
}

double Trainer::validate() {
  validation_loader_->seek(0);
  Batch& batch = micro_batches_.front();
  double sum = 0.0;
  for (std::int64_t i = 0; i < config_.validation.steps; ++i) {
    validation_loader_->next(tokens_);
    batch.fill(tokens_);
    sum += step_.evaluate(batch);
  }
  return sum / static_cast<double>(config_.validation.steps);
}

int Trainer::run(const volatile std::sig_atomic_t& stop_signal) {
  const std::int64_t num_steps = config_.training.steps;
  const fs::path metrics_path = dump_folder_ / kMetricsName,
                 trace_folder = dump_folder_ / config_.profiling.save_traces_folder;
  write_run_info(dump_folder_, config_, first_step_);
  if (first_step_ > num_steps) {
    spdlog::info("nothing to do: step {} of {} is done", first_step_ - 1, num_steps);
    return 0;
  }
  const double flop = flop_per_token(config_.model.args, step_.model().count_parameters(), config_.training.seq_len);
  std::vector<std::string> moe_layers;
  for (std::size_t i = 0; i < step_.model().num_moe_layers(); ++i) {
    moe_layers.push_back(step_.model().moe_layer(i).name());
  }
  MetricsWriter metrics(
      {.path = metrics_path,
       .tensorboard_folder = config_.metrics.enable_tensorboard ? dump_folder_ / config_.metrics.save_tb_folder : "",
       .first_step = first_step_,
       .num_steps = num_steps,
       .log_freq = config_.metrics.log_freq,
       .flop_per_token = flop,
       .peak_flops = config_.metrics.peak_tflops * 1e12,
       .memory_bytes = machine_memory_bytes(),
       .moe_layers = moe_layers});
  std::int64_t saved_step = 0;
  std::int64_t step = first_step_;
  for (;; ++step) {
    const bool traced = config_.profiling.enable_profiling && step % config_.profiling.profile_freq == 0;
    if (traced) trace_.start();
    {
      const TraceScope trace(&trace_, "step");
      const Stopwatch data_watch;
      {
        const TraceScope data_trace(&trace_, "data");
        for (Batch& batch : micro_batches_) {
          loader_->next(tokens_);
          batch.fill(tokens_);
        }
      }
      const double data_seconds = data_watch.seconds();
      StepResult result;
      try {
        result = step_.run(step, micro_batches_, measures_sqnr(step));
      } catch (NonFiniteStep& error) {
        error.result.seconds.data = data_seconds;
        metrics.step(step, error.result);  // so that the run's files say how it ended
        throw;
      }
      result.seconds.data = data_seconds;
      metrics.step(step, result);
      if (step_callback_) step_callback_(step, result);
    }
    metrics.pause();
    if (traced) {
      trace_.stop();
      create_folder(trace_folder);
      trace_.write(trace_folder / fmt::format("step-{}.json", step));
    }
    if (validation_loader_ && (step % config_.validation.freq == 0 || step == num_steps)) {
      metrics.validation(step, validate());
    }
    const bool last = step == num_steps || stop_signal != 0;
    if (config_.checkpoint.enable && (last || step % config_.checkpoint.interval == 0)) {
      save(step);
      saved_step = step;
    }
    metrics.resume();
    if (last) break;
  }
  if (stop_signal != 0)
    spdlog::warn("stopped by signal {} after step {} of {}", static_cast<int>(stop_signal), step, num_steps);
  if (saved_step > 0) spdlog::info("checkpoint: {}", checkpoint_path(checkpoint_folder_, saved_step).string());
  spdlog::info("metrics: {}", metrics_path.string());
  return stop_signal;
}

}  // namespace tessera
