#include "config/job_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "model/model.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string error_of(const std::string& toml, const std::vector<std::string>& overrides = {},
                     std::int64_t num_ranks = 1) {
  try {
    const JobConfig config = parse_job_config(toml, overrides);
    config.validate();
    config.validate_on(resolve(config.mesh_degrees(), num_ranks));
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(JobConfig, FlavorThenArgsThenOverrides) {
  const JobConfig config = parse_job_config("[model]\nflavor = \"671B\"\n[model.args]\nn_layers = 4\n",
                                            {"--model.args.n_dense_layers=1", "--training.steps=7"});
  EXPECT_EQ(config.model.args.dim, 7168);
  EXPECT_EQ(config.model.args.n_layers, 4);
  EXPECT_EQ(config.model.args.n_dense_layers, 1);
  EXPECT_EQ(config.training.steps, 7);
  EXPECT_TRUE(config.model.args.route_norm);
}

TEST(JobConfig, PrintedConfigReadsBack) {
  JobConfig config =
      parse_job_config("", {"--model.flavor=16B", "--optimizer.lr=0.00022", "--job.description=a \"b\""});
  const std::string text = config_table(config).to_toml();
  JobConfig again = parse_job_config(text);
  EXPECT_EQ(config_table(again).to_toml(), text);
}

TEST(JobConfig, UnknownKeysNameTheNearest) {
  EXPECT_THAT(error_of("[training]\nstep = 3\n"),
              AllOf(HasSubstr("training.step"), HasSubstr("'training.steps'"), HasSubstr(":2")));
  EXPECT_THAT(error_of("", {"--optimiser.lr=1"}), HasSubstr("'optimizer.lr'"));
  EXPECT_THAT(error_of("[training]\n\"step\\u001b[2J\" = 3\n"), HasSubstr("'training.step\\x1b[2J'"));
  EXPECT_THAT(error_of("[optimizer]\nseq_len = 3\n"), HasSubstr("'training.seq_len'"));
}

TEST(JobConfig, NumbersThatCannotWork) {
  EXPECT_THAT(error_of("", {"--model.args.top_k=9"}), AllOf(HasSubstr("top_k is 9"), HasSubstr("num_experts = 8")));
  EXPECT_THAT(error_of("", {"--model.args.n_expert_groups=3", "--model.args.n_limited_groups=1"}),
              HasSubstr("do not divide"));
  EXPECT_THAT(error_of("", {"--model.args.n_expert_groups=4", "--model.args.n_limited_groups=1"}),
              HasSubstr("hold only 2"));
  EXPECT_THAT(error_of("", {"--model.args.n_limited_groups=2"}), HasSubstr("n_expert_groups is 0"));
  EXPECT_THAT(error_of("", {"--model.args.beta_fast=1", "--model.args.beta_slow=32"}),
              HasSubstr("beta_slow is 32; expected at most beta_fast = 1"));
  EXPECT_THAT(error_of("", {"--training.steps=0"}), HasSubstr("training.steps is 0"));
  EXPECT_THAT(error_of("", {"--optimizer.eps=1e-46"}), HasSubstr("at least 1.2e-38"));  // it is 0 in float32
  EXPECT_THAT(error_of("", {"--training.local_batch_size=1", "--training.seq_len=2147483648"}),
              HasSubstr("make training.seq_len smaller"));
  // These would overflow in a product with the number of ranks.
  EXPECT_THAT(error_of("", {"--training.local_batch_size=4611686018427387904"}), HasSubstr("1 to 1000000000"));
  EXPECT_THAT(error_of("", {"--training.global_batch_size=9223372036854775807"}), HasSubstr("1 to 1000000000"));
  EXPECT_THAT(error_of("", {"--training.local_batch_size=3", "--training.global_batch_size=4"}),
              HasSubstr("not a multiple"));
  EXPECT_THAT(error_of("", {"--model.args.qk_rope_head_dim=7"}), HasSubstr("even"));
  EXPECT_THAT(error_of("", {"--model.args.n_heads=1048576", "--model.args.v_head_dim=1048576",
                            "--model.args.kv_lora_rank=16777216"}),
              HasSubstr("more than 2^50 parameters"));
  EXPECT_THAT(error_of("", {"--optimizer.beta2=0.999", "--optimizer.state_dtype=bfloat16"}),
              AllOf(HasSubstr("optimizer.beta2 is 0.999"), HasSubstr("at most 0.98")));
  EXPECT_THAT(error_of("", {"--model.flavor=17B"}), AllOf(HasSubstr("17B"), HasSubstr("671B")));
  EXPECT_THAT(error_of("", {"--training.steps=many"}), HasSubstr("'many'"));
  EXPECT_THAT(error_of("[training]\nsteps = \"many\"\n"), HasSubstr("integer"));
  EXPECT_THAT(error_of("[training\n"), HasSubstr("config:1"));
  EXPECT_THAT(error_of("", {"--lr_scheduler.decay_type=step"}), HasSubstr("linear, sqrt, cosine"));
  for (const auto& [name, type] :
       {std::pair{"linear", DecayType::kLinear}, {"sqrt", DecayType::kSqrt}, {"cosine", DecayType::kCosine}}) {
    const std::string given = fmt::format("--lr_scheduler.decay_type={}", name);
    EXPECT_EQ(parse_job_config("", {given}).lr_scheduler.decay_type, type) << name;
  }
  for (const char* number :
       {"optimizer.lr=inf", "optimizer.eps=inf", "optimizer.weight_decay=nan", "model.args.load_balance_coeff=nan",
        "model.args.load_balance_coeff=-0.001", "model.args.seq_balance_loss_coeff=-1.0",
        "model.args.mtp_loss_weight=inf", "lr_scheduler.total_steps=-1", "lr_scheduler.decay_ratio=-0.5"}) {
    const std::string text = number, key = text.substr(0, text.find('='));
    EXPECT_THAT(error_of("", {"--" + text}), HasSubstr(key + " is "));
  }
  // The step of a validation or a checkpoint matters only if there are any.
  for (const auto& [feature, number] : {std::pair{"validation", "freq=0"},
                                        {"validation", "steps=0"},
                                        {"checkpoint", "interval=0"},
                                        {"checkpoint", "keep_latest_k=-1"}}) {
    const std::string text = number, key = fmt::format("{}.{}", feature, text.substr(0, text.find('=')));
    const std::string given = fmt::format("--{}.{}", feature, number);
    EXPECT_THAT(error_of("", {fmt::format("--{}.enable", feature), given}), HasSubstr(key + " is "));
    EXPECT_EQ(error_of("", {given}), "no error");
  }
  EXPECT_THAT(error_of("", {"--checkpoint.memory_interval=5"}),
              AllOf(HasSubstr("memory_interval is 5"), HasSubstr("checkpoint.enable is false")));
  EXPECT_EQ(error_of("", {"--checkpoint.memory_interval=5", "--checkpoint.enable"}), "no error");
  EXPECT_THAT(error_of("", {"--training.skip_loss_spikes"}), HasSubstr("training.max_loss_spike = 0"));
  EXPECT_EQ(error_of("", {"--training.skip_loss_spikes", "--training.max_loss_spike=3"}), "no error");
  EXPECT_THAT(error_of("", {"--training.dtype=bfloat16"}), HasSubstr("expected one of float32"));
  EXPECT_THAT(error_of("", {"--parallelism.fsdp_reshard_after_forward=sometimes"}),
              HasSubstr("expected one of default, always, never"));
  EXPECT_EQ(error_of("", {"--training.max_norm=inf"}), "no error");
  EXPECT_THAT(error_of("", {"--model.args.n_layers=100000"}), HasSubstr("n_layers is 100000; expected at most 1024"));
  EXPECT_THAT(error_of("", {"--checkpoint.enable", "--checkpoint.load_step=-2"}), HasSubstr("load_step is -2"));
  EXPECT_THAT(error_of("", {"--checkpoint.load_step=5"}),
              AllOf(HasSubstr("load_step is 5"), HasSubstr("checkpoint.enable is false")));
  EXPECT_THAT(error_of("", {"--parallelism.expert_parallel_capacity_factor=inf"}), HasSubstr("capacity_factor is inf"));
  // The batch size counts tokens, although sequences are meant.
  EXPECT_THAT(error_of("", {"--training.local_batch_size=1", "--training.global_batch_size=62914560"}),
              AllOf(HasSubstr("training.global_batch_size = 62914560"), HasSubstr("1048576")));
}

// The error about a degree that does not divide a size names the key and the nearest values that would work.
TEST(JobConfig, MeshesThatCannotCut) {
  const auto error = [](const std::vector<std::string>& overrides, std::int64_t num_ranks) {
    return error_of("", overrides, num_ranks);
  };
  EXPECT_THAT(error({"--parallelism.tensor_parallel_degree=3"}, 8),
              AllOf(HasSubstr("tensor_parallel_degree is 3"), HasSubstr("number of ranks, 8"), HasSubstr("2 and 4")));
  EXPECT_THAT(
      error({"--parallelism.tensor_parallel_degree=4", "--model.args.n_heads=6"}, 4),
      AllOf(HasSubstr("tensor_parallel_degree is 4"), HasSubstr("n_heads = 6"), HasSubstr("nearest possible: 2")));
  EXPECT_THAT(error({"--parallelism.tensor_parallel_degree=4", "--model.args.vocab_size=2049"}, 4),
              AllOf(HasSubstr("vocab_size = 2049"), HasSubstr("nearest possible: 1")));
  EXPECT_THAT(error({"--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=4",
                     "--training.seq_len=250"},
                    8),
              AllOf(HasSubstr("seq_len is 250"), HasSubstr("context_parallel_degree = 2"), HasSubstr("240 and 256")));
  EXPECT_THAT(error({"--parallelism.expert_parallel_degree=3"}, 4), HasSubstr("expert_parallel_degree is 3"));
  EXPECT_THAT(
      error({"--parallelism.expert_parallel_degree=4", "--model.args.num_experts=6"}, 4),
      AllOf(HasSubstr("expert_parallel_degree is 4"), HasSubstr("num_experts = 6"), HasSubstr("nearest possible: 2")));
  const std::vector<std::string> pipeline = {"--parallelism.pipeline_parallel_degree=4",
                                             "--training.local_batch_size=1", "--training.global_batch_size=8"};
  const auto pipeline_error = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides = pipeline;
    overrides.insert(overrides.end(), more.begin(), more.end());
    return error(overrides, 4);
  };
  EXPECT_EQ(pipeline_error({}), "no error");
  EXPECT_THAT(pipeline_error({"--model.args.n_layers=3"}), HasSubstr("layers"));
  EXPECT_THAT(pipeline_error({"--parallelism.pipeline_parallel_schedule=GPipe"}), HasSubstr("DualPipeV"));
  EXPECT_THAT(pipeline_error({"--parallelism.pipeline_parallel_schedule=DualPipeV", "--model.args.n_layers=8",
                              "--training.global_batch_size=7"}),
              AllOf(HasSubstr("pipeline_parallel_degree is 4"), HasSubstr("micro-batches is 7, expected 8"),
                    HasSubstr("training.global_batch_size")));
  EXPECT_THAT(pipeline_error({"--parallelism.pipeline_parallel_layers_per_stage=3"}),
              AllOf(HasSubstr("pipeline_parallel_degree is 4"), HasSubstr("3 stages")));
  const std::string reduce = "--parallelism.pipeline_parallel_reduce_gradients=";
  EXPECT_THAT(pipeline_error({reduce + "always"}), HasSubstr("expected one of step, micro_batch"));
  EXPECT_EQ(pipeline_error({reduce + "micro_batch"}), "no error");
  EXPECT_THAT(pipeline_error({reduce + "micro_batch", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
                              "--model.args.n_layers=8"}),
              AllOf(HasSubstr("ZBVZeroBubble"), HasSubstr("expected step")));
  EXPECT_THAT(pipeline_error({"--model.args.num_mtp_modules=1"}),
              AllOf(HasSubstr("num_mtp_modules is 1"), HasSubstr("ZBVZeroBubble")));
  const std::vector<std::string> overlap = {"--parallelism.expert_parallel_overlap", "--model.args.num_mtp_modules=1",
                                            "--parallelism.expert_parallel_degree=2"};
  EXPECT_THAT(error(overlap, 2), AllOf(HasSubstr("expert_parallel_overlap is true"), HasSubstr("num_mtp_modules is 1"),
                                       HasSubstr("DualPipeV")));
  EXPECT_EQ(error({overlap[0], overlap[1]}, 2), "no error") << "without expert parallelism it has no effect";
  EXPECT_EQ(error({"--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=4"}, 8),
            "no error");
}

TEST(JobConfig, StagesOfAPipeline) {
  const JobConfig config = parse_job_config(R"(
[parallelism]
pipeline_parallel_layers_per_stage = 2
pipeline_parallel_last_stage_less_layers = 0
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "output"]]
)");
  EXPECT_EQ(config.parallelism.pipeline_parallel_layers_per_stage, 2);
  EXPECT_EQ(config.parallelism.pipeline_parallel_first_stage_less_layers, 1);
  EXPECT_EQ(config.parallelism.pipeline_parallel_last_stage_less_layers, 0);
  EXPECT_EQ(config.parallelism.module_fqns_per_model_part,
            (ConfigTable::Lists{{"tok_embeddings", "layers.0"}, {"norm", "output"}}));
  for (const char* value : {"0", "-2"}) {
    EXPECT_THAT(error_of("", {fmt::format("--parallelism.pipeline_parallel_layers_per_stage={}", value)}),
                AllOf(HasSubstr(fmt::format("layers_per_stage is {}", value)), HasSubstr("-1")));
  }
  EXPECT_THAT(error_of("", {"--parallelism.pipeline_parallel_first_stage_less_layers=-1"}),
              AllOf(HasSubstr("first_stage_less_layers is -1"), HasSubstr("0 to model.args.n_layers = 6")));
  EXPECT_THAT(error_of("", {"--parallelism.pipeline_parallel_last_stage_less_layers=7"}),
              HasSubstr("last_stage_less_layers is 7"));
}

/// Counts the parameters of a flavor from their specs alone, which takes no memory.
ParameterCounts counts_of(const char* flavor) {
  const Model model(model_flavor(flavor), {.seq_len = 16});
  return model.count_parameters();
}

TEST(Flavors, ParameterCounts) {
  const ParameterCounts counts = counts_of("16B");
  EXPECT_EQ(counts.dense, 858'385'920);
  EXPECT_EQ(counts.sparse, 14'848'098'304);
  EXPECT_EQ(counts.active, 2'661'150'208);
  // TorchTitan counts 21.5 GFLOP per token at 8192.
  EXPECT_NEAR(flop_per_token(model_flavor("16B"), counts, 8192) * 1e-9, 21.5, 0.05);
  EXPECT_NEAR(static_cast<double>(counts_of("236B").total) * 1e-9, 236.0, 1.0);
  EXPECT_NEAR(static_cast<double>(counts_of("671B").total) * 1e-9, 671.0, 1.0);
}

/// Checks choices in the models' published configurations that the number of parameters does not show.
TEST(Flavors, PublishedChoices) {
  const ModelConfig small = model_flavor("16B"), middle = model_flavor("236B"), large = model_flavor("671B");
  for (const ModelConfig& config : {small, middle}) {
    EXPECT_EQ(config.score_func, ScoreFunction::kSoftmax);
    EXPECT_FALSE(config.route_norm);
    EXPECT_EQ(config.top_k, 6);
  }
  EXPECT_EQ(small.route_scale, 1.0f);
  EXPECT_EQ(small.n_expert_groups, 0);
  EXPECT_EQ(small.mscale, 0.7f);
  EXPECT_EQ(middle.route_scale, 16.0f);
  EXPECT_EQ(middle.n_expert_groups, 8);
  EXPECT_EQ(middle.n_limited_groups, 3);
  EXPECT_EQ(middle.mscale, 1.0f);
  EXPECT_EQ(large.score_func, ScoreFunction::kSigmoid);
  EXPECT_TRUE(large.route_norm);
  EXPECT_EQ(large.top_k, 8);
  EXPECT_EQ(large.route_scale, 2.5f);
  EXPECT_EQ(large.n_expert_groups, 8);
  EXPECT_EQ(large.n_limited_groups, 4);
  EXPECT_EQ(large.mscale, 1.0f);
  for (const ModelConfig& config : {small, middle, large}) {
    EXPECT_EQ(config.rope_theta, 10000.0f);
    EXPECT_EQ(config.rope_factor, 40.0f);
    EXPECT_EQ(config.original_seq_len, 4096);
  }
}

TEST(JobConfig, ExpertParallelism) {
  const auto on_8_ranks = [](const std::vector<std::string>& overrides) {
    try {
      const JobConfig config = parse_job_config("", overrides);
      config.validate();
      config.validate_on(resolve(config.mesh_degrees(), 8));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(on_8_ranks({"--parallelism.expert_parallel_degree=4", "--parallelism.expert_parallel_comm_backend=direct",
                        "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
                        "--parallelism.expert_parallel_capacity_factor=1.5"}),
            "no error");
  EXPECT_THAT(on_8_ranks({"--parallelism.expert_parallel_degree=8", "--model.args.num_experts=12"}),
              AllOf(HasSubstr("parallelism.expert_parallel_degree is 8, which does not divide"),
                    HasSubstr("num_experts = 12"), HasSubstr("nearest possible: 4")));
  EXPECT_THAT(on_8_ranks({"--parallelism.expert_parallel_comm_backend=hybridep"}),
              AllOf(HasSubstr("hybridep"), HasSubstr("standard"), HasSubstr("direct"), HasSubstr("deepep")));
  for (const char* key : {"dispatch_fwd", "combine_bwd"}) {
    EXPECT_THAT(
        on_8_ranks({fmt::format("--parallelism.expert_parallel_a2a_{}_precision=mxfp8", key), "--model.args.dim=200"}),
        AllOf(HasSubstr(key), HasSubstr("dim = 200"), HasSubstr("multiple of 32")));
  }
  EXPECT_THAT(on_8_ranks({"--parallelism.expert_parallel_capacity_factor=0.9"}),
              AllOf(HasSubstr("capacity_factor is 0.9"), HasSubstr("at least 1")));
  EXPECT_THAT(on_8_ranks({"--parallelism.expert_parallel_num_sms=1"}),
              AllOf(HasSubstr("expert_parallel_num_sms is 1"), HasSubstr("2 to 128")));
  // Only the backend "direct" has domains. With "standard" the key has no effect.
  const std::string domains = "--parallelism.expert_parallel_ranks_per_domain=";
  const std::vector<std::string> ep8 = {"--parallelism.expert_parallel_degree=8",
                                        "--parallelism.expert_parallel_comm_backend=direct", domains + "3"};
  EXPECT_THAT(on_8_ranks(ep8),
              AllOf(HasSubstr("parallelism.expert_parallel_ranks_per_domain is 3"), HasSubstr("2 and 4")));
  EXPECT_EQ(on_8_ranks({ep8[0], domains + "3"}), "no error");
  const JobConfig in_domains = parse_job_config("", {ep8[0], ep8[1], domains + "4"});
  EXPECT_EQ(resolve(in_domains.mesh_degrees(), 8).num_ep_domains(), 2);
  EXPECT_THAT(on_8_ranks({"--parallelism.expert_tensor_parallel_degree=2"}),
              AllOf(HasSubstr("expert_tensor_parallel_degree is 2"), HasSubstr("expected 1")));
}

/// Every key of TorchTitan v0.2.1's configuration.
const char* const kTorchTitanKeys = R"(
job.config_file job.dump_folder job.description job.print_config job.save_config_file job.custom_config_module
profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq profiling.profiler_active
profiling.profiler_warmup profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder
metrics.log_freq metrics.enable_tensorboard metrics.disable_color_printing metrics.save_tb_folder
metrics.save_for_all_ranks metrics.enable_wandb
model.name model.flavor model.hf_assets_path model.tokenizer_path model.converters model.print_after_conversion
optimizer.name optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
optimizer.implementation optimizer.early_step_in_backward
lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio lr_scheduler.decay_type
lr_scheduler.min_lr_factor
training.dataset training.dataset_path training.local_batch_size training.global_batch_size training.seq_len
training.max_norm training.steps training.enable_cpu_offload training.dtype training.mixed_precision_param
training.mixed_precision_reduce training.gc_freq training.gc_debug training.dataloader.num_workers
training.dataloader.persistent_workers training.dataloader.pin_memory training.dataloader.prefetch_factor
parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
parallelism.fsdp_reshard_after_forward parallelism.tensor_parallel_degree parallelism.disable_loss_parallel
parallelism.enable_async_tensor_parallel parallelism.pipeline_parallel_degree parallelism.module_fqns_per_model_part
parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers
parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_schedule
parallelism.pipeline_parallel_schedule_csv parallelism.pipeline_parallel_microbatch_size
parallelism.pipeline_parallel_expert_parallel_overlap parallelism.context_parallel_degree
parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree parallelism.expert_parallel_comm_backend
checkpoint.enable checkpoint.enable_ft_dataloader_checkpoints checkpoint.folder checkpoint.interval
checkpoint.initial_load_path checkpoint.initial_load_model_only checkpoint.initial_load_in_hf
checkpoint.initial_load_in_hf_quantized checkpoint.last_save_model_only checkpoint.last_save_in_hf
checkpoint.export_dtype checkpoint.async_mode checkpoint.keep_latest_k checkpoint.load_step
checkpoint.exclude_from_loading checkpoint.enable_first_step_checkpoint checkpoint.create_seed_checkpoint
checkpoint.load_only
activation_checkpoint.mode activation_checkpoint.selective_ac_option
activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.early_stop
activation_checkpoint.memory_budget activation_checkpoint.visualize_memory_budget_pareto
activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check activation_checkpoint.debug
compile.enable compile.components compile.backend
quantize.linear.float8.enable_fsdp_float8_all_gather quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
quantize.linear.float8.recipe_name quantize.linear.float8.filter_fqns quantize.linear.float8.emulate
quantize.grouped_mm.float8.fqns quantize.linear.mx.mxfp8_dim1_cast_kernel_choice quantize.linear.mx.recipe_name
quantize.linear.mx.filter_fqns quantize.grouped_mm.mx.recipe_name quantize.grouped_mm.mx.fqns
comm.init_timeout_seconds comm.train_timeout_seconds comm.trace_buf_size comm.save_traces_folder
comm.save_traces_file_prefix comm.mode
memory_estimation.enable memory_estimation.disable_fake_mode
fault_tolerance.enable fault_tolerance.process_group fault_tolerance.process_group_timeout_ms
fault_tolerance.replica_id fault_tolerance.group_size fault_tolerance.min_replica_size fault_tolerance.semi_sync_method
experimental.custom_import experimental.custom_args_module
validation.enable validation.dataset validation.dataset_path validation.local_batch_size validation.seq_len
validation.freq validation.steps validation.dataloader.num_workers
debug.seed debug.deterministic debug.deterministic_warn_only debug.moe_force_load_balance
)";

/// Returns whether the guide has the key as a whole, or its name in the chapter of its section.
bool is_documented(const std::string& guide, const std::string& key) {
  const std::size_t dot = key.find('.');
  if (guide.find("`" + key) != guide.npos) return true;
  const std::size_t chapter = guide.find("### [" + key.substr(0, dot) + "]\n");
  if (chapter == guide.npos) return false;
  const std::size_t end = guide.find("\n#", chapter);
  return guide.substr(chapter, end - chapter).find("`" + key.substr(dot + 1)) != guide.npos;
}

TEST(TorchTitan, EveryKeyIsKnownAndDocumented) {
  const std::string guide = read_text_file(std::string(TESSERA_TEST_DATA) + "/../docs/from-torchtitan.md");
  std::istringstream keys(kTorchTitanKeys);
  int count = 0;
  for (std::string key; keys >> key; ++count) {
    EXPECT_TRUE(is_documented(guide, key)) << key << " is not in the guide";
    if (key == "job.config_file") continue;  // a key of the command line alone
    JobConfig config;
    try {
      config_table(config).apply_override("--" + key + "=[]");
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), Not(HasSubstr("unknown key")));
    }
  }
  EXPECT_GT(count, 120);
}

/// A file in the manner of TorchTitan's own. It has all keys that those files set, at demanding values.
constexpr std::string_view kTorchTitanFile = R"(
[job]
dump_folder = "./outputs"
print_config = false
[profiling]
save_memory_snapshot_folder = "memory_snapshot"
[model]
name = "deepseek_v3"
flavor = "16B"
hf_assets_path = "./assets/hf"
[optimizer]
name = "AdamW"
lr = 2.2e-4
[lr_scheduler]
warmup_steps = 2_000
decay_type = "cosine"
[training]
local_batch_size = 4
seq_len = 4096
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
enable_async_tensor_parallel = false
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
[checkpoint]
async_mode = "disabled"
export_dtype = "float32"
last_save_model_only = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["loss"]
[quantize.linear.float8]
filter_fqns = ["output", "router.gate"]
)";

// A key that would change results or memory is never ignored: either it works, or it is an error.
TEST(TorchTitan, NoKeyThatChangesResultsIsIgnored) {
  const auto error = [](const std::vector<std::string>& overrides) { return error_of("", overrides); };
  EXPECT_THAT(error({"--training.mixed_precision_reduce=float16"}),
              AllOf(HasSubstr("float16"), HasSubstr("float32"), HasSubstr("bfloat16")));
  for (const char* dtype : {"float32", "bfloat16"}) {
    EXPECT_EQ(error({fmt::format("--training.mixed_precision_reduce={}", dtype)}), "no error");
  }
  EXPECT_THAT(error({"--checkpoint.initial_load_model_only=false"}), HasSubstr("expected true"));
  EXPECT_EQ(error({"--checkpoint.initial_load_model_only"}), "no error");
  EXPECT_THAT(error({"--checkpoint.export_dtype=bfloat16"}),
              AllOf(HasSubstr("expected float32"), HasSubstr("--dtype")));
  EXPECT_THAT(error_of("[activation_checkpoint]\nselective_ac_option = 2\n"), HasSubstr("is 2; expected op"));
  EXPECT_EQ(error({"--activation_checkpoint.selective_ac_option=op"}), "no error");
  EXPECT_THAT(
      error_of(
          "[activation_checkpoint]\nper_op_sac_force_recompute_mm_shapes_by_fqns = [\"moe.router.gate\", \"wq\"]\n"),
      HasSubstr("is moe.router.gate,wq; expected moe.router.gate"));
  EXPECT_THAT(error({"--parallelism.context_parallel_rotate_method=alltoall"}), HasSubstr("expected allgather"));
  for (const char* key : {"parallelism.pipeline_parallel_schedule_csv=my.csv", "experimental.custom_import=mine",
                          "memory_estimation.enable", "model.tokenizer_path=assets"}) {
    EXPECT_THAT(error({fmt::format("--{}", key)}), HasSubstr("is not built"));
  }
  const std::string validates = "--validation.enable";
  EXPECT_THAT(error({validates, "--validation.seq_len=1024"}),
              AllOf(HasSubstr("validation.seq_len is 1024"), HasSubstr("training.seq_len = 2048")));
  EXPECT_THAT(error({validates, "--validation.local_batch_size=1"}), HasSubstr("training.local_batch_size = 8"));
  EXPECT_EQ(error({validates, "--validation.seq_len=2048", "--validation.local_batch_size=8"}), "no error");
  EXPECT_EQ(error({"--validation.seq_len=1024"}), "no error");
}

TEST(TorchTitan, ANameOfADatasetNeedsItsFolder) {
  const auto error = [](const std::vector<std::string>& overrides) {
    try {
      parse_job_config("[training]\ndataset = \"c4\"\n", overrides).require_data();
    } catch (const Error& thrown) {
      return std::string(thrown.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error({}), AllOf(HasSubstr("training.dataset is 'c4'"), HasSubstr("training.dataset_path")));
  EXPECT_EQ(error({"--training.dataset_path=data/c4"}), "no error");
  const std::string path = "--training.dataset_path=data/c4";
  EXPECT_THAT(error({path, "--validation.enable", "--validation.dataset=c4_validation"}),
              AllOf(HasSubstr("validation.dataset is 'c4_validation'"), HasSubstr("validation.dataset_path")));
  EXPECT_EQ(error({path, "--validation.dataset=c4_validation"}), "no error");
}

// With a pipeline, a local batch is cut into micro-batches, of one sequence by default. All micro-batches of a step go
// through one schedule.
TEST(TorchTitan, LocalBatchesOfPipelinesAreCutIntoMicroBatches) {
  const JobConfig published = parse_job_config(
      "", {"--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=64", "--training.seq_len=8192"});
  published.validate();
  EXPECT_EQ(published.micro_batch_size(), 1);
  EXPECT_EQ(published.sequences_per_step(128), 64 * 128);
  EXPECT_EQ(published.micro_batches_per_step(128), 64);
  EXPECT_EQ(published.pipeline_schedule(resolve(published.mesh_degrees(), 256)).num_micro_batches, 64);

  const std::vector<std::string> pairs = {"--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4",
                                          "--training.global_batch_size=16",
                                          "--parallelism.pipeline_parallel_microbatch_size=2"};
  const JobConfig accumulating = parse_job_config("", pairs);
  EXPECT_EQ(accumulating.micro_batches_per_step(2), 4);
  EXPECT_THAT(error_of("", {pairs[0], pairs[1], "--parallelism.pipeline_parallel_microbatch_size=3"}),
              AllOf(HasSubstr("training.local_batch_size = 4"), HasSubstr("microbatch_size = 3")));
  EXPECT_THAT(error_of("", {"--parallelism.pipeline_parallel_microbatch_size=0"}), HasSubstr("microbatch_size is 0"));
  // Without a pipeline the whole local batch is one micro-batch.
  EXPECT_EQ(parse_job_config("", {pairs[1], pairs[3]}).micro_batch_size(), 4);
}

TEST(TorchTitan, FilesAndTheRecipesFlagsLoad) {
  const JobConfig config = parse_job_config(
      kTorchTitanFile,
      {"--model.converters=quantize.grouped_mm.mx,quantize.linear.mx", "--quantize.grouped_mm.mx.fqns=experts",
       "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp",
       "--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil",
       "--quantize.linear.mx.filter_fqns=output,router.gate,wq,wkv,wo,feed_forward.w2,shared_experts",
       "--parallelism.expert_parallel_comm_backend=deepep", "--activation_checkpoint.mode=full", "--compile.enable",
       "--compile.components=model,loss", "--training.local_batch_size=64", "--debug.moe_force_load_balance",
       "--model.print_after_conversion", "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
       "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8"});
  EXPECT_EQ(config.model.args.n_layers, 27);
  EXPECT_EQ(config.lr_scheduler.warmup_steps, 2000);
  EXPECT_EQ(config.training.local_batch_size, 64);
  EXPECT_EQ(config.activation_checkpoint.mode, Recompute::kFull);
  EXPECT_EQ(config.parallelism.expert_parallel_degree, 8);
  EXPECT_EQ(config.parallelism.expert_parallel_comm_backend, DispatchBackend::kDirect);
  EXPECT_EQ(config.parallelism.expert_parallel_a2a_dispatch_fwd_precision, PayloadPrecision::kMxfp8);
  EXPECT_EQ(config.parallelism.expert_parallel_a2a_combine_bwd_precision, PayloadPrecision::kMxfp8);
  EXPECT_EQ(config.model.converters, (ConfigTable::List{"quantize.grouped_mm.mx", "quantize.linear.mx"}));
  EXPECT_EQ(config.quantize_mx.linear.fqns.size(), 7u);
  EXPECT_EQ(config.quantize_mx.linear.recipe, Recipe::kMxfp8CublasRceil);
  EXPECT_EQ(config.quantize_mx.grouped_mm.recipe, Recipe::kMxfp8WgradWithHp);
  EXPECT_TRUE(config.model.print_after_conversion);
  EXPECT_TRUE(config.debug.moe_force_load_balance);
}

TEST(TorchTitan, FeaturesThatAreNotBuiltAreErrors) {
  EXPECT_THAT(error_of("", {"--parallelism.data_parallel_shard_degree=4"}), HasSubstr("leave 1 of 1 ranks"));
  EXPECT_EQ(error_of("", {"--parallelism.data_parallel_shard_degree=1"}), "no error");
  EXPECT_EQ(error_of("", {"--checkpoint.async_mode=async_with_pinned_mem"}), "no error");
  EXPECT_THAT(error_of("[metrics]\nenable_wandb = true\n"), AllOf(HasSubstr(":2"), HasSubstr("Weights & Biases")));
}

}  // namespace
}  // namespace tessera
