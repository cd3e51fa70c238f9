#!/usr/bin/env python3
"""Writes Tessera's TOML from a configuration of TorchTitan 0.3, where Python functions have replaced TOML files.

    scripts/import_torchtitan.py --module deepseek_v3 --config deepseek_v3_16b [--output 16b.toml] [--allow-unknown]
        [--training.seq_len 8192 ...]

Run it with a Python that has TorchTitan (0.3.0 was tested); it needs neither a GPU nor torchao. All other options are
TorchTitan's. Files of TorchTitan v0.2 and before need no script: `tessera train FILE.toml` reads them.

The comments at the end of the TOML list what moved, what has no counterpart and what Tessera refuses. The exit status
is 2 if a field was refused or is unknown to this script, because the TOML then describes another run; --allow-unknown
makes it 0. Status 1 means that no TOML was written. docs/from-torchtitan.md has the table of all fields.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

FLAVORS = ("debugmodel", "16B", "236B", "671B")
ANY = object()  # stands for any value where the model's value changes no result

# The values of these fields are taken unchanged. [section of Tessera]: TorchTitan's place, names.
SAME = {
    "job": ("", "dump_folder"),
    "model": ("", "hf_assets_path"),
    "lr_scheduler": ("lr_scheduler", "warmup_steps decay_type min_lr_factor"),
    "training": (
        "training",
        "local_batch_size global_batch_size seq_len max_norm steps dtype mixed_precision_param mixed_precision_reduce"),
    "parallelism": (
        "parallelism",
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree "
        "context_parallel_degree expert_parallel_degree pipeline_parallel_degree pipeline_parallel_schedule "
        "pipeline_parallel_microbatch_size pipeline_parallel_first_stage_less_layers "
        "pipeline_parallel_last_stage_less_layers"),
    "checkpoint": (
        "checkpoint",
        "enable folder interval initial_load_in_hf keep_latest_k last_save_model_only load_step async_mode"),
    "metrics": ("metrics", "log_freq enable_tensorboard save_tb_folder"),
    "profiling": ("profiler", "enable_profiling save_traces_folder profile_freq"),
    "validation": ("validator", "enable freq"),
    "comm": ("comm", "init_timeout_seconds train_timeout_seconds"),
    "debug": ("debug", "deterministic moe_force_load_balance"),
}
MOVED = {f"{place}.{name}".lstrip("."): f"{section}.{name}"
         for section, (place, names) in SAME.items() for name in names.split()}
MOVED["debug.print_config"] = "job.print_config"

# These fields have no counterpart, and change neither results nor what fits. [why]: TorchTitan's place, names.
IGNORED_BECAUSE = (
    ("everything is compiled", "compile", "enable enable_async_tensor_parallel components backend"),
    ("the engine decides how it launches kernels", "training", "disable_cuda_graphs"),
    ("there is no Python", "training", "gc_freq gc_debug"),
    ("the engine chooses its collectives", "parallelism", "enable_fsdp_symm_mem"),
    ("tensor-parallel ranks always share the sequence between products", "parallelism", "enable_sequence_parallel"),
    ("a matter of PyTorch", "parallelism", "spmd_backend"),
    ("sequences are always cut in head-tail chunks", "parallelism",
     "context_parallel_load_balancer context_parallel_ptrr_mask_key"),
    ("the loader maps token shards and needs no workers", "dataloader",
     "num_workers persistent_workers pin_memory prefetch_factor"),
    ("the loader maps token shards and needs no workers", "validator.dataloader",
     "num_workers persistent_workers pin_memory prefetch_factor"),
    ("FP8 weights are recognised by their scales", "checkpoint", "initial_load_in_hf_quantized"),
    ("recomputation is exact", "activation_checkpoint", "preserve_rng_state determinism_check debug"),
    ("lines have no colours", "metrics", "disable_color_printing"),
    ("metrics are of all ranks together", "metrics", "save_for_all_ranks"),
    ("a trace is of one step", "profiler",
     "profiler_repeat profiler_skip_first profiler_skip_first_wait profiler_active profiler_warmup"),
    ("there are no memory snapshots", "profiler",
     "memory_snapshot_freq save_memory_snapshot_folder memory_snapshot_max_entries"),
    ("there is no recorder of NCCL's operations", "comm", "trace_buf_size save_traces_folder save_traces_file_prefix"),
    ("a matter of PyTorch", "debug", "spmd_typechecking"),
    ("debug.deterministic never only warns", "debug", "deterministic_warn_only"),
    ("a loss or gradient norm that is not finite ends every run, with its cause", "debug", "detect_anomaly"),
    ("`tessera train --print-config` prints it", "debug", "save_config_file"),
    ("metrics.jsonl is always written", "debug", "enable_structured_logging"),
    ("the output projection always works in chunks", "loss", "num_chunks"),
    ("it follows from the model", "loss", "global_vocab_size"),
    ("it follows from the model", "loss.loss_fn", "global_vocab_size"),
)
IGNORED = {f"{place}.{name}": why for why, place, names in IGNORED_BECAUSE for name in names.split()}
# These fields are accepted with these values only.
REFUSED = {
    "training.enable_cpu_offload": ([False], "offloading to the CPU is not built"),
    "parallelism.pipeline_parallel_schedule_csv": (["", None], "a schedule from a file is not built"),
    "checkpoint.initial_load_model_only": ([True], "initial_load_path gives the weights only"),
    "checkpoint.export_dtype": (["float32"], "`tessera convert --to hf --dtype` writes another type"),
    "checkpoint.last_save_in_hf": ([False], "not built; `tessera convert --to hf` makes the files"),
    "checkpoint.exclude_from_loading": ([[]], "partial loading is not built"),
    "checkpoint.enable_first_step_checkpoint": ([False], "a checkpoint of the first step is not built"),
    "checkpoint.create_seed_checkpoint": ([False], "a seed checkpoint is not built"),
    "checkpoint.load_only": ([False], "loading without saving is not built"),
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns":
        ([["moe.router.gate"]], "what selective keeps is fixed (docs/model.md)"),
    "metrics.enable_wandb": ([False], "Weights & Biases is not built; TensorBoard is"),
    "profiler.enable_memory_snapshot": ([False], "memory snapshots are not built"),
    "profiler.trace_post_processor": ([None], "Python functions are not called"),
    "comm.mode": (["default", "torchcomms"], "runs without communication are not built"),
    "debug.batch_invariant": ([False], "batch-invariant mode is not built"),
    "dataloader.infinite": ([True], "training goes round the dataset"),
    "validator.dataloader.infinite": ([False], "validation always reads the same sequences"),
    "optimizer.optimizer_factory_kwargs_by_name": ([{}], "AdamW takes no further arguments"),
}
# The parts may have these classes. The effect of any other class is not known.
CLASSES = {
    "profiler": "Profiler", "metrics": "MetricsProcessor", "tokenizer": "HuggingFaceTokenizer",
    "dataloader": "HuggingFaceTextDataLoader", "optimizer": "OptimizersContainer",
    "lr_scheduler": "LRSchedulersContainer", "training": "TrainingConfig", "parallelism": "ParallelismConfig",
    "checkpoint": "CheckpointManager TorchCheckpointingManager", "activation_checkpoint": "SelectiveAC FullAC",
    "compile": "CompileConfig", "comm": "CommConfig", "validator": "Validator",
    "validator.dataloader": "HuggingFaceTextDataLoader", "debug": "DebugConfig", "override": "OverrideConfig",
    "loss": "ChunkedLossWrapper CrossEntropyLoss MTPLoss", "loss.loss_fn": "CrossEntropyLoss",
}
ORDER = ("job", "model", "model.args", "optimizer", "lr_scheduler", "training", "parallelism", "quantize.linear.mx",
         "quantize.grouped_mm.mx", "activation_checkpoint", "checkpoint", "metrics", "profiling", "validation", "comm",
         "debug")


def class_name(value):
    return type(value).__qualname__.removesuffix(".Config")


def is_part(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def parts_of(value):
    """Yields name, value and whether it is the default, for the fields of a dataclass that are not internal to it."""
    for field in dataclasses.fields(value):
        if field.name.startswith("_"):
            continue
        now = getattr(value, field.name)
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, now, default is not dataclasses.MISSING and now == default


def toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(each) for each in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)


class Import:
    """Imports the fields of one configuration."""

    def __init__(self, config, converters):
        self.config = config
        self.sections = {section: {} for section in ORDER}
        self.moved, self.without, self.refused, self.unknown = [], [], [], []
        special = {
            "optimizer.param_groups": self.optimizer_groups,
            "optimizer.implementation": self.optimizer_implementation,
            "lr_scheduler.total_steps": lambda name, value: self.set(name, value or 0, name, value),
            "lr_scheduler.decay_ratio":
                lambda name, value: self.set(name, -1.0 if value is None else value, name, value),
            "parallelism.pipeline_parallel_layers_per_stage":
                lambda name, value: self.set(name, -1 if value is None else value, name, value),
            "parallelism.module_fqns_per_model_part": self.stages,
            "checkpoint.initial_load_path": self.initial_load_path,
            "activation_checkpoint": self.recomputation,
            "dataloader.dataset": lambda name, value: self.set("training.dataset", value, name, value),
            "dataloader.dataset_path": self.raw_dataset,
            "validator.dataloader.dataset": self.validation_dataset,
            "validator.dataloader.dataset_path": self.raw_dataset,
            "validator.steps": self.validation_steps,
            "debug.seed": self.seed,
            "override.imports": self.overrides,
            "loss.mtp_scale": lambda name, value: self.set("model.args.mtp_loss_weight", value, name, value),
            "model_spec": self.model_spec,
        }
        self.sections["activation_checkpoint"]["mode"] = "none"
        self.walk("", config, special)
        for converter in converters:
            self.converter(converter)

    def set(self, key, value, name=None, was=ANY):
        """Sets a key of ours. `name` and `was` are TorchTitan's field and value. A field with another name or value is
        listed as moved."""
        section, _, leaf = key.rpartition(".")
        self.sections[section][leaf] = value
        changed = was is not ANY and was is not value and was != value
        if name and (name != key or changed):
            self.moved.append(f"{name}{f' = {was!r}' if changed else ''} -> {key} = {toml(value)}")

    def refuse(self, name, value, why):
        self.refused.append(f"{name} = {value!r}: {why}")

    def walk(self, place, part, special):
        for name, value, is_default in parts_of(part):
            path = f"{place}.{name}".lstrip(".")
            if path in special:
                special[path](path, value)
            if path == "model_spec":
                continue
            if is_part(value):
                if class_name(value) in CLASSES.get(path, "").split():
                    self.walk(path, value, special)
                else:
                    self.unknown.append(f"{path} is a {class_name(value)}")
            elif path in special:
                pass
            elif path in MOVED:
                self.set(MOVED[path], value, path, value)
            elif path in REFUSED:
                if value not in REFUSED[path][0]:
                    self.refuse(path, value, REFUSED[path][1])
            elif path in IGNORED:
                if not is_default:
                    self.without.append(f"{path} = {value!r}: {IGNORED[path]}")
            else:
                self.unknown.append(f"{path} = {value!r}")

    def optimizer_groups(self, name, groups):
        if len(groups) != 1 or groups[0].pattern != ".*" or groups[0].optimizer_name != "AdamW":
            self.refuse(name, [(group.pattern, group.optimizer_name) for group in groups],
                        "Tessera has one group, of all parameters, with AdamW")
            return
        known = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}
        # These defaults are PyTorch's, for options that the group does not name.
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2} | groups[0].optimizer_kwargs
        self.set("optimizer.name", "AdamW", f"{name}[0].optimizer_name", "AdamW")
        for option, value in options.items():
            place = f"{name}[0].optimizer_kwargs.{option}"
            if option == "betas":
                self.set("optimizer.beta1", value[0], f"{place}[0]", value[0])
                self.set("optimizer.beta2", value[1], f"{place}[1]", value[1])
            elif option in known:
                self.set(f"optimizer.{known[option]}", value, place, value)
            elif option in ("fused", "foreach", "capturable", "differentiable"):
                self.without.append(f"{place} = {value!r}: there is one implementation")
            elif value:
                self.refuse(place, value, "Tessera's AdamW has no such option")

    def optimizer_implementation(self, name, value):
        self.set("optimizer.state_dtype", "bfloat16" if value == "fused_opt_states_bf16" else "float32", name, value)

    def stages(self, name, value):
        if value:
            self.set(name, [[module.replace("lm_head", "output") for module in stage] for stage in value], name, value)

    def initial_load_path(self, name, value):
        if value is None and self.config.checkpoint.initial_load_in_hf:
            self.set(name, self.config.hf_assets_path, name, value)
        elif value is not None:
            self.set(name, value)

    def recomputation(self, name, value):
        if value is None or class_name(value) in CLASSES[name].split():
            mode = {"SelectiveAC": "selective", "FullAC": "full"}.get(class_name(value), "none")
            self.set("activation_checkpoint.mode", mode, name, None if value is None else class_name(value))

    def raw_dataset(self, name, value):
        if value is not None:
            self.without.append(f"{name} = {value!r}: `tessera data prepare` tokenizes such files once, and "
                                "training.dataset_path is the folder that it makes")

    def validation_dataset(self, name, value):
        if self.config.validator.enable:
            self.set("validation.dataset", value, name, value)

    def validation_steps(self, name, value):
        if value >= 0:
            self.set("validation.steps", value, name, value)
        elif self.config.validator.enable:
            self.refuse(name, value, "validation of the whole split is not built; give a number of global batches")

    def seed(self, name, value):
        if value is not None:
            self.set(name, value)

    def overrides(self, name, imports):
        for each in imports:
            target = each if isinstance(each, str) else each[0]
            if target.startswith(("torchtitan.overrides.fused_", "torchtitan.overrides.helion_rope")):
                self.without.append(f"{name}: {target}: kernels are Tessera's own")
            else:
                self.refuse(name, each, "Python code cannot be imported")

    def converter(self, converter):
        name, kind = "model_spec converters", class_name(converter)
        fields = {field: value for field, value, _ in parts_of(converter)}
        fields.pop("model_compile_enabled", None)
        converters = self.sections["model"].setdefault("converters", [])
        if kind == "MXFP8LinearConverter":
            converters.append("quantize.linear.mx")
            self.set("quantize.linear.mx.recipe_name", "mxfp8", f"{name}: {kind}", kind)
            include = fields.pop("fqns")
            names = linear_names(self.config.model_spec.model)
            self.set("quantize.linear.mx.filter_fqns", ["output", *left_out(names, include)],
                     f"{name}: {kind}.fqns (which names what is converted)", include)
        elif kind == "MXFP8GroupedExpertsConverter" and fields.get("recipe_name") == "mxfp8_rceil":
            converters.append("quantize.grouped_mm.mx")
            self.set("quantize.grouped_mm.mx.recipe_name", "mxfp8", f"{name}: {kind}.recipe_name",
                     fields.pop("recipe_name"))
            self.set("quantize.grouped_mm.mx.fqns", ["experts"])
            fields.pop("pad_multiple", None)
        else:
            self.refuse(name, kind, "recipes are listed in docs/mxfp8.md; fp8_blockwise is the FP8 one")
            return
        self.unknown += [f"{name}: {kind}.{field} = {value!r}" for field, value in fields.items()]

    def model_spec(self, name, spec):
        if spec is None or spec.name != "deepseek_v3":
            sys.exit(f"import_torchtitan: the model is {spec and spec.name}; Tessera trains deepseek_v3")
        self.set("model.name", spec.name, f"{name}.name", spec.name)
        if spec.flavor in FLAVORS:
            self.set("model.flavor", spec.flavor, f"{name}.flavor", spec.flavor)
        else:
            self.without.append(f"{name}.flavor = {spec.flavor!r}: [model.args] has all sizes")
        self.moved.append(f"{name}.model -> [model.args]")
        model = spec.model
        found = dict(model_values("", model))
        args = model_args(found, model)
        for key, value in args.items():
            self.set(f"model.args.{key}", value)
        table = expected_values(args)
        for path, value in found.items():
            expected = table.get(path)
            if expected is None and value is not None:
                self.unknown.append(f"{name}.model.{path} = {value!r}")
            elif expected is not None and value not in expected and ANY not in expected:
                self.refuse(f"{name}.model.{path}", value, f"Tessera's model has {expected[0]!r} there")
        self.yarn(found)
        self.backend(found)

    def yarn(self, found):
        """Sets the keys of YaRN. TorchTitan 0.3 always scales RoPE. Tessera, like v0.2, does so if sequences are longer
        than original_seq_len. A smaller original_seq_len, with betas that are smaller by the same factor, gives the
        same frequencies."""
        args, rope = self.sections["model.args"], "layers.0.attention.rope"
        seq_len, original = self.config.training.seq_len, args["original_seq_len"]
        if found[f"{rope}.scaling"] == "none":
            self.set("model.args.rope_factor", 1.0, "model_spec.model.layers.*.attention.rope.scaling", "none")
        elif seq_len <= original:
            part = 2
            while seq_len <= original // part:
                part *= 2
            for key, value in (("original_seq_len", original // part), ("beta_fast", args["beta_fast"] / part),
                               ("beta_slow", args["beta_slow"] / part)):
                self.set(f"model.args.{key}", value, f"model_spec.model.layers.*.attention.rope.{key}", args[key])
            self.moved.append("  (TorchTitan 0.3 applies YaRN at every length. These three do so, with the same "
                              f"frequencies, above {original // part} tokens: for shorter sequences import again)")

    def backend(self, found):
        backends = {"AllToAllTokenDispatcher": "standard", "LocalTokenDispatcher": "standard",
                    "DeepEPTokenDispatcher": "direct", "HybridEPTokenDispatcher": "direct",
                    "MinimalAsyncEPTokenDispatcher": "direct"}
        dispatcher = next((value for path, value in found.items() if path.endswith(".token_dispatcher")), None)
        if dispatcher in backends:
            self.set("parallelism.expert_parallel_comm_backend", backends[dispatcher],
                     "model_spec.model.layers.*.moe.routed_experts.token_dispatcher", dispatcher)

    def text(self, source):
        lines = [f"# Written by scripts/import_torchtitan.py from {source}."]
        if "dataset" in self.sections["training"]:
            lines.append("# Set training.dataset_path to the folder that `tessera data prepare` has made of it.")
        for section, keys in self.sections.items():
            if keys:
                lines += ["", f"[{section}]", *(f"{key} = {toml(value)}" for key, value in keys.items())]
        for title, entries in (("Moved, or written in another way", self.moved),
                               ("Without a counterpart, and without effect on results", self.without),
                               ("Refused: this file does not do it", self.refused),
                               ("Unknown to the script: this file does not have it", self.unknown)):
            if entries:
                lines += ["", f"# {title}:", *(f"#   {' '.join(entry.splitlines())}" for entry in entries)]
        return "\n".join(lines) + "\n"


def model_values(place, part):
    """Yields every field of a model's configuration, and the class of every part, by its path."""
    for name, value, _ in parts_of(part):
        path = f"{place}.{name}".lstrip(".")
        if name == "param_init":
            continue  # docs/model.md defines the initial distributions
        if is_part(value):
            yield path, class_name(value)
            yield from model_values(path, value)
        elif isinstance(value, list) and all(is_part(each) for each in value):
            for i, each in enumerate(value):
                yield from model_values(f"{path}.{i}", each)
        else:
            yield path, value


def model_args(found, model):
    """Returns [model.args]. Each value is from the first place that has it."""
    def of(path, otherwise=None):
        return next((value for place, value in found.items() if place.endswith(path)), otherwise)

    num_dense = next((i for i, layer in enumerate(model.layers) if layer.moe is not None), len(model.layers))
    moe_dim = of(".inner_experts.hidden_dim", 1)
    return {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "inter_dim": of(".feed_forward.w1.out_features", 1),
        "moe_inter_dim": moe_dim,
        "n_layers": len(model.layers),
        "n_dense_layers": num_dense,
        "n_heads": of(".attention.n_heads"),
        "norm_eps": of(".attention_norm.eps"),
        "num_experts": of(".moe.num_experts", 1),
        "num_shared_experts": of(".moe.shared_experts.w1.out_features", 0) // moe_dim,
        "top_k": of(".router.top_k", 1),
        "score_func": of(".router.score_func", "softmax"),
        "route_norm": of(".router.route_norm", False),
        "route_scale": of(".router.route_scale", 1.0),
        "load_balance_coeff": of(".moe.load_balance_coeff", 0.0) or 0.0,
        "n_expert_groups": of(".router.num_expert_groups", 0) or 0,
        "n_limited_groups": of(".router.num_limited_groups", 0) or 0,
        "q_lora_rank": of(".attention.q_lora_rank"),
        "kv_lora_rank": of(".attention.kv_lora_rank"),
        "qk_nope_head_dim": of(".attention.qk_nope_head_dim"),
        "qk_rope_head_dim": of(".attention.qk_rope_head_dim"),
        "v_head_dim": of(".attention.v_head_dim"),
        "attn_mask_type": "block_causal",  # every loader of TorchTitan 0.3 restarts positions at a document
        "original_seq_len": of(".rope.original_seq_len"),
        "rope_theta": of(".rope.theta"),
        "rope_factor": of(".rope.rope_factor"),
        "beta_fast": of(".rope.beta_fast"),
        "beta_slow": of(".rope.beta_slow"),
        "mscale": of(".attention.mscale"),
        "num_mtp_modules": len(getattr(model, "mtp_layers", [])),
    }


def expected_values(a):
    """Returns, by path, the values that Tessera's model has there. Errors name the first one. Layers differ by
    index."""
    qk = a["qk_nope_head_dim"] + a["qk_rope_head_dim"]
    expected = {"sharding_config": [ANY]}

    def part(path, name, **values):
        expected[path] = name.split()
        expected[f"{path}.sharding_config"] = [ANY]
        for key, value in values.items():
            expected[f"{path}.{key}"] = value if isinstance(value, list) else [value]

    def linear(path, num_in, num_out):
        part(path, "Linear", in_features=num_in, out_features=num_out, bias=False)

    def norm(path, width):
        part(path, "RMSNorm", normalized_shape=width, eps=a["norm_eps"], elementwise_affine=True)

    def ffn(path, width):
        part(path, "FeedForward")
        linear(f"{path}.w1", a["dim"], width)
        linear(f"{path}.w2", width, a["dim"])
        linear(f"{path}.w3", a["dim"], width)

    def block(path, name, is_moe):
        part(path, name)
        norm(f"{path}.attention_norm", a["dim"])
        norm(f"{path}.ffn_norm", a["dim"])
        at = f"{path}.attention"
        part(at, "Attention", **{key: a[key] for key in ("n_heads", "dim", "q_lora_rank", "kv_lora_rank", "mscale",
                                                         "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")})
        if a["q_lora_rank"] == 0:
            linear(f"{at}.wq", a["dim"], a["n_heads"] * qk)
            norm(f"{at}.q_norm", 1)
        else:
            linear(f"{at}.wq_a", a["dim"], a["q_lora_rank"])
            linear(f"{at}.wq_b", a["q_lora_rank"], a["n_heads"] * qk)
            norm(f"{at}.q_norm", a["q_lora_rank"])
        linear(f"{at}.wkv_a", a["dim"], a["kv_lora_rank"] + a["qk_rope_head_dim"])
        norm(f"{at}.kv_norm", a["kv_lora_rank"])
        linear(f"{at}.wkv_b", a["kv_lora_rank"], a["n_heads"] * (a["qk_nope_head_dim"] + a["v_head_dim"]))
        linear(f"{at}.wo", a["n_heads"] * a["v_head_dim"], a["dim"])
        part(f"{at}.inner_attention", "FlexAttention VarlenAttention", block_size=ANY, kernel_options=ANY,
             window_size=[(-1, 0)])
        # Only YaRN's fields count. Those of Llama's scaling are not read.
        part(f"{at}.rope", "ComplexRoPE", dim=a["qk_rope_head_dim"], max_seq_len=ANY, theta=a["rope_theta"],
             scaling=["yarn", "none"], scaling_factor=ANY, low_freq_factor=ANY, high_freq_factor=ANY,
             original_max_position_embeddings=ANY, truncate=True,
             **{key: a[key] for key in ("rope_factor", "beta_fast", "beta_slow", "original_seq_len")})
        if not is_moe:
            ffn(f"{path}.feed_forward", a["inter_dim"])
            return
        moe = f"{path}.moe"
        part(moe, "MoE", num_experts=a["num_experts"], load_balance_coeff=[a["load_balance_coeff"] or None])
        part(f"{moe}.router", "TokenChoiceTopKRouter", num_experts=a["num_experts"], top_k=a["top_k"],
             score_func=a["score_func"], route_norm=a["route_norm"], route_scale=a["route_scale"],
             num_expert_groups=[a["n_expert_groups"] or None], num_limited_groups=[a["n_limited_groups"] or None])
        linear(f"{moe}.router.gate", a["dim"], a["num_experts"])
        part(f"{moe}.routed_experts", "RoutedExperts")
        part(f"{moe}.routed_experts.inner_experts", "GroupedExperts", dim=a["dim"], hidden_dim=a["moe_inter_dim"],
             num_experts=a["num_experts"])
        # HybridEP drops tokens if the factor is below 1.
        part(f"{moe}.routed_experts.token_dispatcher",
             "AllToAllTokenDispatcher LocalTokenDispatcher DeepEPTokenDispatcher HybridEPTokenDispatcher "
             "MinimalAsyncEPTokenDispatcher", num_experts=a["num_experts"], top_k=a["top_k"], hidden_dim=ANY,
             num_max_tokens_per_rank=ANY, cudagraphable=ANY, pad_multiple=ANY, dtype=ANY, device=ANY,
             non_blocking_capacity_factor=[None, 1.0])
        if a["num_shared_experts"]:
            ffn(f"{moe}.shared_experts", a["num_shared_experts"] * a["moe_inter_dim"])

    expected |= {"vocab_size": [a["vocab_size"]], "dim": [a["dim"]], "enable_weight_tying": [False],
                 "layers": [[]], "mtp_layers": [[]]}
    part("tok_embeddings", "Embedding", num_embeddings=a["vocab_size"], embedding_dim=a["dim"])
    norm("norm", a["dim"])
    linear("lm_head", a["dim"], a["vocab_size"])
    for i in range(a["n_layers"]):
        block(f"layers.{i}", "DeepSeekV3TransformerBlock", i >= a["n_dense_layers"])
    for i in range(a["num_mtp_modules"]):
        block(f"mtp_layers.{i}", "MTPTransformerBlock", True)
        for name in ("enorm", "hnorm", "mtp_norm"):
            norm(f"mtp_layers.{i}.{name}", a["dim"])
        linear(f"mtp_layers.{i}.eh_proj", 2 * a["dim"], a["dim"])
    return expected


def linear_names(model):
    """Returns the modules that an MXFP8LinearConverter may convert, as both programs name them. Tessera leaves the
    output projection, the router's gate and MTP's input projection in high precision."""
    return [path for path, value in model_values("", model) if value == "Linear" and
            not path.endswith(("lm_head", ".gate", ".eh_proj"))]


def left_out(names, include):
    """Returns patterns of the modules that match no pattern of `include`. An empty list includes all."""
    out = {name for name in names if include and not any(pattern in name for pattern in include)}
    patterns = set()
    for name in out:
        kind = name.split(".", 2)[2]  # the name without layers.N
        alike = {other for other in names if kind in other}
        patterns.add(kind if alike <= out else name)
    return sorted(patterns)


def load(arguments):
    """Returns TorchTitan's configuration, and the converters that it names. Converters are noted instead of built.
    Building them takes torchao and a GPU, and the resulting model no longer tells what they were."""
    try:
        from torchtitan.config.manager import ConfigManager
        from torchtitan.protocols.model import ModelConfigConverter
    except ImportError as error:
        sys.exit(f"import_torchtitan: {error}; run this with a Python that has TorchTitan 0.3 and its requirements. "
                 "Files of TorchTitan v0.2 need no script")
    converters = []

    class Noted:
        def convert(self, model):
            return model

    def note(self, **_):
        converters.append(self)
        return Noted()

    ModelConfigConverter.Config.build = note
    try:
        return ConfigManager().parse_args(arguments), converters
    except (ImportError, ValueError) as error:
        sys.exit(f"import_torchtitan: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, help="the TOML file; without it, standard output")
    parser.add_argument("--allow-unknown", action="store_true", help="exit with 0 although fields were not imported")
    args, rest = parser.parse_known_args()
    if not rest:
        parser.error("--module and --config are TorchTitan's, and required")
    config, converters = load(rest)
    import torchtitan

    result = Import(config, converters)
    text = result.text(f"TorchTitan {getattr(torchtitan, '__version__', '')}, {' '.join(rest)}")
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    missing = len(result.refused) + len(result.unknown)
    if missing:
        print(f"import_torchtitan: {missing} field{'s were' if missing > 1 else ' was'} not imported; the end of the "
              "TOML lists what and why", file=sys.stderr)
    sys.exit(2 if missing and not args.allow_unknown else 0)


if __name__ == "__main__":
    main()
