"""The peer: DeepSeek-V3 training on a CPU in PyTorch, tuned as an experienced PyTorch user would tune it.

Model and step are those of the engine's `debugmodel`: forward, cross-entropy, backward, expert-bias update, clipping to
norm 1, AdamW, on random tokens with causal attention and without recomputation. Prints one line of JSON. The defaults
are the fastest settings found that start at once. `--bf16 autocast --compile` gains about a tenth more in bfloat16
(nothing in float32), and needs a C++ compiler and up to half a minute. `--check FILE` compares loss and gradients with
a golden file instead.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


def use_avx512_in_mkl() -> bool:
    """Lets MKL take its AVX-512 kernels on CPUs of other makers, too. Returns whether that was done.

    PyTorch multiplies float32 matrices with MKL, which otherwise uses AVX2 there, at half the speed. MKL asks one
    function for the maker. The first loaded definition answers, so this runs before `import torch`.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return False
    text = cpuinfo.read_text()
    if "GenuineIntel" in text or "avx512vl" not in text:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "cpu.c"), Path(folder, "cpu.so")
        source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return True


MKL_AVX512 = "--stock-mkl" not in sys.argv and use_avx512_in_mkl()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402


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


# -------------------------------------------------------------------------------------------------- attention


class ChunkedAttention(torch.autograd.Function):
    """Computes causal attention by chunks of queries, each against the keys up to its end. Keeps the probabilities.

    PyTorch's CPU flash kernel requires equal head dims of keys and values, multiplies small tiles, and runs its
    backward slower than large batched products. The probabilities take B*H*S*S/2 elements per layer.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:  # each is [B, H, S, d]
        B, H, S, d = q.shape
        q, k, v = (t.reshape(B * H, S, -1) for t in (q, k, v))
        mask = torch.full((chunk, chunk), -math.inf, dtype=q.dtype).triu(1)
        probs, outs = [], []
        for begin in range(0, S, chunk):
            end = min(begin + chunk, S)
            bias = F.pad(mask[: end - begin, : end - begin], (begin, 0))
            scores = torch.baddbmm(bias, q[:, begin:end], k[:, :end].transpose(1, 2), alpha=d**-0.5)
            probs.append(scores.softmax(-1))
            outs.append(probs[-1] @ v[:, :end])
        ctx.save_for_backward(q, k, v, *probs)
        return torch.cat(outs, 1).view(B, H, S, -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *probs = ctx.saved_tensors
        B, H, S, _ = grad.shape
        grad = grad.reshape(B * H, S, -1)
        dqs, dk, dv, end = [], None, None, S
        for p in reversed(probs):  # the last chunk reads all keys, so it creates dk and dv
            begin = end - p.shape[1]
            dp = grad[:, begin:end] @ v[:, :end].transpose(1, 2)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(q.shape[-1] ** -0.5)
            dqs.append(ds @ k[:, :end])
            dv_part = p.transpose(1, 2) @ grad[:, begin:end]
            dk_part = ds.transpose(1, 2) @ q[:, begin:end]
            if dk is None:
                dk, dv = dk_part, dv_part
            else:
                dk[:, :end] += dk_part
                dv[:, :end] += dv_part
            end = begin
        dq = torch.cat(dqs[::-1], 1)
        return dq.view(B, H, S, -1), dk.view(B, H, S, -1), dv.view(B, H, S, -1), None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    if kind == "chunked":
        # float32 gains if more of the masked half is left out, and bfloat16 gains from larger products.
        return ChunkedAttention.apply(q, k, v, 128 if q.dtype == torch.float32 else 256)
    if kind == "flash":
        v_padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return F.scaled_dot_product_attention(q, k, v_padded, is_causal=True)[..., : v.shape[-1]]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # unequal head dims take the "math" path


# ------------------------------------------------------------------------------------------------------ model


class Linear(nn.Linear):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns adjacent pairs of the last dim, in float32. x is [B, S, heads, 2r]; rope is cos and sin, [2, S, r]."""
    cos, sin = rope.unsqueeze(2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        self.c, self.kind = c, kind
        self.wq = Linear(c.dim, c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.wkv_a = Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank, eps=c.norm_eps)
        self.wkv_b = Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.wo = Linear(c.n_heads * c.v_head_dim, c.dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        c, (B, S, _) = self.c, x.shape
        q = self.wq(x).view(B, S, c.n_heads, -1)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        q = torch.cat((q_nope, rotate(q_rope, rope)), -1)
        c_kv, k_rope = self.wkv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.wkv_b(self.kv_norm(c_kv)).view(B, S, c.n_heads, -1)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(2), rope).expand(-1, -1, c.n_heads, -1)
        k = torch.cat((k_nope, k_rope), -1)
        out = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.kind)
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

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.gate.weight.float()).softmax(-1)


class Experts(nn.Module):
    """Computes one GEMM pair per expert over the contiguous rows routed to it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_inter_dim, c.dim))
        self.w2 = nn.Parameter(torch.empty(c.num_experts, c.dim, c.moe_inter_dim))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        outs = []
        for x, w13, w2 in zip(rows.split(counts), self.w13.unbind(0), self.w2.unbind(0), strict=True):
            gate, up = F.linear(x, w13).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, w2))
        return torch.cat(outs)


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = Router(c)
        self.experts = Experts(c)
        self.shared_experts = FeedForward(c.dim, c.num_shared_experts * c.moe_inter_dim)
        # These are plain attributes and not buffers, so they stay float32 when the module is cast to bfloat16.
        self.expert_bias = torch.zeros(c.num_experts)
        self.counts = torch.zeros(c.num_experts, dtype=torch.int64)

    @torch.compiler.disable  # sizes depend on the data
    def routed(self, x: Tensor) -> Tensor:
        (T, D), K = x.shape, self.c.top_k
        scores = self.router(x)
        expert = (scores.detach() + self.expert_bias).topk(K, sorted=False).indices
        weight = scores.gather(1, expert)
        order = expert.flatten().argsort(stable=True)  # slots token * K + k, grouped by expert
        counts = torch.bincount(expert.flatten(), minlength=self.c.num_experts)
        self.counts += counts
        y = self.experts(x.index_select(0, order // K), counts.tolist())
        place = torch.empty_like(order)
        place[order] = torch.arange(T * K)
        y = y.index_select(0, place).view(T, K, D)
        return (y * weight.unsqueeze(-1).to(y.dtype)).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_experts(x) + self.routed(x.flatten(0, 1)).view_as(x)

    def update_bias(self) -> None:
        counts = self.counts.float()
        delta = self.c.load_balance_coeff * torch.sign(counts.mean() - counts)
        self.expert_bias += delta - delta.mean()
        self.counts.zero_()


class Block(nn.Module):
    def __init__(self, c: Config, layer_idx: int, attention: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c, attention)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        if layer_idx >= c.n_dense_layers:
            self.moe = MoE(c)
        else:
            self.feed_forward = FeedForward(c.dim, c.inter_dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        ffn = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, c: Config, seq_len: int, attention: str) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c, i, attention) for i in range(c.n_layers))
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.output = Linear(c.dim, c.vocab_size)
        freqs = c.rope_theta ** (-torch.arange(0, c.qk_rope_head_dim, 2) / c.qk_rope_head_dim)
        angles = torch.arange(seq_len).unsqueeze(1) * freqs
        self.rope = torch.stack((angles.cos(), angles.sin()))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(inputs)
        for layer in self.layers:
            x = layer(x, self.rope)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def init_weights(model: Model) -> None:
    for name, p in model.named_parameters():
        layer_idx = int(name.split(".")[1]) if name.startswith("layers.") else 0
        small = 0.02 / math.sqrt(2 * (layer_idx + 1))
        if p.ndim == 1:
            nn.init.ones_(p)
        elif name == "tok_embeddings.weight":
            nn.init.normal_(p)
        elif name == "output.weight":
            std = p.shape[1] ** -0.5
            nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        elif "w13" in name:
            nn.init.trunc_normal_(p, std=0.02)
            p.chunk(2, dim=-2)[1].mul_(small / 0.02)  # the up half
        else:
            is_small = any(part in name for part in (".wo.", ".w2", ".gate."))
            nn.init.trunc_normal_(p, std=small if is_small else 0.02)


# --------------------------------------------------------------------------------------------------- training


class Trainer:
    """Makes training steps in float32, under autocast, or with bfloat16 weights beside float32 masters."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self.moes = [m for m in model.modules() if isinstance(m, MoE)]
        self.masters = list(model.parameters())
        low = args.dtype == "bfloat16"
        self.has_masters = low and args.bf16 == "master"
        if self.has_masters:
            self.masters = [p.detach().clone() for p in self.masters]
            for master in self.masters:
                master.grad = torch.empty_like(master)
            model.to(torch.bfloat16)
        use_autocast = low and args.bf16 == "autocast"
        self.context = torch.autocast("cpu", torch.bfloat16) if use_autocast else contextlib.nullcontext()
        self.weights = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        )
        self.model = torch.compile(model) if args.compile else model

    def step(self, tokens: Tensor) -> float:
        with self.context:
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        with torch.no_grad():
            for moe in self.moes:
                moe.update_bias()
            if self.has_masters:
                torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.weights])
            nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
            self.optimizer.step()
            if self.has_masters:
                torch._foreach_copy_(self.weights, self.masters)
            for p in self.weights:
                p.grad = None
        return loss.item()


def keep_freed_memory() -> None:
    """Makes glibc reuse large blocks instead of returning them, which saves page faults in every step."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def check(path: Path, attention: str) -> None:
    """Compares loss and gradients in float32 with a golden file (a causal one with an ungrouped softmax router)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "reference"))
    import deepseek_v3
    import safetensors_io

    tensors, metadata = safetensors_io.load(path)
    golden, _ = deepseek_v3.from_toml(metadata["config"])
    c = Config(**{name: getattr(golden, name) for name in Config.__dataclass_fields__})
    model = Model(c, golden.seq_len, attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(tensors[f"param.{name}"]))
    tokens = torch.tensor(tensors["tokens"]).long()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.testing.assert_close(loss.item(), float(tensors["loss"][0]), rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensor(tensors[f"grad.{name}"]), rtol=1e-3, atol=1e-5)
    print(f"{path.stem}: loss and {len(list(model.parameters()))} gradients agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", choices=FLAVORS, default="debugmodel")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--bf16", choices=["master", "autocast"], default="master")
    parser.add_argument("--attention", choices=["chunked", "flash", "math"], default="chunked")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--stock-mkl", action="store_true", help="leave MKL's choice of kernels alone")
    parser.add_argument(
        "--profile", action="store_true", help="print the costliest operators of one more step"
    )
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with a file of tests/golden")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.check:
        check(args.check, args.attention)
        return

    keep_freed_memory()
    torch.manual_seed(1)
    c = FLAVORS[args.flavor]
    model = Model(c, args.seq_len, args.attention)
    init_weights(model)
    trainer = Trainer(model, args)
    losses, seconds = [], []
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(c.vocab_size, (args.batch_size, args.seq_len + 1))
        start = time.perf_counter()
        losses.append(trainer.step(tokens))
        seconds.append(time.perf_counter() - start)

    median = statistics.median(seconds[args.warmup :])
    tokens_per_step = args.batch_size * args.seq_len
    result = {
        "dtype": args.dtype,
        "threads": args.threads,
        "tokens_per_s": round(tokens_per_step / median, 1),
        "step_ms": round(median * 1e3, 1),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "best_tokens_per_s": round(tokens_per_step / min(seconds[args.warmup :]), 1),
        "first_step_s": round(seconds[0], 1),
        "attention": args.attention,
        "bf16": args.bf16 if args.dtype == "bfloat16" else None,
        "compile": args.compile,
        "mkl_avx512": MKL_AVX512,
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.step(tokens)
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
        print(table, file=sys.stderr)


if __name__ == "__main__":
    main()
