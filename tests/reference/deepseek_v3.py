"""DeepSeek-V3 in plain PyTorch: the model, its loss and its training step. Tests compare Tessera with it.

Everything is a function of (config, dict of parameters, dict of buffers, tokens). There are no modules, no fused
operators and no shortcuts. The dtype of the parameters is the dtype of the whole computation, so the same code gives
float64 golden values and a float32 run to estimate rounding. Gradients are computed by autograd.

Sources: DeepSeek-V2 (arXiv:2405.04434, MLA), DeepSeek-V3 (arXiv:2412.19437, router, balance loss, multi-token
prediction), YaRN (arXiv:2309.00071).

Shape suffixes: B sequences of a micro-batch, S positions, T = B*S tokens, D model dim, H heads, d head dim,
r rotary pairs, E experts, K experts per token, F expert hidden dim, G expert groups, e experts of a group,
V vocabulary.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

IGNORED = -100  # label of a position that does not count in the loss


# ---------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class Config:
    """[model.args] of the TOML file, the few [training] keys that change the mathematics, and [debug]."""

    vocab_size: int = 61
    dim: int = 32
    inter_dim: int = 48
    moe_inter_dim: int = 16
    n_layers: int = 2
    n_dense_layers: int = 1
    n_heads: int = 2
    norm_eps: float = 1e-5
    num_experts: int = 8
    num_shared_experts: int = 2
    top_k: int = 3
    score_func: str = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    load_balance_coeff: float = 1e-3
    n_expert_groups: int = 0
    n_limited_groups: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 24
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0
    attn_mask_type: str = "causal"
    eos_id: int = 0
    num_mtp_modules: int = 0
    mtp_loss_weight: float = 0.3
    seq_balance_loss_coeff: float = 0.0

    seq_len: int = field(default=20, metadata={"table": "training"})
    local_batch_size: int = field(default=2, metadata={"table": "training"})
    moe_force_load_balance: bool = field(default=False, metadata={"table": "debug"})

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def uses_yarn(self) -> bool:
        return self.seq_len > self.original_seq_len

    def is_moe(self, layer_idx: int) -> bool:
        return layer_idx >= self.n_dense_layers

    @property
    def has_moe(self) -> bool:
        return self.n_layers > self.n_dense_layers

    def blocks(self) -> list[tuple[str, bool]]:
        """Returns name prefix and is-MoE of every transformer block: the main ones, then those of the MTP modules."""
        main = [(f"layers.{i}", self.is_moe(i)) for i in range(self.n_layers)]
        return main + [(f"mtp.{k}.block", self.has_moe) for k in range(self.num_mtp_modules)]

    def moe_prefixes(self) -> list[str]:
        return [f"{prefix}.moe" for prefix, moe in self.blocks() if moe]


@dataclass(frozen=True)
class TrainConfig:
    """[optimizer], [lr_scheduler] and the [training] keys that a step uses."""

    lr: float = field(default=8e-4, metadata={"table": "optimizer"})
    beta1: float = field(default=0.9, metadata={"table": "optimizer"})
    beta2: float = field(default=0.95, metadata={"table": "optimizer"})
    eps: float = field(default=1e-8, metadata={"table": "optimizer"})
    weight_decay: float = field(default=0.1, metadata={"table": "optimizer"})
    warmup_steps: int = field(default=3, metadata={"table": "lr_scheduler"})
    decay_ratio: float = field(default=0.6, metadata={"table": "lr_scheduler"})
    decay_type: str = field(default="cosine", metadata={"table": "lr_scheduler"})
    min_lr_factor: float = field(default=0.1, metadata={"table": "lr_scheduler"})
    steps: int = field(default=10, metadata={"table": "training"})
    global_batch_size: int = field(default=4, metadata={"table": "training"})
    max_norm: float = field(default=1.0, metadata={"table": "training"})


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def to_toml(config: Config, train: TrainConfig | None = None) -> str:
    """Returns the configuration file that describes this case to the engine under test."""
    tables: dict[str, list[str]] = {
        "model": ['name = "deepseek_v3"', 'flavor = "debugmodel"'],
        "model.args": [],
        "training": ['mixed_precision_param = "float32"'],
        "optimizer": [],
        "lr_scheduler": [],
        "debug": [],
    }
    for part in (config, train):
        for entry in fields(part) if part is not None else ():
            table = entry.metadata.get("table", "model.args")
            tables[table].append(f"{entry.name} = {_toml_value(getattr(part, entry.name))}")
    return "\n".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in tables.items() if rows)


def from_toml(text: str) -> tuple[Config, TrainConfig]:
    """Does the inverse of to_toml. Keys that are absent keep their defaults."""
    document = tomllib.loads(text)

    def parse(cls: type) -> object:
        values = {}
        for entry in fields(cls):
            table = entry.metadata.get("table", "model.args")
            rows = document
            for key in table.split("."):
                rows = rows.get(key, {})
            if entry.name in rows:
                values[entry.name] = rows[entry.name]
        return cls(**values)

    return parse(Config), parse(TrainConfig)


# ------------------------------------------------------------------------------------------------- parameters


def block_shapes(config: Config, prefix: str, moe: bool) -> dict[str, tuple[int, ...]]:
    c, D, H = config, config.dim, config.n_heads
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.attention_norm.weight": (D,)}
    attention = f"{prefix}.attention"
    if c.q_lora_rank == 0:
        shapes[f"{attention}.wq.weight"] = (H * c.qk_head_dim, D)
    else:
        shapes[f"{attention}.wq_a.weight"] = (c.q_lora_rank, D)
        shapes[f"{attention}.q_norm.weight"] = (c.q_lora_rank,)
        shapes[f"{attention}.wq_b.weight"] = (H * c.qk_head_dim, c.q_lora_rank)
    shapes[f"{attention}.wkv_a.weight"] = (c.kv_lora_rank + c.qk_rope_head_dim, D)  # rows: c_kv, then k_rope
    shapes[f"{attention}.kv_norm.weight"] = (c.kv_lora_rank,)
    shapes[f"{attention}.wkv_b.weight"] = (H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    shapes[f"{attention}.wo.weight"] = (D, H * c.v_head_dim)
    shapes[f"{prefix}.ffn_norm.weight"] = (D,)
    if not moe:
        shapes[f"{prefix}.feed_forward.w13.weight"] = (2 * c.inter_dim, D)  # rows: gate, then up
        shapes[f"{prefix}.feed_forward.w2.weight"] = (D, c.inter_dim)
        return shapes
    E, F = c.num_experts, c.moe_inter_dim
    shapes[f"{prefix}.moe.router.gate.weight"] = (E, D)
    shapes[f"{prefix}.moe.experts.w13"] = (E, 2 * F, D)
    shapes[f"{prefix}.moe.experts.w2"] = (E, D, F)
    if c.num_shared_experts > 0:
        shapes[f"{prefix}.moe.shared_experts.w13.weight"] = (2 * c.num_shared_experts * F, D)
        shapes[f"{prefix}.moe.shared_experts.w2.weight"] = (D, c.num_shared_experts * F)
    return shapes


def param_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every trained parameter. Matrices are [out, in]."""
    D, V = config.dim, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (V, D)}
    blocks = dict(config.blocks())
    for i in range(config.n_layers):
        shapes |= block_shapes(config, f"layers.{i}", blocks[f"layers.{i}"])
    shapes["norm.weight"] = (D,)
    shapes["output.weight"] = (V, D)
    for k in range(config.num_mtp_modules):
        shapes[f"mtp.{k}.embedding_norm.weight"] = (D,)
        shapes[f"mtp.{k}.hidden_norm.weight"] = (D,)
        shapes[f"mtp.{k}.eh_proj.weight"] = (D, 2 * D)  # columns: embedding half, then hidden half
        shapes |= block_shapes(config, f"mtp.{k}.block", blocks[f"mtp.{k}.block"])
        shapes[f"mtp.{k}.norm.weight"] = (D,)
    return shapes


def buffer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the expert biases. They steer the selection, and a rule updates them instead of a
    gradient."""
    return {f"{prefix}.expert_bias": (config.num_experts,) for prefix in config.moe_prefixes()}


def count_params(config: Config) -> dict[str, int]:
    """Returns parameter counts as TorchTitan reports them. It excludes MTP modules, so use a config without them.

    dense  = all outside the `moe.` subtrees: embedding, output projection, norms, attention, dense FFNs
    sparse = the `moe.` subtrees without the expert biases: routers + routed experts + shared experts
    active = dense + routers + shared experts + routed * top_k / num_experts
    """
    count = {"embedding": 0, "dense": 0, "router": 0, "shared": 0, "routed": 0}
    for name, shape in param_shapes(config).items():
        size = math.prod(shape)
        if ".moe.router." in name:
            count["router"] += size
        elif ".moe.shared_experts." in name:
            count["shared"] += size
        elif ".moe.experts." in name:
            count["routed"] += size
        else:
            count["dense"] += size
            if name == "tok_embeddings.weight":
                count["embedding"] = size
    count["sparse"] = count["router"] + count["shared"] + count["routed"]
    active_routed = count["routed"] * config.top_k // config.num_experts
    count["active"] = count["dense"] + count["router"] + count["shared"] + active_routed
    return count


# ----------------------------------------------------------------------------------- rotary position encoding


def rope_frequencies(config: Config) -> Tensor:
    """Returns the angle per position of every adjacent pair of the rotary dims, [rope/2], float64.

    Sequences longer than the original context use YaRN. Pairs that turn more than beta_fast times in the original
    context keep their frequency. The frequency of pairs that turn less than beta_slow times is divided by rope_factor.
    In between, a linear ramp over the pair index mixes the two.
    """
    c, dim = config, config.qk_rope_head_dim
    freqs = c.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not c.uses_yarn:
        return freqs

    def pair_with_rotations(num_rotations: float) -> float:
        turns_of_pair_0 = c.original_seq_len / (2 * math.pi)
        return dim * math.log(turns_of_pair_0 / num_rotations) / (2 * math.log(c.rope_theta))

    low = max(math.floor(pair_with_rotations(c.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(c.beta_slow)), dim - 1)
    width = high - low if high != low else 1e-3
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return freqs * (1 - ramp) + freqs / c.rope_factor * ramp


def softmax_scale(config: Config) -> float:
    scale = config.qk_head_dim**-0.5
    if config.uses_yarn:
        m = 0.1 * config.mscale * math.log(config.rope_factor) + 1
        scale *= m * m
    return scale


def rotate(x: Tensor, angles_BSr: Tensor) -> Tensor:
    """Turns each adjacent pair (2i, 2i+1) of the last dim. x: [B, S, heads, rope]; angles: [B, S, rope/2]."""
    cos, sin = angles_BSr.cos().unsqueeze(2).to(x.dtype), angles_BSr.sin().unsqueeze(2).to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def documents(config: Config, inputs_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the position of every token and the attention mask, [B, S] and [B, S, S] (True: query may see key).

    With "block_causal" the token after an EOS opens a document. The EOS belongs to the document that it ends.
    """
    B, S = inputs_BS.shape
    idx_S = torch.arange(S)
    causal_SS = idx_S[:, None] >= idx_S[None, :]
    if config.attn_mask_type == "causal":
        return idx_S.expand(B, S), causal_SS.expand(B, S, S)
    opens_BS = torch.zeros(B, S, dtype=torch.bool)
    opens_BS[:, 1:] = inputs_BS[:, :-1] == config.eos_id
    document_BS = opens_BS.long().cumsum(1)
    start_BS = torch.where(opens_BS, idx_S, 0).cummax(1).values
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return idx_S - start_BS, causal_SS & same_BSS


# ----------------------------------------------------------------------------------------------------- layers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ w2.T


def attention(
    config: Config,
    params: dict[str, Tensor],
    prefix: str,
    x_BSD: Tensor,
    angles_BSr: Tensor,
    mask_BSS: Tensor,
) -> Tensor:
    """Computes multi-head latent attention. Queries and keys are [nope | rope], and the heads share k_rope."""
    c, H = config, config.n_heads
    B, S, _ = x_BSD.shape
    if c.q_lora_rank == 0:
        q = x_BSD @ params[f"{prefix}.wq.weight"].T
    else:
        c_q = x_BSD @ params[f"{prefix}.wq_a.weight"].T
        q = rms_norm(c_q, params[f"{prefix}.q_norm.weight"], c.norm_eps) @ params[f"{prefix}.wq_b.weight"].T
    q_nope, q_rope = q.view(B, S, H, c.qk_head_dim).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    q_BSHd = torch.cat((q_nope, rotate(q_rope, angles_BSr)), dim=-1)

    kv_a = x_BSD @ params[f"{prefix}.wkv_a.weight"].T
    c_kv, k_rope = kv_a.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    kv = rms_norm(c_kv, params[f"{prefix}.kv_norm.weight"], c.norm_eps) @ params[f"{prefix}.wkv_b.weight"].T
    k_nope, v_BSHd = kv.view(B, S, H, -1).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    k_rope = rotate(k_rope.unsqueeze(2), angles_BSr).expand(B, S, H, c.qk_rope_head_dim)
    k_BSHd = torch.cat((k_nope, k_rope), dim=-1)

    scores_BHSS = torch.einsum("bqhd,bkhd->bhqk", q_BSHd, k_BSHd) * softmax_scale(c)
    scores_BHSS = scores_BHSS.masked_fill(~mask_BSS.unsqueeze(1), -math.inf)
    out_BSHd = torch.einsum("bhqk,bkhd->bqhd", scores_BHSS.softmax(-1), v_BSHd)
    return out_BSHd.reshape(B, S, H * c.v_head_dim) @ params[f"{prefix}.wo.weight"].T


def best(values: Tensor, k: int) -> tuple[Tensor, float]:
    """Returns the indices of the k largest of the last dim, with ties to the lower index, and the smallest gap to the
    next one."""
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    gap = math.inf
    if k < values.shape[-1]:
        gap = (ordered[..., k - 1] - ordered[..., k]).min().item()
    return order[..., :k], gap


@dataclass
class Routing:
    """The decisions of the router of one MoE layer in one micro-batch."""

    expert_TK: Tensor
    weight_TK: Tensor
    count_E: Tensor  # token slots per expert
    balance: Tensor  # sum over the micro-batch's sequences of sum_i f_i P_i, before the coefficient
    min_gap: float  # how close any discrete choice was to another result


def sequence_balance(config: Config, scores_BSE: Tensor) -> tuple[Tensor, float]:
    """Computes DeepSeek-V3's eq. 17-20 without alpha: the sum over sequences of sum_i f_i P_i.

    f_i = E / (K S) * how often expert i is among the K best *unbiased, ungrouped* scores of a token
    (a constant for gradients);
    P_i = mean over the sequence of s_i / sum_j s_j.
    """
    E, K = config.num_experts, config.top_k
    S = scores_BSE.shape[1]
    chosen_BSK, gap = best(scores_BSE.detach(), K)
    hits_BE = torch.nn.functional.one_hot(chosen_BSK, E).sum(dim=(1, 2))
    f_BE = hits_BE.to(scores_BSE.dtype) * E / (K * S)
    p_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).mean(dim=1)
    return (f_BE * p_BE).sum(), gap


def route(config: Config, gate_ED: Tensor, bias_E: Tensor, x_BSD: Tensor) -> Routing:
    c, E, K = config, config.num_experts, config.top_k
    B, S, D = x_BSD.shape
    logits_TE = x_BSD.reshape(B * S, D) @ gate_ED.T
    scores_TE = logits_TE.sigmoid() if c.score_func == "sigmoid" else logits_TE.softmax(-1)

    min_gap = math.inf
    if c.moe_force_load_balance:
        slots = torch.arange(B * S * K).view(B * S, K)
        expert_TK = slots % E
    else:
        biased_TE = scores_TE.detach() + bias_E
        if c.n_expert_groups > 0:
            # A group's score is the sum of its two best experts' scores. Experts outside the best groups are excluded.
            biased_TGe = biased_TE.view(B * S, c.n_expert_groups, -1)
            group_TG = biased_TGe.topk(min(2, biased_TGe.shape[-1]), dim=-1).values.sum(-1)
            kept_Tg, min_gap = best(group_TG, c.n_limited_groups)
            kept_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter(1, kept_Tg, True)
            biased_TE = biased_TGe.masked_fill(~kept_TG.unsqueeze(-1), -math.inf).view(B * S, E)
        expert_TK, gap = best(biased_TE, K)
        min_gap = min(min_gap, gap)

    weight_TK = scores_TE.gather(1, expert_TK)
    if c.route_norm:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    weight_TK = weight_TK * c.route_scale

    balance = scores_TE.new_zeros(())
    if c.seq_balance_loss_coeff > 0:
        balance, gap = sequence_balance(c, scores_TE.view(B, S, E))
        min_gap = min(min_gap, gap)
    return Routing(expert_TK, weight_TK, torch.bincount(expert_TK.flatten(), minlength=E), balance, min_gap)


def moe(config: Config, params: dict[str, Tensor], prefix: str, x_BSD: Tensor, routing: Routing) -> Tensor:
    """Adds the shared experts' output and the weighted outputs of the chosen experts. No token is dropped."""
    x_TD = x_BSD.reshape(-1, config.dim)
    out_TD = torch.zeros_like(x_TD)
    if config.num_shared_experts > 0:
        shared = f"{prefix}.shared_experts"
        out_TD = swiglu(x_TD, params[f"{shared}.w13.weight"], params[f"{shared}.w2.weight"])
    for e in range(config.num_experts):
        token, slot = torch.where(routing.expert_TK == e)
        y = swiglu(x_TD[token], params[f"{prefix}.experts.w13"][e], params[f"{prefix}.experts.w2"][e])
        out_TD = out_TD.index_add(0, token, y * routing.weight_TK[token, slot].unsqueeze(-1))
    return out_TD.view_as(x_BSD)


# --------------------------------------------------------------------------------------------- model and loss


@dataclass
class Output:
    logits_BSV: Tensor
    mtp_logits: list[Tensor]  # one [B, S, V] per MTP module; row i predicts token i + k + 2
    routing: dict[str, Routing]  # by MoE prefix


def forward(config: Config, params: dict[str, Tensor], buffers: dict[str, Tensor], tokens: Tensor) -> Output:
    """Computes the logits of tokens [B, S+1]. The first S are the inputs. The last one is only a target or an MTP
    input."""
    c, S = config, tokens.shape[1] - 1
    inputs_BS = tokens[:, :S]
    position_BS, mask_BSS = documents(c, inputs_BS)
    angles_BSr = position_BS.unsqueeze(-1).double() * rope_frequencies(c)
    routing: dict[str, Routing] = {}

    def block(prefix: str, is_moe: bool, x: Tensor) -> Tensor:
        h = rms_norm(x, params[f"{prefix}.attention_norm.weight"], c.norm_eps)
        x = x + attention(c, params, f"{prefix}.attention", h, angles_BSr, mask_BSS)
        h = rms_norm(x, params[f"{prefix}.ffn_norm.weight"], c.norm_eps)
        if not is_moe:
            ffn = f"{prefix}.feed_forward"
            return x + swiglu(h, params[f"{ffn}.w13.weight"], params[f"{ffn}.w2.weight"])
        name = f"{prefix}.moe"
        routing[name] = route(c, params[f"{name}.router.gate.weight"], buffers[f"{name}.expert_bias"], h)
        return x + moe(c, params, name, h, routing[name])

    def head(x: Tensor, norm: str) -> Tensor:
        return rms_norm(x, params[norm], c.norm_eps) @ params["output.weight"].T

    embedding = params["tok_embeddings.weight"]
    hidden = embedding[inputs_BS]
    for i in range(c.n_layers):
        hidden = block(f"layers.{i}", c.is_moe(i), hidden)
    logits = head(hidden, "norm.weight")

    # In MTP module k, position i combines the hidden state after token i with the embedding of token i + k + 1. Past
    # the end there is no such token. These positions take the last token, and the loss ignores them.
    mtp_logits = []
    for k in range(c.num_mtp_modules):
        ahead = (torch.arange(S) + k + 1).clamp(max=S)
        e = rms_norm(embedding[tokens[:, ahead]], params[f"mtp.{k}.embedding_norm.weight"], c.norm_eps)
        h = rms_norm(hidden, params[f"mtp.{k}.hidden_norm.weight"], c.norm_eps)
        hidden = torch.cat((e, h), dim=-1) @ params[f"mtp.{k}.eh_proj.weight"].T
        hidden = block(f"mtp.{k}.block", c.has_moe, hidden)
        mtp_logits.append(head(hidden, f"mtp.{k}.norm.weight"))
    return Output(logits, mtp_logits, routing)


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    valid = labels_BS != IGNORED
    log_p = logits_BSV[valid].log_softmax(-1)
    return -log_p.gather(1, labels_BS[valid].unsqueeze(1)).sum()


def mtp_labels(labels_BS: Tensor, k: int) -> Tensor:
    """Shifts the labels: position i of module k predicts token i + k + 2, the main label of position i + k + 1."""
    shifted = torch.full_like(labels_BS, IGNORED)
    shifted[:, : labels_BS.shape[1] - k - 1] = labels_BS[:, k + 1 :]
    return shifted


@dataclass
class Losses:
    total: Tensor
    main: Tensor
    mtp: Tensor  # mean over the modules, before its weight is applied
    balance: Tensor  # after its coefficient is applied

    def stacked(self) -> Tensor:
        return torch.stack([self.total, self.main, self.mtp, self.balance]).detach().double()


def loss(config: Config, output: Output, labels_BS: Tensor, num_valid: int, num_sequences: int) -> Losses:
    """Returns a micro-batch's part of the step's loss.

    num_valid (the main labels that count) and num_sequences are those of the whole step, over all its micro-batches.
    Every cross-entropy term, also of the MTP modules, is a sum divided by the same num_valid.
    """
    c = config
    main = cross_entropy_sum(output.logits_BSV, labels_BS) / num_valid
    mtp, balance = torch.zeros_like(main), torch.zeros_like(main)
    for k, logits in enumerate(output.mtp_logits):
        term = cross_entropy_sum(logits, mtp_labels(labels_BS, k)) / num_valid
        mtp = mtp + term / c.num_mtp_modules
    for routing in output.routing.values():
        balance = balance + c.seq_balance_loss_coeff * routing.balance / num_sequences
    return Losses(main + c.mtp_loss_weight * mtp + balance, main, mtp, balance)


# ---------------------------------------------------------------------------------------------- training step


def lr_factor(train: TrainConfig, step: int) -> float:
    """Returns the factor of the warm-up, stable or decay phase. `step` counts from 0."""
    warmup = min(train.warmup_steps, train.steps)
    decay = min(round(train.steps * train.decay_ratio), train.steps - warmup)
    stable = train.steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    p = (step + 1 - warmup - stable) / decay
    shapes = {"linear": 1 - p, "sqrt": 1 - math.sqrt(p), "cosine": 0.5 * (1 + math.cos(math.pi * p))}
    factor = shapes[train.decay_type]
    return train.min_lr_factor + (1 - train.min_lr_factor) * factor


@dataclass
class TrainState:
    """The float parameters, the buffers, and AdamW's moments. `step` is the number of finished steps."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    moment1: dict[str, Tensor]
    moment2: dict[str, Tensor]
    step: int = 0

    @staticmethod
    def start(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> TrainState:
        return TrainState(
            params={name: p.detach().clone().requires_grad_() for name, p in params.items()},
            buffers={name: b.clone() for name, b in buffers.items()},
            moment1={name: torch.zeros_like(p) for name, p in params.items()},
            moment2={name: torch.zeros_like(p) for name, p in params.items()},
        )


@dataclass
class StepResult:
    losses: Tensor  # [4]: total, main, mtp, balance
    grad_norm: float  # before clipping
    lr: float
    min_gap: float


def gradients(
    config: Config, params: dict[str, Tensor], buffers: dict[str, Tensor], tokens: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], list[Output]]:
    """Returns losses [4], gradients, expert counts and outputs of a step whose micro-batches are tokens[m],
    labels[m]."""
    num_valid = int((labels != IGNORED).sum())
    num_sequences = labels.shape[0] * labels.shape[1]
    losses = torch.zeros(4, dtype=torch.float64)
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    counts = {prefix: torch.zeros(config.num_experts, dtype=torch.long) for prefix in config.moe_prefixes()}
    outputs = []
    for tokens_BS1, labels_BS in zip(tokens.long(), labels.long(), strict=True):
        output = forward(config, params, buffers, tokens_BS1)
        part = loss(config, output, labels_BS, num_valid, num_sequences)
        part_grads = torch.autograd.grad(part.total, list(params.values()))
        for name, grad in zip(params, part_grads, strict=True):
            grads[name] += grad
        for prefix, routing in output.routing.items():
            counts[prefix] += routing.count_E
        losses += part.stacked()
        outputs.append(output)
    return losses, grads, counts, outputs


def updated_bias(config: Config, bias_E: Tensor, count_E: Tensor) -> Tensor:
    """Lowers the biases of busy experts and raises those of idle ones. The sum of the biases stays the same."""
    count = count_E.to(bias_E.dtype)
    delta = config.load_balance_coeff * torch.sign(count.mean() - count)
    return bias_E + delta - delta.mean()


def train_step(
    config: Config, train: TrainConfig, state: TrainState, tokens: Tensor, labels: Tensor
) -> StepResult:
    """Makes one optimizer step over micro-batches tokens [M, B, S+1], labels [M, B, S]. Changes `state` in place."""
    losses, grads, counts, outputs = gradients(config, state.params, state.buffers, tokens, labels)
    for prefix, count_E in counts.items():
        name = f"{prefix}.expert_bias"
        state.buffers[name] = updated_bias(config, state.buffers[name], count_E)

    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    clip = min(1.0, train.max_norm / (norm + 1e-6))
    lr = train.lr * lr_factor(train, state.step)
    state.step += 1
    with torch.no_grad():
        for name, p in state.params.items():
            g, m, v = grads[name] * clip, state.moment1[name], state.moment2[name]
            m.mul_(train.beta1).add_(g, alpha=1 - train.beta1)
            v.mul_(train.beta2).add_(g * g, alpha=1 - train.beta2)
            m_hat = m / (1 - train.beta1**state.step)
            v_hat = v / (1 - train.beta2**state.step)
            p.mul_(1 - lr * train.weight_decay)
            p.sub_(lr * m_hat / (v_hat.sqrt() + train.eps))
    min_gap = min((r.min_gap for o in outputs for r in o.routing.values()), default=math.inf)
    return StepResult(losses, norm, lr, min_gap)
