"""A model that Tessera trained, for transformers: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

DeepSeek-V3's layers (arXiv 2412.19437), computed as in training. Unlike transformers' DeepseekV2 and DeepseekV3, the
router takes softmax and sigmoid scores with an expert bias, and all norms have the model's epsilon. Shapes: B sequences
of S tokens, P keys (with those of the cache), D numbers per token, H heads, T = B * S tokens, E experts, K per token.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_tessera import TesseraConfig


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


def rope_angles(config, positions):
    """Returns cosines and sines [B, 1, S, R / 2], one per pair of numbers. YaRN (arXiv 2309.00071) slows slow pairs."""
    size = config.qk_rope_head_dim
    pair = torch.arange(size // 2, dtype=torch.float64, device=positions.device)
    frequencies = config.rope_theta ** (-2 * pair / size)
    if config.yarn is not None:
        yarn = config.yarn

        def pair_with(turns):  # the pair that makes this many turns over the original length
            length = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return size * math.log(length) / (2 * math.log(config.rope_theta))

        low = max(math.floor(pair_with(yarn["beta_fast"])), 0)
        high = min(math.ceil(pair_with(yarn["beta_slow"])), size - 1)
        slowed = ((pair - low) / (high - low or 0.001)).clamp(0, 1)
        frequencies = frequencies * (1 - slowed) + frequencies / yarn["factor"] * slowed
    angles = positions[:, None, :, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x, angles):
    """Rotates adjacent pairs of x [B, H, S, R]."""
    cos, sin = angles
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        heads, dim, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(dim, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        kv_dim = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * kv_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, dim, bias=False)
        self.scale = head_dim**-0.5
        if config.yarn is not None:
            self.scale *= (0.1 * config.yarn["mscale"] * math.log(config.yarn["factor"]) + 1) ** 2

    def forward(self, x, angles, mask, cache):
        config = self.config
        by_head = lambda y: y.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)  # [B, H, S, ...]
        rope = config.qk_rope_head_dim
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = by_head(q).split((config.qk_nope_head_dim, rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, rope), -1)
        k_nope, v = by_head(self.kv_b_proj(self.kv_a_layernorm(latent))).split(
            (config.qk_nope_head_dim, config.v_head_dim), -1
        )
        k_rope = rotate(k_rope[:, None], angles).expand(-1, config.num_attention_heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, angles)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False)

    def forward(self, x):
        """Returns the experts [T, K] that each token of x [T, D] goes to, and their weights."""
        config = self.config
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(-1)
        biased = scores + self.e_score_correction_bias.float()  # only for the choice of experts
        if config.n_group > 1:
            grouped = biased.unflatten(-1, (config.n_group, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(-1, group_scores.topk(config.topk_group).indices, True)
            biased = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
        experts = biased.topk(config.num_experts_per_tok).indices
        weights = scores.gather(-1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


class MixtureOfExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = nn.ModuleList(FeedForward(dim, inner) for _ in range(config.n_routed_experts))
        if config.n_shared_experts > 0:
            self.shared_experts = FeedForward(dim, inner * config.n_shared_experts)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        chosen, weights = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            weighted = self.experts[expert](tokens[token]) * weights[token, slot, None]
            out.index_add_(0, token, weighted.to(out.dtype))
        out = out.view_as(x)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        is_dense = layer < config.first_k_dense_replace
        self.input_layernorm = RMSNorm(dim, eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = FeedForward(dim, config.intermediate_size) if is_dense else MixtureOfExperts(config)

    def forward(self, x, angles, mask, cache):
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TesseraForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TesseraConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules = ["e_score_correction_bias"]
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]

    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Modules of multi-token prediction, which follow the last layer, are for training only.
        first = config.num_hidden_layers
        modules = range(first, first + config.num_nextn_predict_layers)
        self._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\." for layer in modules]
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,  # [B, P]; 0: padding
        position_ids=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        logits_to_keep=0,
        **ignored,
    ):
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        num_past = 0 if past_key_values is None else past_key_values.get_seq_length()
        batch, num_new = input_ids.shape
        keys = torch.arange(num_past + num_new, device=input_ids.device)
        mask = (keys <= keys[num_past:, None])[None, None]  # [B, 1, S, P]
        positions = keys[None]
        if attention_mask is not None:
            # A padding token attends to itself, so that its softmax is defined.
            mask = mask & (attention_mask[:, None, None].bool() | (keys == keys[num_past:, None]))
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        if position_ids is None:
            position_ids = positions[:, -num_new:].expand(batch, -1)
        angles = rope_angles(self.config, position_ids)

        x = self.model.embed_tokens(input_ids)
        for block in self.model.layers:
            x = block(x, angles, mask, past_key_values)
        x = self.model.norm(x[:, -logits_to_keep:])
        logits = self.lm_head(x).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
