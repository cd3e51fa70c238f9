// What a configuration must be: the bounds of its numbers, and what its keys demand of each other.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "config/job_config.h"
#include "parallel/mesh.h"

namespace tessera {

namespace {

constexpr std::int64_t kMaxThreads = 4096;
constexpr std::size_t kMaxRunId = 128;

/// Keys that a file may have at any value, but that a run takes at their default only.
struct Unbuilt {
  std::string_view key;
  std::string_view feature;
};
constexpr Unbuilt kUnbuilt[] = {
    {"training.dtype", "training with masters and gradients in another type"},
};

void require_built(const JobConfig& config) {
  JobConfig defaults, given = config;
  const auto default_values = config_table(defaults).describe(), values = config_table(given).describe();
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (const Unbuilt& unbuilt : kUnbuilt) {
      require(values[i].key != unbuilt.key || values[i].value == default_values[i].value,
              "{} is {}: {} is not built yet; a run takes {} only", unbuilt.key, values[i].value, unbuilt.feature,
              default_values[i].value);
    }
  }
}

template <typename Number>
void positive(std::string_view key, Number value) {
  require(value > 0 && value <= std::numeric_limits<Number>::max(), "{} is {}; expected a finite number above 0", key,
          value);
}

template <typename Number>
void not_negative(std::string_view key, Number value) {
  require(value >= 0 && value <= std::numeric_limits<Number>::max(), "{} is {}; expected a finite number, 0 or more",
          key, value);
}

void validate_job(const JobConfig& c) {
  const bool is_plain = std::ranges::all_of(c.job.run_id, [](char character) {
    return std::isalnum(static_cast<unsigned char>(character)) != 0 ||
           std::string_view("._-").find(character) != std::string_view::npos;
  });
  require(is_plain && c.job.run_id.size() <= kMaxRunId,
          "job.run_id is '{}'; expected at most {} letters, digits, '.', '_' and '-'", c.job.run_id, kMaxRunId);
  not_negative("job.attempt", c.job.attempt);
  require(c.job.node_folder.empty() || std::filesystem::path(c.job.node_folder).is_absolute(),
          "job.node_folder is '{}'; expected a path that begins with '/'", c.job.node_folder);
}

void validate_training(const JobConfig& c) {
  positive("training.steps", c.training.steps);
  positive("training.seq_len", c.training.seq_len);
  positive("training.local_batch_size", c.training.local_batch_size);
  const std::int64_t micro_batch = c.parallelism.pipeline_parallel_microbatch_size;
  positive("parallelism.pipeline_parallel_microbatch_size", micro_batch);
  require(
      c.training.local_batch_size % c.micro_batch_size() == 0,
      "training.local_batch_size = {} is not a multiple of parallelism.pipeline_parallel_microbatch_size = {}: with "
      "a pipeline a local batch is cut into micro-batches of that size",
      c.training.local_batch_size, micro_batch);
  require(c.training.max_norm > 0, "training.max_norm is {}; expected a number above 0, or inf", c.training.max_norm);
  require(c.training.max_loss_spike == 0 || (1 < c.training.max_loss_spike && std::isfinite(c.training.max_loss_spike)),
          "training.max_loss_spike is {}; expected a finite factor above 1, or 0 for none", c.training.max_loss_spike);
  require(!c.training.skip_loss_spikes || c.training.max_loss_spike > 0,
          "training.skip_loss_spikes is true, but training.max_loss_spike = 0 says that no loss is a spike");
  require(0 <= c.training.num_threads && c.training.num_threads <= kMaxThreads,
          "training.num_threads is {}; expected 0 (one per core) to {}", c.training.num_threads, kMaxThreads);
  require(c.training.global_batch_size == -1 || c.training.global_batch_size > 0,
          "training.global_batch_size is {}; expected a number above 0, or -1 for one local batch per data rank",
          c.training.global_batch_size);
}

void validate_optimizer(const JobConfig& c) {
  not_negative("optimizer.lr", c.optimizer.lr);
  not_negative("optimizer.weight_decay", c.optimizer.weight_decay);
  positive("optimizer.eps", c.optimizer.eps);
  for (const auto& [key, beta] :
       {std::pair{"optimizer.beta1", c.optimizer.beta1}, {"optimizer.beta2", c.optimizer.beta2}}) {
    require(0.0 <= beta && beta < 1.0, "{} is {}; expected 0 <= beta < 1", key, beta);
    require(c.optimizer.state_dtype == DType::kFloat32 || beta <= kLargestBetaInBfloat16,
            "{} is {}; with optimizer.state_dtype = bfloat16 expected at most {}: smaller steps of a moment are "
            "rounded away",
            key, beta, kLargestBetaInBfloat16);
  }
  not_negative("lr_scheduler.warmup_steps", c.lr_scheduler.warmup_steps);
  not_negative("lr_scheduler.total_steps", c.lr_scheduler.total_steps);
  require(
      c.lr_scheduler.decay_ratio == -1.0 || (0.0 <= c.lr_scheduler.decay_ratio && c.lr_scheduler.decay_ratio <= 1.0),
      "lr_scheduler.decay_ratio is {}; expected 0 to 1, or -1 for all steps after the warm-up",
      c.lr_scheduler.decay_ratio);
  require(0.0 <= c.lr_scheduler.min_lr_factor && c.lr_scheduler.min_lr_factor <= 1.0,
          "lr_scheduler.min_lr_factor is {}; expected 0 to 1", c.lr_scheduler.min_lr_factor);
}

void validate_validation(const JobConfig& c) {
  if (c.validation.enable) {
    positive("validation.freq", c.validation.freq);
    positive("validation.steps", c.validation.steps);
    for (const auto& [key, value, trained] :
         {std::tuple{"local_batch_size", c.validation.local_batch_size, c.training.local_batch_size},
          {"seq_len", c.validation.seq_len, c.training.seq_len}}) {
      require(value == -1 || value == trained,
              "validation.{} is {}; expected -1 or training.{} = {}, which validation uses", key, value, key, trained);
    }
  }
}

void validate_checkpoint(const JobConfig& c) {
  if (c.checkpoint.enable) {
    positive("checkpoint.interval", c.checkpoint.interval);
    not_negative("checkpoint.keep_latest_k", c.checkpoint.keep_latest_k);
    require(c.checkpoint.load_step >= -1, "checkpoint.load_step is {}; expected a step, or -1 for the newest one",
            c.checkpoint.load_step);
  } else {
    require(c.checkpoint.load_step == -1, "checkpoint.load_step is {}, but checkpoint.enable is false",
            c.checkpoint.load_step);
  }
  not_negative("checkpoint.memory_interval", c.checkpoint.memory_interval);
  not_negative("checkpoint.verify_interval", c.checkpoint.verify_interval);
  require(c.checkpoint.memory_interval == 0 || c.checkpoint.enable,
          "checkpoint.memory_interval is {}, but checkpoint.enable is false: copies in memory need checkpoints on disk "
          "to fall back to",
          c.checkpoint.memory_interval);
  require(
      !c.checkpoint.initial_load_in_hf || !c.checkpoint.initial_load_path.empty(),
      "checkpoint.initial_load_in_hf is true, but checkpoint.initial_load_path does not say where the files are (it "
      "takes the place of TorchTitan's model.hf_assets_path)");
}

void validate_parallelism(const JobConfig& c) {
  const std::string& reshard = c.parallelism.fsdp_reshard_after_forward;
  require(reshard == "default" || reshard == "always" || reshard == "never",
          "parallelism.fsdp_reshard_after_forward is '{}'; expected default, always or never", reshard);
  require(c.parallelism.expert_tensor_parallel_degree == 1,
          "parallelism.expert_tensor_parallel_degree is {}; expected 1: experts stay whole, and "
          "parallelism.expert_parallel_degree spreads them over the tensor-parallel ranks as well",
          c.parallelism.expert_tensor_parallel_degree);
  const double capacity = c.parallelism.expert_parallel_capacity_factor;
  require(
      capacity == 0.0 || (capacity >= 1.0 && capacity <= 1e6),
      "parallelism.expert_parallel_capacity_factor is {}; expected 0 (room for any load), or at least 1, a balanced "
      "load's",
      capacity);
  const std::int64_t num_sms = c.parallelism.expert_parallel_num_sms;
  require(num_sms >= 2 && num_sms <= 128,
          "parallelism.expert_parallel_num_sms is {}; expected 2 to 128: some store, some work on what comes", num_sms);
  for (const auto& [key, payload] : {std::pair{"parallelism.expert_parallel_a2a_dispatch_fwd_precision",
                                               c.parallelism.expert_parallel_a2a_dispatch_fwd_precision},
                                     {"parallelism.expert_parallel_a2a_combine_bwd_precision",
                                      c.parallelism.expert_parallel_a2a_combine_bwd_precision}}) {
    require(payload == PayloadPrecision::kDefault || c.model.args.dim % mx::kBlock == 0,
            "{} is mxfp8, but model.args.dim = {} is not a multiple of {}, the numbers that share a scale", key,
            c.model.args.dim, mx::kBlock);
  }
  const std::int64_t layers_per_stage = c.parallelism.pipeline_parallel_layers_per_stage;
  require(layers_per_stage == -1 || layers_per_stage > 0,
          "parallelism.pipeline_parallel_layers_per_stage is {}; expected a number above 0, or -1 for stages of about "
          "the same cost",
          layers_per_stage);
  for (const auto& [key, less] : {std::pair{"first", c.parallelism.pipeline_parallel_first_stage_less_layers},
                                  {"last", c.parallelism.pipeline_parallel_last_stage_less_layers}}) {
    require(0 <= less && less <= c.model.args.n_layers,
            "parallelism.pipeline_parallel_{}_stage_less_layers is {}; expected 0 to model.args.n_layers = {}", key,
            less, c.model.args.n_layers);
  }
}

void validate_metrics(const JobConfig& c) {
  require(c.metrics.prometheus_port >= 0 && c.metrics.prometheus_port <= 65535,
          "metrics.prometheus_port is {}, expected a port from 1 to 65535, or 0 for none", c.metrics.prometheus_port);
  positive("metrics.log_freq", c.metrics.log_freq);
  not_negative("metrics.peak_tflops", c.metrics.peak_tflops);
  not_negative("metrics.quantization_error_freq", c.metrics.quantization_error_freq);
  not_negative("debug.nan_at_step", c.debug.nan_at_step);
  not_negative("debug.nan_count", c.debug.nan_count);
  require(c.debug.nan_on_rank >= -1, "debug.nan_on_rank is {}; expected a rank, or -1 for every rank",
          c.debug.nan_on_rank);
  if (c.profiling.enable_profiling) positive("profiling.profile_freq", c.profiling.profile_freq);
}

void validate_micro_batch(const JobConfig& c) {
  // Rows and tokens of a micro-batch are counted in 32 bits. In floating point, so that nothing overflows on the way.
  const double padding = static_cast<double>(c.model.args.num_experts) * mx::kWideBlock;
  const double rows = static_cast<double>(c.micro_batch_size()) * static_cast<double>(c.training.seq_len) *
                      static_cast<double>(std::max<std::int64_t>(c.model.args.top_k, 1));
  require(rows + padding < 0x1p31,
          "a micro-batch of {} sequences times training.seq_len = {} times model.args.top_k = {}, with the experts' "
          "padding, is 2^31 or more: make {} smaller",
          c.micro_batch_size(), c.training.seq_len, c.model.args.top_k, c.micro_batch_key());
}

}  // namespace

void JobConfig::validate() const {
  require_built(*this);
  for (const std::string& converter : model.converters) {
    require(converter == kLinearConverter || converter == kGroupedConverter,
            "model.converters has '{}'; there are {} and {}", converter, kLinearConverter, kGroupedConverter);
  }
  validate_job(*this);
  require(model.name == "deepseek_v3", "model.name is '{}'; expected 'deepseek_v3', the only model here", model.name);
  require(optimizer.name == "AdamW", "optimizer.name is '{}'; expected 'AdamW', the only optimizer here",
          optimizer.name);
  model.args.validate();
  validate_training(*this);
  validate_optimizer(*this);
  validate_validation(*this);
  validate_checkpoint(*this);
  positive("comm.init_timeout_seconds", comm.init_timeout_seconds);
  positive("comm.train_timeout_seconds", comm.train_timeout_seconds);
  validate_parallelism(*this);
  validate_metrics(*this);
  validate_micro_batch(*this);
}

void JobConfig::validate_on(const MeshDegrees& degrees) const {
  const ModelConfig& m = model.args;
  const std::int64_t shared_dim = m.num_shared_experts * m.moe_inter_dim;
  std::vector<std::pair<std::string_view, std::int64_t>> cut_by_tensor = {{"model.args.n_heads", m.n_heads},
                                                                          {"model.args.vocab_size", m.vocab_size}};
  if (m.n_dense_layers > 0) cut_by_tensor.emplace_back("model.args.inter_dim", m.inter_dim);
  if (shared_dim > 0) cut_by_tensor.emplace_back("model.args.num_shared_experts x moe_inter_dim", shared_dim);
  std::int64_t others = degrees.num_ranks();
  for (const auto& [what, total] : cut_by_tensor) others = std::gcd(others, total);
  for (const auto& [what, total] : cut_by_tensor) {
    require_divides("parallelism.tensor_parallel_degree", degrees.tp, total, fmt::format("{} = {}", what, total),
                    others);
  }
  // A context-parallel rank has two chunks of each sequence, which its tensor-parallel ranks share equally.
  const std::int64_t parts = (degrees.cp > 1 ? 2 * degrees.cp : 1) * degrees.tp;
  require(training.seq_len % parts == 0,
          "training.seq_len is {}, which parallelism.context_parallel_degree = {} and tensor_parallel_degree = {} cut "
          "into {} parts; the nearest values that they divide are {} and {}",
          training.seq_len, degrees.cp, degrees.tp, parts, std::max(parts, training.seq_len / parts * parts),
          (training.seq_len / parts + 1) * parts);
  const std::int64_t data_ranks = degrees.dp_replicate * degrees.dp_shard;
  const std::int64_t unit = training.local_batch_size * data_ranks;
  require(
      sequences_per_step(data_ranks) % unit == 0,
      "training.global_batch_size = {} is not a multiple of training.local_batch_size = {} times {} data ranks; the "
      "nearest that is: {}",
      training.global_batch_size, training.local_batch_size, data_ranks,
      std::max(unit, (training.global_batch_size + unit / 2) / unit * unit));
  constexpr std::int64_t kMaxMicroBatches = std::int64_t{1} << 20;
  require(micro_batches_per_step(data_ranks) <= kMaxMicroBatches,
          "training.global_batch_size = {} sequences are {} micro-batches of each rank per step; expected at most {}",
          training.global_batch_size, micro_batches_per_step(data_ranks), kMaxMicroBatches);
  require_divides("parallelism.expert_parallel_degree", degrees.ep, model.args.num_experts,
                  fmt::format("model.args.num_experts = {}", model.args.num_experts),
                  degrees.dp_shard * degrees.cp * degrees.tp);
  if (degrees.pp > 1) {
    const PipelineSchedule schedule = pipeline_schedule(degrees);
    require(
        m.num_mtp_modules == 0 || schedule.rank_of_stage.front() == schedule.rank_of_stage.back(),
        "model.args.num_mtp_modules is {}: multi-token prediction needs embedding and output projection on one rank; "
        "parallelism.pipeline_parallel_schedule is {}, expected ZBVZeroBubble or DualPipeV",
        m.num_mtp_modules, name_of(schedule.kind));
  }
}

void JobConfig::require_data() const {
  require(!training.dataset_path.empty(),
          "{} a folder made by `tessera data prepare --input TEXTS --tokenizer TOKENIZER --output FOLDER`",
          training.dataset.empty()
              ? "training.dataset_path is empty; expected"
              : fmt::format("training.dataset is '{}', a name that only TorchTitan knows; expected "
                            "training.dataset_path,",
                            training.dataset));
  require(
      !validation.enable || validation.dataset.empty() || !validation.dataset_path.empty(),
      "validation.dataset is '{}', a name that only TorchTitan knows; expected validation.dataset_path, a folder made "
      "by `tessera data prepare`, or neither, for the validation split of training.dataset_path",
      validation.dataset);
}

}  // namespace tessera
