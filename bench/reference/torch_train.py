"""The peer: DeepSeek-V3 training on a CPU in PyTorch, tuned as an experienced PyTorch user would tune it.

Same model and same step as the engine's `debugmodel`: forward, cross-entropy, backward, expert-bias update, clipping
to norm 1, AdamW, on random tokens with causal attention and without recomputation. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 2048
    dim: int = 256
    inter_dim: int = 1024
    moe_inter_dim: int = 256
    n_layers: int = 6
    n_dense_layers: int = 1
    n_heads: int = 16
    norm_eps: float = 1e-5
    num_experts: int = 8
    num_shared_experts: int = 2
    top_k: int = 3
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    load_balance_coeff: float = 1e-3


FLAVORS = {"debugmodel": Config()}


class Linear(nn.Linear):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)


class ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, n):
        B, H, S, d = q.shape
        q, k, v = (t.reshape(B * H, S, t.shape[-1]) for t in (q, k, v))
        C = S // n
        mask = torch.full((C, C), -math.inf, dtype=q.dtype).triu(1)
        probs, outs = [], []
        for i in range(n):
            end = (i + 1) * C
            m = F.pad(mask, (i * C, 0))
            p = torch.baddbmm(m, q[:, end - C : end], k[:, :end].transpose(1, 2), alpha=d**-0.5).softmax(-1)
            probs.append(p)
            outs.append(p @ v[:, :end])
        ctx.save_for_backward(q, k, v, *probs)
        return torch.cat(outs, 1).view(B, H, S, -1)

    @staticmethod
    def backward(ctx, do):
        q, k, v, *probs = ctx.saved_tensors
        B, H, S, _ = do.shape
        do = do.reshape(B * H, S, -1)
        scale = q.shape[-1] ** -0.5
        C = S // len(probs)
        dq, dk, dv = [], None, None
        for i in range(len(probs) - 1, -1, -1):
            end = (i + 1) * C
            p, do_i, q_i = probs[i], do[:, end - C : end], q[:, end - C : end]
            ds = torch._softmax_backward_data(do_i @ v[:, :end].transpose(1, 2), p, -1, p.dtype).mul_(scale)
            dq.append(ds @ k[:, :end])
            if dk is None:
                dv, dk = p.transpose(1, 2) @ do_i, ds.transpose(1, 2) @ q_i
            else:
                dv[:, :end] += p.transpose(1, 2) @ do_i
                dk[:, :end] += ds.transpose(1, 2) @ q_i
        dq = torch.cat(dq[::-1], 1)
        return dq.view(B, H, S, -1), dk.view(B, H, S, -1), dv.view(B, H, S, -1), None


class Attention(nn.Module):
    kind = "flash"
    rope = "real"

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.wq = Linear(c.dim, c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.wkv_a = Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank, eps=c.norm_eps)
        self.wkv_b = Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.wo = Linear(c.n_heads * c.v_head_dim, c.dim)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.rope == "complex":
            z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(z * torch.view_as_complex(rope.movedim(0, -1).contiguous())[:, None]).flatten(-2).to(x.dtype)
        cos, sin = rope[0][:, None], rope[1][:, None]
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        c, (B, S, _) = self.c, x.shape
        q_nope, q_rope = self.wq(x).view(B, S, c.n_heads, -1).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        q = torch.cat((q_nope, self.rotate(q_rope, rope)), -1)
        c_kv, k_rope = self.wkv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.wkv_b(self.kv_norm(c_kv)).view(B, S, c.n_heads, -1)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = self.rotate(k_rope.unsqueeze(2), rope).expand(-1, -1, c.n_heads, -1)
        k = torch.cat((k_nope, k_rope), -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.kind == "flash":
            pad = q.shape[-1] - v.shape[-1]
            out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, pad)), is_causal=True)[..., : c.v_head_dim]
        elif self.kind.startswith("fn"):
            out = ChunkedAttention.apply(q, k, v, int(self.kind[2:]))
        elif self.kind.startswith("chunk"):
            n = int(self.kind[5:]); C = S // n
            H, d = c.n_heads, q.shape[-1]
            q, k, v = (t.reshape(B * H, S, t.shape[-1]) for t in (q, k, v))
            mask = torch.full((C, C), -math.inf, dtype=q.dtype).triu(1)
            outs = []
            for i in range(n):
                end = (i + 1) * C
                m = F.pad(mask, (i * C, 0))
                s = torch.baddbmm(m, q[:, end - C : end], k[:, :end].transpose(1, 2), alpha=d**-0.5)
                outs.append(s.softmax(-1) @ v[:, :end])
            out = torch.cat(outs, 1).view(B, H, S, -1)
        elif self.kind == "math":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            m = torch.ones(S, S, dtype=torch.bool).tril()
            out = s.masked_fill(~m, -math.inf).float().softmax(-1).to(v.dtype) @ v
        return self.wo(out.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w13 = Linear(dim, 2 * hidden)
        self.w2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)


class Router(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = Linear(c.dim, c.num_experts)


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_inter_dim, c.dim))
        self.w2 = nn.Parameter(torch.empty(c.num_experts, c.dim, c.moe_inter_dim))


class MoE(nn.Module):
    kind = "loop"
    combine = "gather"

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = Router(c)
        self.experts = Experts(c)
        self.shared_experts = FeedForward(c.dim, c.num_shared_experts * c.moe_inter_dim)
        self.register_buffer("expert_bias", torch.zeros(c.num_experts, dtype=torch.float32))
        self.counts = torch.zeros(c.num_experts, dtype=torch.int64)

    @torch.compiler.disable
    def routed(self, x: Tensor) -> Tensor:
        T, D = x.shape
        K, E = self.c.top_k, self.c.num_experts
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.router.gate.weight.float()).softmax(-1)
        expert = (scores.detach() + self.expert_bias).topk(K, sorted=False).indices
        weight = scores.gather(1, expert).flatten()
        order = expert.flatten().argsort(stable=True)  # slots (token * K + k), grouped by expert
        counts = torch.bincount(expert.flatten(), minlength=E)
        self.counts += counts
        rows = x.index_select(0, order // K)
        if self.kind == "grouped":
            offs = counts.cumsum(0).to(torch.int32)
            rows = rows.to(torch.bfloat16)
            gate, up = torch._grouped_mm(rows, self.experts.w13.to(rows.dtype).transpose(1, 2), offs=offs).chunk(2, -1)
            y = torch._grouped_mm(F.silu(gate) * up, self.experts.w2.to(rows.dtype).transpose(1, 2), offs=offs)
        else:
            outs = []
            for part, w13, w2 in zip(rows.split(counts.tolist()), self.experts.w13.unbind(0), self.experts.w2.unbind(0)):
                gate, up = F.linear(part, w13).chunk(2, -1)
                outs.append(F.linear(F.silu(gate) * up, w2))
            y = torch.cat(outs)
        if self.combine == "gather":
            place = torch.empty_like(order)
            place[order] = torch.arange(T * K)
            y = y.index_select(0, place).view(T, K, D)
            return (y * weight.view(T, K, 1).to(y.dtype)).sum(1)
        y = y * weight.index_select(0, order).unsqueeze(-1).to(y.dtype)
        return torch.zeros(T, D, dtype=y.dtype).index_add(0, order // K, y)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_experts(x) + self.routed(x.view(-1, x.shape[-1])).view_as(x)

    def update_bias(self) -> None:
        counts = self.counts.float()
        delta = self.c.load_balance_coeff * torch.sign(counts.mean() - counts)
        self.expert_bias += delta - delta.mean()
        self.counts.zero_()


class Block(nn.Module):
    def __init__(self, c: Config, moe: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        if moe:
            self.moe = MoE(c)
        else:
            self.feed_forward = FeedForward(c.dim, c.inter_dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        ffn = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, c: Config, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c, i >= c.n_dense_layers) for i in range(c.n_layers))
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.output = Linear(c.dim, c.vocab_size)
        freqs = c.rope_theta ** (-torch.arange(0, c.qk_rope_head_dim, 2) / c.qk_rope_head_dim)
        angles = torch.arange(seq_len).unsqueeze(1) * freqs
        self.rope = torch.stack((angles.cos(), angles.sin()))  # [2, S, rope/2], stays float32

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(inputs)
        for layer in self.layers:
            x = layer(x, self.rope)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def init_weights(model: Model) -> None:
    for name, p in model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        small = 0.02 / math.sqrt(2 * (layer + 1))
        if p.ndim == 1:
            nn.init.ones_(p)
        elif name == "tok_embeddings.weight":
            nn.init.normal_(p)
        elif name == "output.weight":
            std = p.shape[1] ** -0.5
            nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        elif "w13" in name:
            nn.init.trunc_normal_(p, std=0.02)
            with torch.no_grad():
                p.chunk(2, dim=-2)[1].mul_(small / 0.02)
        else:
            is_small = any(part in name for part in (".wo.", ".w2", ".gate."))
            nn.init.trunc_normal_(p, std=small if is_small else 0.02)


def check(path: Path) -> None:
    """Loss and gradients in float32 against a golden file of tests/golden (softmax router, causal, no groups)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "reference"))
    import deepseek_v3
    import safetensors_io

    tensors, metadata = safetensors_io.load(path)
    golden, _ = deepseek_v3.from_toml(metadata["config"])
    c = Config(**{name: getattr(golden, name) for name in Config.__dataclass_fields__})
    model = Model(c, golden.seq_len)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(tensors[f"param.{name}"]))
    tokens = torch.tensor(tensors["tokens"]).long()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert math.isclose(loss.item(), tensors["loss"][0], rel_tol=1e-5), (loss.item(), tensors["loss"][0])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensor(tensors[f"grad.{name}"]), rtol=1e-3, atol=1e-5)
    print(f"{path.stem}: loss and {len(list(model.parameters()))} gradients agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", choices=FLAVORS, default="debugmodel")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--bf16", choices=["autocast", "master"], default="master")
    parser.add_argument("--attention", default="flash")
    parser.add_argument("--moe", default="loop")
    parser.add_argument("--combine", default="gather")
    parser.add_argument("--rope", default="real")
    parser.add_argument("--malloc", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", type=Path)
    args = parser.parse_args()
    if args.malloc:
        import ctypes
        libc = ctypes.CDLL(None)
        print(libc.mallopt(-3, 1 << 30), libc.mallopt(-1, 2**31 - 1), libc.mallopt(-2, 256<<20), file=sys.stderr)
    if args.threads:
        torch.set_num_threads(args.threads)
    Attention.kind, Attention.rope, MoE.kind, MoE.combine = args.attention, args.rope, args.moe, args.combine
    if args.check:
        check(args.check)
        return
    torch.manual_seed(1)
    c = FLAVORS[args.flavor]
    model = Model(c, args.seq_len)
    init_weights(model)

    low = args.dtype == "bfloat16"
    masters = list(model.parameters())
    if low and args.bf16 == "master":
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        bias = {n: b.clone() for n, b in model.named_buffers()}
        model.to(torch.bfloat16)
        for n, b in model.named_buffers():
            b.data = bias[n]
    work = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if low and args.bf16 == "autocast" else contextlib.nullcontext()
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    run = torch.compile(model) if args.compile else model

    def step(tokens: Tensor) -> float:
        with autocast:
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for moe in moes:
            moe.update_bias()
        if masters[0] is not work[0]:
            with torch.no_grad():
                if masters[0].grad is None:
                    for m in masters:
                        m.grad = torch.empty_like(m)
                torch._foreach_copy_([m.grad for m in masters], [p.grad for p in work])
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        if masters[0] is not work[0]:
            with torch.no_grad():
                torch._foreach_copy_(work, masters)
        for p in work:
            p.grad = None
        return loss.item()

    losses, times = [], []
    batches = [torch.randint(c.vocab_size, (args.batch_size, args.seq_len + 1)) for _ in range(args.warmup + args.steps)]
    t0 = time.perf_counter()
    for i, tokens in enumerate(batches):
        start = time.perf_counter()
        losses.append(step(tokens))
        if i >= args.warmup:
            times.append(time.perf_counter() - start)
        elif i == 0:
            first = time.perf_counter() - t0
    if args.profile:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            step(batches[0])
        print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50), file=sys.stderr)
    t = statistics.median(times)
    print(json.dumps({"dtype": args.dtype, "threads": torch.get_num_threads(), "tokens_per_s": round(args.batch_size * args.seq_len / t, 1),
        "step_ms": round(t * 1e3, 1), "loss_first": losses[0], "loss_last": losses[-1], "first_step_s": round(first,1), "min_ms": round(min(times)*1e3,1), "best": round(args.batch_size * args.seq_len / min(times), 1)}))


if __name__ == "__main__":
    main()
