"""Configurations of a small DeepSeek-V3 in TorchTitan 0.3's form. Classes and fields have its names and defaults."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any

from torchtitan.protocols.model import ModelConfigConverter


def config(class_name, base=None, /, **fields):
    """Makes a configuration class. A callable is a default factory."""
    specs = [(key, Any, field(default_factory=value) if callable(value) else field(default=value))
             for key, value in fields.items()]
    made = make_dataclass("Config", specs, kw_only=True, bases=(base,) if base else ())
    made.__qualname__ = class_name if class_name.endswith(("Config", "Spec")) else f"{class_name}.Config"
    return made


# Parts of the model follow. Each Linear, RMSNorm and Embedding has param_init and sharding_config.
Linear = config("Linear", param_init=None, sharding_config=None, in_features=0, out_features=0, bias=False)
RMSNorm = config("RMSNorm", param_init=None, sharding_config=None, normalized_shape=0, eps=1e-5,
                 elementwise_affine=True)
Embedding = config("Embedding", param_init=None, sharding_config=None, num_embeddings=0, embedding_dim=0)
FeedForward = config("FeedForward", w1=None, w2=None, w3=None)
FlexAttention = config("FlexAttention", block_size=128, kernel_options=dict)
RoPE = config("ComplexRoPE", dim=64, max_seq_len=16384, theta=10000.0, scaling="yarn", scaling_factor=8.0,
              low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_factor=40.0,
              beta_fast=32.0, beta_slow=1.0, original_seq_len=4096, truncate=True)
Attention = config("Attention", n_heads=2, dim=64, wq=None, wq_a=None, wq_b=None, wkv_a=None, wkv_b=None, wo=None,
                   q_lora_rank=0, kv_lora_rank=32, q_norm=None, kv_norm=None, qk_nope_head_dim=32, qk_rope_head_dim=64,
                   v_head_dim=32, rope=RoPE, inner_attention=FlexAttention, mscale=0.7)
Router = config("TokenChoiceTopKRouter", num_experts=4, gate=None, num_expert_groups=None, num_limited_groups=None,
                top_k=2, score_func="softmax", route_norm=False, route_scale=1.0, _debug_force_load_balance=False)
Experts = config("GroupedExperts", dim=64, hidden_dim=32, num_experts=4)
AllToAll = config("AllToAllTokenDispatcher", num_experts=4, top_k=2)
HybridEP = config("HybridEPTokenDispatcher", num_experts=4, top_k=2, non_blocking_capacity_factor=None)
RoutedExperts = config("RoutedExperts", inner_experts=Experts, token_dispatcher=AllToAll)
MoE = config("MoE", num_experts=4, routed_experts=RoutedExperts, router=None, load_balance_coeff=1e-3,
             shared_experts=None)
Block = config("DeepSeekV3TransformerBlock", attention=None, feed_forward=None, moe=None, attention_norm=None,
               ffn_norm=None)
Model = config("DeepSeekV3Model", dim=64, vocab_size=512, lm_head=None, tok_embeddings=None, norm=None, layers=list,
               enable_weight_tying=False, mtp_layers=list)

# Parts of the trainer follow.
Loader = config("HuggingFaceTextDataLoader", dataset="c4", dataset_path=None, num_workers=0, infinite=True)
Group = config("ParamGroupConfig", pattern=".*", optimizer_name="AdamW", optimizer_kwargs=dict)
SelectiveAC = config("SelectiveAC", preserve_rng_state=True,
                     force_recompute_mm_shapes_by_fqns=lambda: ["moe.router.gate"])
Training = config("TrainingConfig", local_batch_size=4, global_batch_size=-1, seq_len=4096, max_norm=1.0, steps=1000,
                  enable_cpu_offload=False, dtype="float32", mixed_precision_param="bfloat16", gc_freq=50)
Parallelism = config("ParallelismConfig", data_parallel_shard_degree=-1, tensor_parallel_degree=1,
                     pipeline_parallel_layers_per_stage=None, module_fqns_per_model_part=None,
                     expert_parallel_degree=8)
Trainer = config(
    "Trainer", model_spec=None, hf_assets_path="./assets", dump_folder="./outputs",
    profiler=config("Profiler", enable_profiling=False, profiler_active=1), dataloader=Loader,
    optimizer=config("OptimizersContainer", param_groups=list, implementation="fused"),
    lr_scheduler=config("LRSchedulersContainer", warmup_steps=200, total_steps=None, decay_ratio=None,
                        decay_type="linear", min_lr_factor=0.0),
    training=Training, parallelism=Parallelism,
    checkpoint=config("CheckpointManager", enable=False, initial_load_path=None, initial_load_in_hf=False,
                      async_mode="disabled"),
    activation_checkpoint=SelectiveAC, compile=config("CompileConfig", enable=False),
    debug=config("DebugConfig", seed=None, print_config=False), override=config("OverrideConfig", imports=list),
    loss=config("ChunkedLossWrapper", num_chunks=8,
                loss_fn=config("CrossEntropyLoss", global_vocab_size=None)))
Spec = config("ModelSpec", name="deepseek_v3", flavor="small", model=None, parallelize_fn=None)


class MXFP8LinearConverter:
    @dataclass(kw_only=True)
    class Config(ModelConfigConverter.Config):
        model_compile_enabled: bool = False
        fqns: list = field(default_factory=list)


class Float8LinearConverter:
    @dataclass(kw_only=True)
    class Config(ModelConfigConverter.Config):
        filter_fqns: list = field(default_factory=list)


def ffn(width):
    return FeedForward(w1=Linear(in_features=64, out_features=width), w2=Linear(in_features=width, out_features=64),
                       w3=Linear(in_features=64, out_features=width))


def block(is_moe, dispatcher):
    norm = RMSNorm(normalized_shape=64)
    attention = Attention(
        wq=Linear(in_features=64, out_features=192), q_norm=RMSNorm(normalized_shape=1),
        wkv_a=Linear(in_features=64, out_features=96), kv_norm=RMSNorm(normalized_shape=32),
        wkv_b=Linear(in_features=32, out_features=128), wo=Linear(in_features=64, out_features=64))
    moe = MoE(router=Router(gate=Linear(in_features=64, out_features=4)), shared_experts=ffn(64),
              routed_experts=RoutedExperts(token_dispatcher=dispatcher()))
    return Block(attention=attention, attention_norm=norm, ffn_norm=norm, moe=moe if is_moe else None,
                 feed_forward=None if is_moe else ffn(128))


def small(dispatcher=AllToAll, converters=()):
    model = Model(lm_head=Linear(in_features=64, out_features=512), norm=RMSNorm(normalized_shape=64),
                  tok_embeddings=Embedding(num_embeddings=512, embedding_dim=64),
                  layers=[block(False, dispatcher), block(True, dispatcher), block(True, dispatcher)])
    for converter in converters:
        model = converter.build().convert(model)
    trainer = Trainer(model_spec=Spec(model=model))
    trainer.optimizer.param_groups = [
        Group(optimizer_kwargs={"lr": 2.2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})]
    return trainer


def mxfp8():
    return small(converters=[MXFP8LinearConverter.Config(fqns=["attention", "feed_forward"])])


def float8():
    return small(converters=[Float8LinearConverter.Config()])


def hybridep():
    return small(HybridEP)


def new_field():
    trainer = small()
    trainer.training = config("TrainingConfig", Training, from_tomorrow=7)()
    return trainer


def new_policy():
    trainer = small()
    trainer.activation_checkpoint = config("MemoryBudgetAC", memory_budget=0.5)()
    return trainer


def other_epsilon():
    trainer = small()
    trainer.model_spec.model.norm.eps = 1e-6
    return trainer
