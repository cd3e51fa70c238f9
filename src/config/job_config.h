// The configuration of a training run. It is TOML, with TorchTitan v0.2's sections and keys where the meaning is the
// same. docs/config.md lists all keys. The same table makes --list-keys, --print-config and the checks.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/config_table.h"
#include "config/lr_schedule.h"
#include "config/recipe.h"
#include "ep/dispatch_options.h"
#include "model/config.h"
#include "model/recompute.h"
#include "parallel/mesh_degrees.h"
#include "parallel/pipeline_schedule.h"
#include "parallel/pipeline_stages.h"

namespace tessera {

/// Says whether checkpoints are written while training goes on.
enum class AsyncMode : std::uint8_t { kDisabled, kAsync };

/// Says where a run computes. kAuto means GPUs if every rank of the machine has one.
enum class DeviceChoice : std::uint8_t { kAuto, kCpu, kCuda };

/// The largest beta1 and beta2 for moments in bfloat16. A moment in bfloat16 stops moving when it is within 2^-8 / (1 -
/// beta) of what it tends to. Here that is 20 %, and at 0.95 it is 8 %.
inline constexpr double kLargestBetaInBfloat16 = 0.98;

struct JobConfig {
  struct {
    std::string dump_folder = "./outputs";
    std::string description;
    bool print_config = false;
    bool overwrite = false;
    std::string run_id;
    std::int64_t attempt = 0;
    std::string node_folder;
  } job;
  struct {
    std::string name = "deepseek_v3";
    std::string flavor = "debugmodel";
    std::string hf_assets_path;
    ConfigTable::List converters;
    bool print_after_conversion = false;
    ModelConfig args;
  } model;
  struct {
    std::string name = "AdamW";
    double lr = 8e-4;
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double weight_decay = 0.1;
    DType state_dtype = DType::kFloat32;
  } optimizer;
  LrSchedule lr_scheduler;
  struct {
    std::string dataset;
    std::string dataset_path = "./data/gcide";
    std::int64_t local_batch_size = 8;
    std::int64_t global_batch_size = -1;
    std::int64_t seq_len = 2048;
    double max_norm = 1.0;
    double max_loss_spike = 0.0;
    bool skip_loss_spikes = false;
    std::int64_t steps = 10000;
    DType dtype = DType::kFloat32;
    DType mixed_precision_param = DType::kBFloat16;
    DType mixed_precision_reduce = DType::kFloat32;
    DeviceChoice device = DeviceChoice::kAuto;
    std::int64_t num_threads = 0;
  } training;
  struct {
    std::int64_t data_parallel_replicate_degree = 1;
    std::int64_t data_parallel_shard_degree = -1;
    std::string fsdp_reshard_after_forward = "default";
    std::int64_t tensor_parallel_degree = 1;
    std::int64_t pipeline_parallel_degree = 1;
    std::string pipeline_parallel_schedule = "1F1B";
    std::int64_t pipeline_parallel_microbatch_size = 1;
    std::int64_t pipeline_parallel_max_deferred = 1;  // 0: no limit
    bool pipeline_parallel_expert_parallel_overlap = true;
    std::string pipeline_parallel_reduce_gradients = "step";
    std::int64_t pipeline_parallel_layers_per_stage = -1;
    std::int64_t pipeline_parallel_first_stage_less_layers = 1;
    std::int64_t pipeline_parallel_last_stage_less_layers = 1;
    ConfigTable::Lists module_fqns_per_model_part;
    std::int64_t context_parallel_degree = 1;
    std::int64_t expert_parallel_degree = 1;
    std::int64_t expert_tensor_parallel_degree = 1;
    bool expert_parallel_overlap = false;
    DispatchBackend expert_parallel_comm_backend = DispatchBackend::kStandard;
    PayloadPrecision expert_parallel_a2a_dispatch_fwd_precision = PayloadPrecision::kDefault;
    PayloadPrecision expert_parallel_a2a_combine_bwd_precision = PayloadPrecision::kDefault;
    double expert_parallel_capacity_factor = 0.0;
    std::int64_t expert_parallel_num_sms = kDefaultSms;
    std::int64_t expert_parallel_ranks_per_domain = 0;
  } parallelism;
  struct {
    RecipeOptions linear{.fqns = {"output"}};
    RecipeOptions grouped_mm{.fqns = {"experts"}};
  } quantize_mx;
  struct {
    bool keep_weights = true;
  } quantize;
  struct {
    Recompute mode = Recompute::kNone;
  } activation_checkpoint;
  struct {
    bool enable = false;
    std::string dataset;
    std::string dataset_path;
    std::int64_t local_batch_size = -1, seq_len = -1;
    std::int64_t freq = 10;
    std::int64_t steps = 10;
  } validation;
  struct {
    bool enable = false;
    std::string folder = "checkpoint";
    std::int64_t interval = 500;
    std::int64_t keep_latest_k = 10;
    bool last_save_model_only = false;
    std::int64_t load_step = -1;
    bool fallback = false;
    AsyncMode async_mode = AsyncMode::kDisabled;
    std::int64_t memory_interval = 0;
    std::int64_t verify_interval = 0;
    std::string initial_load_path;
    bool initial_load_in_hf = false;
  } checkpoint;
  struct {
    std::int64_t log_freq = 10;
    bool enable_tensorboard = false;
    std::string save_tb_folder = "tb";
    double peak_tflops = 0.0;
    std::int64_t prometheus_port = 0;
    std::string prometheus_address = "127.0.0.1";
    std::int64_t quantization_error_freq = 100;
  } metrics;
  struct {
    bool enable_profiling = false;
    std::string save_traces_folder = "profile_traces";
    std::int64_t profile_freq = 10;
  } profiling;
  struct {
    std::int64_t init_timeout_seconds = 300;
    std::int64_t train_timeout_seconds = 100;
  } comm;
  struct {
    std::int64_t seed = 0;
    bool deterministic = false;
    bool moe_force_load_balance = false;
    std::int64_t nan_at_step = 0;
    std::int64_t nan_count = 1;
    std::int64_t nan_on_rank = 0;
    std::string nan_on_host;
  } debug;

  /// Returns whether a local batch is cut into micro-batches of parallelism.pipeline_parallel_microbatch_size
  /// sequences.
  bool cuts_local_batch() const { return parallelism.pipeline_parallel_degree > 1; }
  /// Returns the number of sequences that a data rank passes through the model at once.
  std::int64_t micro_batch_size() const {
    return cuts_local_batch() ? parallelism.pipeline_parallel_microbatch_size : training.local_batch_size;
  }
  /// Returns the key that sets micro_batch_size(), for messages.
  std::string_view micro_batch_key() const {
    return cuts_local_batch() ? "parallelism.pipeline_parallel_microbatch_size" : "training.local_batch_size";
  }
  /// Returns the number of sequences per optimizer step, summed over data ranks. It is global_batch_size, or one local
  /// batch of each data rank.
  std::int64_t sequences_per_step(std::int64_t num_data_ranks = 1) const {
    return training.global_batch_size > 0 ? training.global_batch_size : training.local_batch_size * num_data_ranks;
  }
  std::int64_t micro_batches_per_step(std::int64_t num_data_ranks = 1) const {
    return sequences_per_step(num_data_ranks) / (micro_batch_size() * num_data_ranks);
  }
  /// Returns why so many ranks on this machine cannot have a GPU each, or an empty text if they can.
  std::string why_no_gpu(int num_ranks_on_node) const;
  /// Returns where a run with so many ranks on this machine computes. On GPUs each rank has one. Throws Error, which
  /// says why, if a GPU is asked for that cannot be used.
  Device device(int num_ranks_on_node) const;
  MeshDegrees mesh_degrees() const;
  // The next two functions need a mesh whose degrees are resolved. They throw Error for a pipeline that is impossible.
  // Without a pipeline there is one stage. A micro-batch then goes forward and backward before the next begins, unless
  // overlaps_micro_batches() is true.
  /// Returns the modules of the stages.
  std::vector<StageModules> pipeline_stages(const MeshDegrees& degrees) const;
  /// Returns the schedule of the stages, which it has checked.
  PipelineSchedule pipeline_schedule(const MeshDegrees& degrees) const;
  /// Returns whether a forward and the backward of the micro-batch before run in turns, without a pipeline
  /// (parallelism.expert_parallel_overlap).
  bool overlaps_micro_batches(const MeshDegrees& degrees) const {
    return parallelism.expert_parallel_overlap && degrees.pp == 1 && degrees.ep > 1;
  }
  /// Returns what model.converters asks for.
  Recipes recipes() const;

  /// Throws Error if the configuration names data without saying in which folder they are.
  void require_data() const;
  /// Throws Error, which names keys and values, if a run cannot work with these numbers, or if it asks for a feature
  /// that is not built yet.
  void validate() const;
  /// Throws Error if a run cannot work on a mesh with these degrees, which are resolved. With `on_any_ranks` the number
  /// of ranks is still open, and so does not limit the degrees that the message names instead.
  void validate_on(const MeshDegrees& degrees, bool on_any_ranks = false) const;
};

/// Returns the values of activation_checkpoint.mode, by name.
std::vector<std::pair<std::string, Recompute>> recompute_modes();

/// Returns the table of keys, bound to the fields of `config`. TorchTitan's keys that mean nothing here are passed over
/// (docs/from-torchtitan.md).
ConfigTable config_table(JobConfig& config);

/// Reads a TOML file, or TOML text, and then applies overrides "section.key=value". The flavor's numbers come first.
/// [model.args] and overrides replace them. Throws Error. It does not validate().
JobConfig load_job_config(const std::filesystem::path& path, const std::vector<std::string>& overrides);
JobConfig parse_job_config(std::string_view toml_text, const std::vector<std::string>& overrides = {});

}  // namespace tessera
