// What keys of a configuration demand of each other. config_keys.cc has the range of each number.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <numeric>

#include "base/error.h"
#include "config/job_config.h"
#include "parallel/mesh.h"

namespace tessera {

namespace {

constexpr std::size_t kMaxRunId = 128;

void validate_job(const JobConfig& c) {
  const bool is_plain = std::ranges::all_of(c.job.run_id, [](char character) {
    return std::isalnum(static_cast<unsigned char>(character)) != 0 ||
           std::string_view("._-").find(character) != std::string_view::npos;
  });
  require(is_plain && c.job.run_id.size() <= kMaxRunId,
          "job.run_id is '{}'; expected at most {} letters, digits, '.', '_' and '-'", c.job.run_id, kMaxRunId);
  require(c.job.node_folder.empty() || std::filesystem::path(c.job.node_folder).is_absolute(),
          "job.node_folder is '{}'; expected a path that begins with '/'", c.job.node_folder);
}

void validate_model(const JobConfig& c) {
  const ModelConfig& m = c.model.args;
  m.validate();
  require(
      m.n_expert_groups > 0 || m.n_limited_groups <= 1,
      "model.args.n_limited_groups is {}, but n_expert_groups is 0, which makes no groups; expected both or neither",
      m.n_limited_groups);
  require(m.beta_slow <= m.beta_fast,
          "model.args.beta_slow is {}; expected at most beta_fast = {}: slow frequencies make fewer turns", m.beta_slow,
          m.beta_fast);
}

void validate_training(const JobConfig& c) {
  const std::int64_t micro_batch = c.parallelism.pipeline_parallel_microbatch_size;
  require(
      c.training.local_batch_size % c.micro_batch_size() == 0,
      "training.local_batch_size = {} is not a multiple of parallelism.pipeline_parallel_microbatch_size = {}: with "
      "a pipeline a local batch is cut into micro-batches of that size",
      c.training.local_batch_size, micro_batch);
  require(!c.training.skip_loss_spikes || c.training.max_loss_spike > 0,
          "training.skip_loss_spikes is true, but training.max_loss_spike = 0 says that no loss is a spike");
}

void validate_optimizer(const JobConfig& c) {
  for (const auto& [key, beta] :
       {std::pair{"optimizer.beta1", c.optimizer.beta1}, {"optimizer.beta2", c.optimizer.beta2}}) {
    require(c.optimizer.state_dtype == DType::kFloat32 || beta <= kLargestBetaInBfloat16,
            "{} is {}; with optimizer.state_dtype = bfloat16 expected at most {}: smaller steps of a moment are "
            "rounded away",
            key, beta, kLargestBetaInBfloat16);
  }
}

void validate_validation(const JobConfig& c) {
  if (c.validation.enable) {
    require_in_range("validation.freq", c.validation.freq, above_zero());
    require_in_range("validation.steps", c.validation.steps, above_zero());
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
    require_in_range("checkpoint.interval", c.checkpoint.interval, above_zero());
    require_in_range("checkpoint.keep_latest_k", c.checkpoint.keep_latest_k, zero_or_more());
    require(c.checkpoint.load_step >= -1, "checkpoint.load_step is {}; expected a step, or -1 for the newest one",
            c.checkpoint.load_step);
  } else {
    require(c.checkpoint.load_step == -1, "checkpoint.load_step is {}, but checkpoint.enable is false",
            c.checkpoint.load_step);
  }
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
  require(c.parallelism.expert_tensor_parallel_degree == 1,
          "parallelism.expert_tensor_parallel_degree is {}; expected 1: experts stay whole, and "
          "parallelism.expert_parallel_degree spreads them over the tensor-parallel ranks as well",
          c.parallelism.expert_tensor_parallel_degree);
  for (const auto& [key, payload] : {std::pair{"parallelism.expert_parallel_a2a_dispatch_fwd_precision",
                                               c.parallelism.expert_parallel_a2a_dispatch_fwd_precision},
                                     {"parallelism.expert_parallel_a2a_combine_bwd_precision",
                                      c.parallelism.expert_parallel_a2a_combine_bwd_precision}}) {
    require(payload == PayloadPrecision::kDefault || c.model.args.dim % mx::kBlock == 0,
            "{} is mxfp8, but model.args.dim = {} is not a multiple of {}, the numbers that share a scale", key,
            c.model.args.dim, mx::kBlock);
  }
  for (const auto& [key, less] : {std::pair{"first", c.parallelism.pipeline_parallel_first_stage_less_layers},
                                  {"last", c.parallelism.pipeline_parallel_last_stage_less_layers}}) {
    require(0 <= less && less <= c.model.args.n_layers,
            "parallelism.pipeline_parallel_{}_stage_less_layers is {}; expected 0 to model.args.n_layers = {}", key,
            less, c.model.args.n_layers);
  }
}

void validate_micro_batch(const JobConfig& c) {
  // Rows and tokens of a micro-batch are counted in 32 bits. In floating point, so that nothing overflows on the way.
  const double padding = static_cast<double>(c.model.args.num_experts) * mx::kWideBlock;
  const double rows = static_cast<double>(c.micro_batch_size()) * static_cast<double>(c.training.seq_len) *
                      static_cast<double>(std::max<std::int64_t>(c.model.args.top_k, 1));
  require(rows + padding < 0x1p31,
          "a micro-batch of {} sequences times training.seq_len = {} times model.args.top_k = {}, with the experts' "
          "padding, is 2^31 or more: make {} smaller",
          c.micro_batch_size(), c.training.seq_len, c.model.args.top_k,
          c.micro_batch_size() == 1 ? "training.seq_len" : c.micro_batch_key());
}

}  // namespace

void JobConfig::validate() const {
  JobConfig given = *this;
  config_table(given).require_in_range();
  for (const std::string& converter : model.converters) {
    require(converter == kLinearConverter || converter == kGroupedConverter,
            "model.converters has '{}'; there are {} and {}", converter, kLinearConverter, kGroupedConverter);
  }
  validate_job(*this);
  require(model.name == "deepseek_v3", "model.name is '{}'; expected 'deepseek_v3', the only model here", model.name);
  require(optimizer.name == "AdamW", "optimizer.name is '{}'; expected 'AdamW', the only optimizer here",
          optimizer.name);
  validate_model(*this);
  validate_training(*this);
  validate_optimizer(*this);
  validate_validation(*this);
  validate_checkpoint(*this);
  validate_parallelism(*this);
  if (profiling.enable_profiling) require_in_range("profiling.profile_freq", profiling.profile_freq, above_zero());
  validate_micro_batch(*this);
}

void JobConfig::validate_on(const MeshDegrees& degrees, bool on_any_ranks) const {
  const ModelConfig& m = model.args;
  const std::int64_t shared_dim = m.num_shared_experts * m.moe_inter_dim;
  std::vector<std::pair<std::string_view, std::int64_t>> cut_by_tensor = {{"model.args.n_heads", m.n_heads},
                                                                          {"model.args.vocab_size", m.vocab_size}};
  if (m.n_dense_layers > 0) cut_by_tensor.emplace_back("model.args.inter_dim", m.inter_dim);
  if (shared_dim > 0) cut_by_tensor.emplace_back("model.args.num_shared_experts x moe_inter_dim", shared_dim);
  std::int64_t others = on_any_ranks ? 0 : degrees.num_ranks();  // every degree divides 0
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
                  on_any_ranks ? 0 : degrees.dp_shard * degrees.cp * degrees.tp);
  const PipelineSchedule schedule = pipeline_schedule(degrees);
  require(m.num_mtp_modules == 0 || schedule.rank_of_stage.front() == schedule.rank_of_stage.back(),
          "model.args.num_mtp_modules is {}: multi-token prediction needs embedding and output projection on one rank; "
          "parallelism.pipeline_parallel_schedule is {}, expected ZBVZeroBubble or DualPipeV",
          m.num_mtp_modules, name_of(schedule.kind));
  require(m.num_mtp_modules == 0 || !overlaps_micro_batches(degrees),
          "parallelism.expert_parallel_overlap is true, but model.args.num_mtp_modules is {}: a module computes "
          "gradients in its forward, too; expected no modules, or a pipeline with DualPipeV",
          m.num_mtp_modules);
  const bool splits_backward =
      schedule.kind == PipelineScheduleKind::kZBV || schedule.kind == PipelineScheduleKind::kDualPipeV;
  require(parallelism.pipeline_parallel_reduce_gradients == "step" || !splits_backward,
          "parallelism.pipeline_parallel_reduce_gradients is micro_batch, but {} computes a unit's gradients in two "
          "passes; expected step, or the schedule 1F1B or Interleaved1F1B",
          name_of(schedule.kind));
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
