// Every configuration key, once: its target, its choices or range, and its help (docs/config.md comes from these).
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "config/job_config.h"
#include "ep/backends/backend_choices.h"

namespace tessera {

std::vector<std::pair<std::string, Recompute>> recompute_modes() {
  return {{"none", Recompute::kNone}, {"selective", Recompute::kSelective}, {"full", Recompute::kFull}};
}

namespace {

NumberRange beta_range() { return {.lowest = 0.0, .highest = std::nextafter(1.0, 0.0), .expected = "0 <= beta < 1"}; }

/// TorchTitan v0.2.1's keys that have no counterpart (docs/from-torchtitan.md has the same list).
void pass_over_torchtitan_keys(ConfigTable& t) {
  constexpr auto kFlag = ConfigTable::Form::kFlag;
  constexpr auto kValue = ConfigTable::Form::kValue;

  const char* python = "there is no Python here";
  t.ignore("training.gc_freq", kValue, python);
  t.ignore("training.gc_debug", kFlag, python);
  for (const char* key : {"training.dataloader.persistent_workers", "training.dataloader.pin_memory",
                          "validation.dataloader.persistent_workers", "validation.dataloader.pin_memory"}) {
    t.ignore(key, kFlag, "the loader maps token shards and needs no workers");
  }
  t.ignore("training.dataloader.*", kValue, "the loader maps token shards and needs no workers");
  t.ignore("validation.dataloader.*", kValue, "the loader maps token shards and needs no workers");
  t.ignore("compile.enable", kFlag, "everything is compiled");
  t.ignore("compile.*", kValue, "everything is compiled");
  t.ignore("parallelism.enable_async_tensor_parallel", kFlag, "a matter of torch.compile");
  t.ignore("optimizer.implementation", kValue, "there is one implementation");
  t.accept_only("checkpoint.initial_load_model_only", kFlag, {"true"},
                "initial_load_path gives the weights only; a run with the optimizer's state goes on in its folder");
  t.ignore("checkpoint.initial_load_in_hf_quantized", kFlag, "FP8 weights are recognised by their scales");
  t.accept_only("checkpoint.export_dtype", kValue, {"float32"},
                "checkpoints hold float32 masters; `tessera convert --to hf --dtype` writes another type");
  t.ignore("checkpoint.enable_ft_dataloader_checkpoints", kFlag, "the loader's state is in every checkpoint");
  const char* selective = "what selective keeps is fixed, and docs/model.md lists it";
  t.accept_only("activation_checkpoint.selective_ac_option", kValue, {"op"}, selective);
  t.accept_only("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", kValue, {"moe.router.gate"},
                selective);
  t.ignore("activation_checkpoint.early_stop", kFlag, "a matter of torch.utils.checkpoint");
  t.ignore("activation_checkpoint.memory_budget", kValue, "a matter of torch.compile");
  t.ignore("activation_checkpoint.visualize_memory_budget_pareto", kFlag, "a matter of torch.compile");
  t.ignore("activation_checkpoint.preserve_rng_state", kFlag, "recomputation is exact");
  t.ignore("activation_checkpoint.determinism_check", kValue, "recomputation is exact");
  t.ignore("activation_checkpoint.debug", kFlag, "a matter of torch.utils.checkpoint");
  t.refuse("memory_estimation.enable", kFlag, "an estimate in place of a run (`tessera plan memory` gives one)");
  t.ignore("memory_estimation.*", kFlag, "takes effect with memory_estimation.enable only");
  t.ignore("metrics.disable_color_printing", kFlag, "lines have no colours");
  t.ignore("metrics.save_for_all_ranks", kFlag, "metrics are of all ranks together");
  t.ignore("debug.deterministic_warn_only", kFlag, "debug.deterministic never only warns");
  t.ignore("profiling.profiler_active", kValue, "a trace is of one step");
  t.ignore("profiling.profiler_warmup", kValue, "a trace is of one step");
  t.ignore("profiling.save_memory_snapshot_folder", kValue, "there are no memory snapshots");
  for (const char* key : {"trace_buf_size", "save_traces_folder", "save_traces_file_prefix"}) {
    t.ignore(fmt::format("comm.{}", key), kValue, "there is no recorder of NCCL's operations");
  }
  t.accept_only("comm.mode", kValue, {"default"},
                "a run communicates; `tessera plan memory` and `tessera plan time` check a run without its ranks");
  t.ignore("parallelism.disable_loss_parallel", kFlag, "tensor-parallel ranks always share the cross-entropy");
  t.refuse("parallelism.pipeline_parallel_schedule_csv", kValue, "a schedule from a file");
  t.ignore("parallelism.context_parallel_load_balancer", kValue, "sequences are always cut in head-tail chunks");
  t.accept_only("parallelism.context_parallel_rotate_method", kValue, {"allgather"},
                "attention gathers the latents of all chunks");
  for (const char* key : {"enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "emulate"}) {
    t.ignore(fmt::format("quantize.linear.float8.{}", key), kFlag, "takes effect through model.converters only");
  }
  t.ignore("quantize.linear.float8.*", kValue, "takes effect through model.converters only");
  t.ignore("quantize.grouped_mm.float8.*", kValue, "takes effect through model.converters only");
  t.ignore("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", kValue, "there is one kernel");

  for (const char* key :
       {"job.custom_config_module", "experimental.custom_import", "experimental.custom_args_module"}) {
    t.refuse(key, kValue, "loading Python modules");
  }
  t.refuse("model.tokenizer_path", kValue, "TorchTitan's older name of model.hf_assets_path");
  t.refuse("job.save_config_file", kValue, "saving the configuration to a file (--print-config prints it)");
  t.refuse("profiling.enable_memory_snapshot", kFlag, "a snapshot of the memory");
  t.refuse("metrics.enable_wandb", kFlag, "Weights & Biases");
  t.refuse("optimizer.early_step_in_backward", kFlag, "an optimizer inside the backward");
  t.refuse("training.enable_cpu_offload", kFlag, "offloading to the CPU");
  t.refuse("checkpoint.last_save_in_hf", kFlag, "saving Hugging Face files from a run (`tessera convert` makes them)");
  t.refuse("checkpoint.exclude_from_loading", kValue, "partial loading");
  t.refuse("checkpoint.enable_first_step_checkpoint", kFlag, "a checkpoint of the first step");
  t.refuse("checkpoint.create_seed_checkpoint", kFlag, "a seed checkpoint");
  t.refuse("checkpoint.load_only", kFlag, "loading without saving");
  t.refuse("fault_tolerance.enable", kFlag, "TorchFT's fault tolerance");
  t.ignore("fault_tolerance.*", kValue, "takes effect with fault_tolerance.enable only");
}

/// Adds the keys of a converter. The linear one also has TorchTitan's names of recipes.
void add_recipe_keys(ConfigTable& t, const std::string& section, RecipeOptions& options, bool linear) {
  std::vector<std::pair<std::string, Recipe>> recipes = {{"mxfp8", Recipe::kMxfp8},
                                                         {"mxfp8_wgrad_with_hp", Recipe::kMxfp8WgradWithHp},
                                                         {"mxfp8_emulated", Recipe::kMxfp8Emulated},
                                                         {"fp8_blockwise", Recipe::kFp8Blockwise}};
  if (linear) {
    recipes.emplace_back("mxfp8_cublas", Recipe::kMxfp8Cublas);
    recipes.emplace_back("mxfp8_cublas_rceil", Recipe::kMxfp8CublasRceil);
  }
  t.add(section + ".recipe_name", options.recipe, recipes, "low-precision recipe (docs/mxfp8.md)");
  if (linear) {
    t.add(section + ".filter_fqns", options.fqns,
          "modules that stay as they are: those whose name contains one of these");
    t.add(section + ".convert_output", options.convert_output,
          "the output projection as well, whatever filter_fqns says; its logits are then bfloat16");
  } else {
    t.add(section + ".fqns", options.fqns,
          "modules whose grouped GEMMs it is for: those whose name contains one of these");
  }
  t.add(section + ".scaling_mode", options.scaling_mode,
        {{"default", std::nullopt},
         {"floor", mx::ScalingMode::kFloor},
         {"rceil", mx::ScalingMode::kRceil},
         {"ceil", mx::ScalingMode::kCeil},
         {"even", mx::ScalingMode::kEven}},
        linear ? "how a block's scale follows from its largest number; default: rceil, with mxfp8_cublas floor"
               : "how a block's scale follows from its largest number; default: rceil");
  t.add(section + ".block_shape", options.block_shape,
        {{"default", BlockChoice::kOfRecipe},
         {"1x32", BlockChoice::k1x32},
         {"32x32", BlockChoice::k32x32},
         {"128x128", BlockChoice::k128x128},
         {"256x256", BlockChoice::k256x256}},
        "blocks of the weights; activations have 1x32, with 128x128 1x128 (in wgrad mxfp8 128x128), with 256x256 1x256 "
        "(in wgrad as with 128x128). default: 1x32, of mxfp8 on a Hopper GPU and of fp8_blockwise 128x128");
  t.add(section + ".unaligned", options.unaligned, {{"error", Unaligned::kError}, {"bf16", Unaligned::kHigh}},
        "modules whose sizes are no multiples of 32: an error, or left as they are");
}

void add_job_keys(ConfigTable& t, JobConfig& c) {
  t.add("job.dump_folder", c.job.dump_folder, "folder of everything that a run writes");
  t.add("job.description", c.job.description, "free text");
  t.add("job.print_config", c.job.print_config, "print the whole configuration when the run starts");
  t.add("job.overwrite", c.job.overwrite,
        "begin at step 1 in a folder that holds another run's metrics.jsonl and run.json, and replace them");
  t.add("job.run_id", c.job.run_id,
        "which run this is, for launchers: processes with one id are attempts of one run; empty: the Slurm job and "
        "step, or a new id");
  t.add("job.attempt", c.job.attempt,
        "which attempt of the run this is, 1 or more; it takes the folder over from earlier ones that hang. 0: the "
        "next one, or Slurm's count of requeues, and nothing is taken over",
        zero_or_more());
  t.add("job.node_folder", c.job.node_folder,
        "folder in this node's memory (a tmpfs), which `tessera launch` makes: the ranks' files for a monitor, and "
        "copies in memory. Empty: none");
}

void add_model_keys(ConfigTable& t, JobConfig& c) {
  t.add("model.name", c.model.name, "the model: deepseek_v3");
  t.add("model.flavor", c.model.flavor, "the model's sizes: debugmodel, 16B, 236B or 671B");
  t.add("model.hf_assets_path", c.model.hf_assets_path,
        "folder with a tokenizer, as TorchTitan's; if it exists, its tokenizer must be that of the dataset");
  t.add("model.converters", c.model.converters,
        "low precision: quantize.linear.mx, quantize.grouped_mm.mx (docs/mxfp8.md)");
  t.add("model.print_after_conversion", c.model.print_after_conversion,
        "print the table of GEMM sites and their precisions");
  ModelConfig& a = c.model.args;
  t.add("model.args.vocab_size", a.vocab_size, "entries of the vocabulary");
  t.add("model.args.dim", a.dim, "width of the residual stream");
  t.add("model.args.inter_dim", a.inter_dim, "hidden width of a dense FFN");
  t.add("model.args.moe_inter_dim", a.moe_inter_dim, "hidden width of one expert");
  t.add("model.args.n_layers", a.n_layers, "number of layers");
  t.add("model.args.n_dense_layers", a.n_dense_layers, "first layers, with a dense FFN in place of experts");
  t.add("model.args.n_heads", a.n_heads, "attention heads");
  t.add("model.args.norm_eps", a.norm_eps, "epsilon of RMSNorm");
  t.add("model.args.num_experts", a.num_experts, "routed experts per layer");
  t.add("model.args.num_shared_experts", a.num_shared_experts, "shared experts per layer, as one FFN");
  t.add("model.args.top_k", a.top_k, "routed experts per token");
  t.add("model.args.score_func", a.score_func,
        {{"softmax", ScoreFunction::kSoftmax}, {"sigmoid", ScoreFunction::kSigmoid}},
        "function from the router's logits to scores");
  t.add("model.args.route_norm", a.route_norm, "divide the chosen experts' scores by their sum");
  t.add("model.args.route_scale", a.route_scale, "factor of the routing weights");
  t.add("model.args.load_balance_coeff", a.load_balance_coeff, "step of the expert bias; 0: none");
  t.add("model.args.n_expert_groups", a.n_expert_groups, "groups of experts; 0: none");
  t.add("model.args.n_limited_groups", a.n_limited_groups, "groups that a token may choose from");
  t.add("model.args.seq_balance_loss_coeff", a.seq_balance_loss_coeff, "coefficient of the sequence-wise balance loss");
  t.add("model.args.q_lora_rank", a.q_lora_rank, "rank of the queries' compression; 0: none");
  t.add("model.args.kv_lora_rank", a.kv_lora_rank, "rank of the keys' and values' compression");
  t.add("model.args.qk_nope_head_dim", a.qk_nope_head_dim, "part of a head's query and key without RoPE");
  t.add("model.args.qk_rope_head_dim", a.qk_rope_head_dim, "part of a head's query and key with RoPE");
  t.add("model.args.v_head_dim", a.v_head_dim, "width of a head's value");
  t.add("model.args.attn_mask_type", a.attn_mask_type,
        {{"causal", AttentionMask::kCausal}, {"block_causal", AttentionMask::kBlockCausal}},
        "attend to all earlier tokens of the sequence, or of the document");
  t.add("model.args.eos_id", a.eos_id, "token that ends a document; -1: the tokenizer's");
  t.add("model.args.original_seq_len", a.original_seq_len, "sequences longer than this use YaRN");
  t.add("model.args.rope_theta", a.rope_theta, "base of RoPE's frequencies");
  t.add("model.args.rope_factor", a.rope_factor, "YaRN: factor of the sequence length");
  t.add("model.args.beta_fast", a.beta_fast, "YaRN: turns above which a frequency stays");
  t.add("model.args.beta_slow", a.beta_slow, "YaRN: turns below which a frequency is divided by the factor");
  t.add("model.args.mscale", a.mscale, "YaRN: weight of the softmax scale's correction");
  t.add("model.args.num_mtp_modules", a.num_mtp_modules, "multi-token prediction modules");
  t.add("model.args.mtp_loss_weight", a.mtp_loss_weight, "weight of their mean loss");
}

void add_optimizer_keys(ConfigTable& t, JobConfig& c) {
  t.add("optimizer.name", c.optimizer.name, "the optimizer: AdamW");
  t.add("optimizer.lr", c.optimizer.lr, "highest learning rate", zero_or_more());
  t.add("optimizer.beta1", c.optimizer.beta1, "decay of the first moment", beta_range());
  t.add("optimizer.beta2", c.optimizer.beta2, "decay of the second moment", beta_range());
  // A smaller number is 0 in float32, or nearly, and a weight without gradients would become 0 / 0.
  t.add("optimizer.eps", c.optimizer.eps, "added to the root of the second moment",
        NumberRange{.lowest = std::numeric_limits<float>::min(), .expected = "at least 1.2e-38"});
  t.add("optimizer.weight_decay", c.optimizer.weight_decay, "decoupled weight decay", zero_or_more());
  t.add("optimizer.state_dtype", c.optimizer.state_dtype,
        {{"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}},
        "type that both moments are kept in; bfloat16, as DeepSeek-V3's, takes 4 bytes per parameter less");

  t.add("lr_scheduler.warmup_steps", c.lr_scheduler.warmup_steps, "steps of linear warm-up", zero_or_more());
  t.add("lr_scheduler.total_steps", c.lr_scheduler.total_steps, "steps that the schedule is for; 0: training.steps",
        zero_or_more());
  t.add(
      "lr_scheduler.decay_ratio", c.lr_scheduler.decay_ratio, "part of the steps that decay; -1: all after warm-up",
      NumberRange{
          .lowest = 0.0, .highest = 1.0, .special = -1.0, .expected = "0 to 1, or -1 for all steps after the warm-up"});
  t.add("lr_scheduler.decay_type", c.lr_scheduler.decay_type,
        {{"linear", DecayType::kLinear}, {"sqrt", DecayType::kSqrt}, {"cosine", DecayType::kCosine}},
        "shape of the decay");
  t.add("lr_scheduler.min_lr_factor", c.lr_scheduler.min_lr_factor, "factor of the learning rate at the end",
        NumberRange{.lowest = 0.0, .highest = 1.0, .expected = "0 to 1"});
}

void add_training_keys(ConfigTable& t, JobConfig& c) {
  constexpr double kMostSequences = 1e9;  // products with a number of ranks are far from overflow
  t.add(
      "training.dataset", c.training.dataset,
      "name of a dataset, as TorchTitan's; a run that has one must set training.dataset_path, which is what it reads");
  t.add("training.dataset_path", c.training.dataset_path, "folder made by `tessera data prepare`");
  t.add("training.local_batch_size", c.training.local_batch_size,
        "sequences that a data rank passes through the model at once; a pipeline cuts them into micro-batches",
        NumberRange{.lowest = 1.0, .highest = kMostSequences, .expected = "1 to 1000000000"});
  t.add("training.global_batch_size", c.training.global_batch_size,
        "sequences per optimizer step, by gradient accumulation; -1: one local batch of each data rank",
        NumberRange{.lowest = 1.0,
                    .highest = kMostSequences,
                    .special = -1.0,
                    .expected = "1 to 1000000000, or -1 for one local batch per data rank"});
  t.add("training.seq_len", c.training.seq_len, "tokens per sequence", above_zero());
  t.add("training.max_norm", c.training.max_norm, "global gradient norm above which gradients are clipped; inf: never",
        NumberRange{.lowest = 0.0,
                    .without_lowest = true,
                    .highest = std::numeric_limits<double>::infinity(),
                    .expected = "a number above 0, or inf"});
  t.add(
      "training.max_loss_spike", c.training.max_loss_spike,
      "a loss above so many times the mean of the last 20 steps' is a spike: the step is made once more, and if it "
      "is a spike again, the run ends. 0: any loss will do",
      NumberRange{
          .lowest = 1.0, .without_lowest = true, .special = 0.0, .expected = "a finite factor above 1, or 0 for none"});
  t.add("training.skip_loss_spikes", c.training.skip_loss_spikes,
        "a step that is a spike twice is left out, and the run goes on with the next batch");
  t.add("training.steps", c.training.steps, "optimizer steps of the whole run", above_zero());
  t.add("training.dtype", c.training.dtype, {{"float32", DType::kFloat32}}, "type of master weights and gradients");
  t.add("training.mixed_precision_param", c.training.mixed_precision_param,
        {{"bfloat16", DType::kBFloat16}, {"float32", DType::kFloat32}}, "type that layers compute in");
  t.add("training.mixed_precision_reduce", c.training.mixed_precision_reduce,
        {{"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}},
        "type in which the ranks of an FSDP group send each other their gradients of a unit; the sum is float32 with "
        "both, and bfloat16 sends half of the bytes");
  t.add("training.device", c.training.device,
        {{"auto", DeviceChoice::kAuto}, {"cpu", DeviceChoice::kCpu}, {"cuda", DeviceChoice::kCuda}},
        "where to compute; auto: on GPUs, if each rank of the machine has one, else on CPUs");
  t.add(
      "training.num_threads", c.training.num_threads,
      "CPU threads of a rank; 0: OMP_NUM_THREADS, or else the cores that the rank may run on, divided by the ranks of "
      "the node that may run on the same ones",
      NumberRange{.lowest = 0.0, .highest = 4096.0, .expected = "0 (from the cores) to 4096"});
}

void add_parallelism_keys(ConfigTable& t, JobConfig& c) {
  auto& p = c.parallelism;
  t.add("parallelism.data_parallel_replicate_degree", p.data_parallel_replicate_degree,
        "ranks that hold copies of the same weights");
  t.add("parallelism.data_parallel_shard_degree", p.data_parallel_shard_degree,
        "ranks that the weights are cut over; -1: all that the other axes leave");
  t.add("parallelism.fsdp_reshard_after_forward", p.fsdp_reshard_after_forward,
        {{"default", "default"}, {"always", "always"}, {"never", "never"}}, "free gathered weights after the forward");
  t.add("parallelism.tensor_parallel_degree", p.tensor_parallel_degree, "ranks that a layer's matrices are cut over");
  t.add("parallelism.pipeline_parallel_degree", p.pipeline_parallel_degree, "ranks that the layers are cut over");
  t.add("parallelism.pipeline_parallel_schedule", p.pipeline_parallel_schedule,
        "1F1B, Interleaved1F1B, ZBVZeroBubble or DualPipeV (docs/pipeline-schedules.md)");
  t.add(
      "parallelism.pipeline_parallel_max_deferred", p.pipeline_parallel_max_deferred,
      "backwards whose weight gradients a rank may defer at once, in ZBVZeroBubble and DualPipeV; 0: any number. More "
      "take more memory, and make the bubble smaller",
      NumberRange{.lowest = 0.0, .highest = 1e6, .expected = "0 (any number) to 1000000"});
  t.add("parallelism.pipeline_parallel_expert_parallel_overlap", p.pipeline_parallel_expert_parallel_overlap,
        "run the forwards and backwards that DualPipeV pairs in turns, so that one computes while the other's tokens "
        "are between ranks; takes more scratch memory; on GPUs only where tokens cross between domains");
  t.add(
      "parallelism.pipeline_parallel_reduce_gradients", p.pipeline_parallel_reduce_gradients,
      {{"step", "step"}, {"micro_batch", "micro_batch"}},
      "when a pipeline's ranks sum the gradients of sharded units: step (once, which takes float32 gradients of whole "
      "units) or micro_batch (after each backward, which sends as many times as much as there are micro-batches)");
  t.add("parallelism.pipeline_parallel_microbatch_size", p.pipeline_parallel_microbatch_size,
        "sequences per micro-batch of a pipeline: training.local_batch_size is cut into micro-batches of this size",
        above_zero());
  t.add("parallelism.pipeline_parallel_layers_per_stage", p.pipeline_parallel_layers_per_stage,
        "layers of a stage, which gives the number of stages; -1: stages of about the same cost, as few as the "
        "schedule takes",
        NumberRange{
            .lowest = 1.0, .special = -1.0, .expected = "a number above 0, or -1 for stages of about the same cost"});
  t.add("parallelism.pipeline_parallel_first_stage_less_layers", p.pipeline_parallel_first_stage_less_layers,
        "with layers_per_stage: layers that the embedding counts for");
  t.add("parallelism.pipeline_parallel_last_stage_less_layers", p.pipeline_parallel_last_stage_less_layers,
        "with layers_per_stage: layers that norm and output count for");
  t.add("parallelism.module_fqns_per_model_part", p.module_fqns_per_model_part,
        "modules of each stage (tok_embeddings, layers.0, ..., norm, output); []: cut by the keys above");
  t.add("parallelism.context_parallel_degree", p.context_parallel_degree, "ranks that a sequence is cut over");
}

void add_expert_parallelism_keys(ConfigTable& t, JobConfig& c) {
  auto& p = c.parallelism;
  t.add("parallelism.expert_parallel_degree", p.expert_parallel_degree,
        "ranks that the experts are cut over, out of shard x context x tensor");
  t.add("parallelism.expert_tensor_parallel_degree", p.expert_tensor_parallel_degree,
        "ranks that an expert's matrices are cut over: 1, experts stay whole");
  t.add("parallelism.expert_parallel_comm_backend", p.expert_parallel_comm_backend, dispatch_backends(),
        dispatch_backends_help());
  const std::vector<std::pair<std::string, PayloadPrecision>> payloads = {{"default", PayloadPrecision::kDefault},
                                                                          {"mxfp8", PayloadPrecision::kMxfp8}};
  t.add("parallelism.expert_parallel_a2a_dispatch_fwd_precision", p.expert_parallel_a2a_dispatch_fwd_precision,
        payloads, "what tokens cross to their experts in; default: the type that layers compute in");
  t.add("parallelism.expert_parallel_a2a_combine_bwd_precision", p.expert_parallel_a2a_combine_bwd_precision, payloads,
        "the same for the gradients of the experts' outputs");
  t.add("parallelism.expert_parallel_capacity_factor", p.expert_parallel_capacity_factor,
        "rows that a rank's experts have room for, as a multiple of a balanced load's; 0: any load. More are "
        "worked off in rounds",
        NumberRange{.lowest = 1.0,
                    .highest = 1e6,
                    .special = 0.0,
                    .expected = "0 (room for any load), or at least 1, a balanced load's"});
  t.add("parallelism.expert_parallel_overlap", p.expert_parallel_overlap,
        "without a pipeline, run a micro-batch's forward and the backward of the one before in turns, so that one "
        "computes while the other's tokens are between ranks; keeps the activations of two micro-batches. With "
        "DualPipeV, lets GPUs run passes in turns within a domain, too");
  t.add("parallelism.expert_parallel_num_sms", p.expert_parallel_num_sms,
        "a GPU's multiprocessors that a dispatch or combine by direct stores takes",
        NumberRange{.lowest = 2.0, .highest = 128.0, .expected = "2 to 128: some store, some work on what comes"});
  t.add("parallelism.expert_parallel_ranks_per_domain", p.expert_parallel_ranks_per_domain,
        "neighbours that direct stores are made between, linked by NVLink or of one node; tokens for others are "
        "forwarded once per domain. 0: those of a node");
}

void add_validation_keys(ConfigTable& t, JobConfig& c) {
  t.add("validation.enable", c.validation.enable, "evaluate on the validation split during training");
  t.add("validation.dataset_path", c.validation.dataset_path, "its folder; empty: training.dataset_path");
  t.add("validation.dataset", c.validation.dataset, "as training.dataset, with validation.dataset_path");
  t.add("validation.local_batch_size", c.validation.local_batch_size,
        "-1 or training.local_batch_size, which validation uses");
  t.add("validation.seq_len", c.validation.seq_len, "-1 or training.seq_len, which validation uses");
  t.add("validation.freq", c.validation.freq, "steps between validations");
  t.add("validation.steps", c.validation.steps,
        "global batches per validation: the split's first steps * training.global_batch_size sequences, on any mesh");
}

void add_checkpoint_keys(ConfigTable& t, JobConfig& c) {
  t.add("checkpoint.enable", c.checkpoint.enable, "save checkpoints, and resume from the last one");
  t.add("checkpoint.folder", c.checkpoint.folder, "folder of checkpoints under job.dump_folder");
  t.add("checkpoint.interval", c.checkpoint.interval, "steps between checkpoints; the last step always makes one");
  t.add("checkpoint.keep_latest_k", c.checkpoint.keep_latest_k, "checkpoints that stay; 0: all");
  t.add("checkpoint.last_save_model_only", c.checkpoint.last_save_model_only,
        "the checkpoint of the last step holds the weights alone; no run can go on from it");
  t.add("checkpoint.load_step", c.checkpoint.load_step, "step to resume from; -1: the last");
  t.add("checkpoint.fallback", c.checkpoint.fallback,
        "pass over a last checkpoint that is damaged, with a warning, and resume from the newest whole one");
  t.add(
      "checkpoint.async_mode", c.checkpoint.async_mode,
      {{"disabled", AsyncMode::kDisabled}, {"async", AsyncMode::kAsync}, {"async_with_pinned_mem", AsyncMode::kAsync}},
      "write checkpoints while training goes on, from a copy in memory");
  t.add("checkpoint.memory_interval", c.checkpoint.memory_interval,
        "steps between copies of the state in job.node_folder, of which another node holds a second one; 0: none",
        zero_or_more());
  t.add("checkpoint.verify_interval", c.checkpoint.verify_interval,
        "steps between comparisons of the state that replicas share (as Megatron's "
        "check_weight_hash_across_dp_replicas_interval), also before every save; a difference ends the run. 0: never",
        zero_or_more());
  t.add("checkpoint.initial_load_path", c.checkpoint.initial_load_path,
        "checkpoint whose weights a run without checkpoints of its own starts from");
  t.add("checkpoint.initial_load_in_hf", c.checkpoint.initial_load_in_hf,
        "that is a folder of Hugging Face files, in float32, bfloat16 or FP8");
}

void add_metrics_and_profiling_keys(ConfigTable& t, JobConfig& c) {
  t.add("metrics.log_freq", c.metrics.log_freq, "steps between lines of metrics", above_zero());
  t.add("metrics.enable_tensorboard", c.metrics.enable_tensorboard, "write event files for TensorBoard");
  t.add("metrics.save_tb_folder", c.metrics.save_tb_folder, "their folder under job.dump_folder");
  t.add("metrics.peak_tflops", c.metrics.peak_tflops,
        "the device's highest TFLOP/s, for MFU; 0: unknown, no MFU, but for GPUs whose rate is known", zero_or_more());
  t.add("metrics.prometheus_port", c.metrics.prometheus_port,
        "rank 0 serves its metrics to Prometheus at this port; 0: it does not",
        NumberRange{.lowest = 0.0, .highest = 65535.0, .expected = "a port from 1 to 65535, or 0 for none"});
  t.add("metrics.prometheus_address", c.metrics.prometheus_address,
        "address of rank 0's machine that it listens on; 0.0.0.0: all, for a Prometheus on another machine");

  t.add("metrics.quantization_error_freq", c.metrics.quantization_error_freq,
        "steps between measurements of every low-precision module's quantization error, also after the first and the "
        "last; 0: never",
        zero_or_more());

  t.add("profiling.enable_profiling", c.profiling.enable_profiling, "write Chrome traces of some steps");
  t.add("profiling.save_traces_folder", c.profiling.save_traces_folder, "their folder under job.dump_folder");
  t.add("profiling.profile_freq", c.profiling.profile_freq, "steps between traced steps");
}

void add_comm_and_debug_keys(ConfigTable& t, JobConfig& c) {
  t.add("comm.init_timeout_seconds", c.comm.init_timeout_seconds, "time that ranks may take to come to the first step",
        above_zero());
  t.add("comm.train_timeout_seconds", c.comm.train_timeout_seconds,
        "time after which an operation between ranks has failed, and the run ends", above_zero());

  t.add("debug.seed", c.debug.seed, "seed of initialisation and of the data's order");
  t.add("debug.deterministic", c.debug.deterministic,
        "the same bits in every run on a GPU as well, for some speed (a CPU's always are)");
  t.add("debug.moe_force_load_balance", c.debug.moe_force_load_balance,
        "token t's k-th expert is (t * top_k + k) mod num_experts");
  t.add("debug.nan_at_step", c.debug.nan_at_step, "for tests of recovery: a gradient of this step is NaN; 0: none",
        zero_or_more());
  t.add("debug.nan_count", c.debug.nan_count,
        "how many times in a process: 1, and the step is finite when it is made again; 2, and it is not",
        zero_or_more());
  t.add("debug.nan_on_rank", c.debug.nan_on_rank, "the rank whose gradient it is; -1: every rank's",
        NumberRange{.lowest = -1.0, .expected = "a rank, or -1 for every rank"});
  t.add("debug.nan_on_host", c.debug.nan_on_host, "only on the machine of this name; empty: on any");
}

}  // namespace

ConfigTable config_table(JobConfig& c) {
  ConfigTable t;
  add_job_keys(t, c);
  add_model_keys(t, c);
  add_optimizer_keys(t, c);
  add_training_keys(t, c);
  add_parallelism_keys(t, c);
  add_expert_parallelism_keys(t, c);
  t.add("quantize.keep_weights", c.quantize.keep_weights,
        "keep the weights' copies in low precision until the next optimizer step; false: quantize a unit's weights "
        "before each of its passes, which takes little memory and more time");
  add_recipe_keys(t, std::string(kLinearConverter), c.quantize_mx.linear, true);
  add_recipe_keys(t, std::string(kGroupedConverter), c.quantize_mx.grouped_mm, false);
  t.add("activation_checkpoint.mode", c.activation_checkpoint.mode, recompute_modes(),
        "activations that the backward computes again");
  add_validation_keys(t, c);
  add_checkpoint_keys(t, c);
  add_metrics_and_profiling_keys(t, c);
  add_comm_and_debug_keys(t, c);
  pass_over_torchtitan_keys(t);
  return t;
}

}  // namespace tessera
