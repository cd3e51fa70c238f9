"""Computes the golden files of tests/golden with the reference in deepseek_v3.py, and checks the reference.

    python make_goldens.py            # self-checks, then rewrites every file of tests/golden
    python make_goldens.py --check    # self-checks, then compares with the files there; writes nothing

Parameters are drawn from a fixed seed and rounded to float32; everything after that is computed in float64
and stored as float32 (losses as float64). README.md lists what a file holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import deepseek_v3 as ds
import safetensors_io

GOLDEN_DIR = Path(__file__).resolve().parent.parent / "golden"

# A discrete choice (expert, group, top-k of the balance loss) that is closer than this may differ in float32. The
# tokens of a case are drawn again until no choice is that close. Ten steps drift further.
MIN_GAP = 2e-4
MIN_GAP_TRAIN = 5e-4

# YaRN at toy size. With these values, 12 rotary dims and original_seq_len 12, the pairs' ramp is 0, 1/2, 1, 1, 1, 1.
YARN = dict(qk_rope_head_dim=12, original_seq_len=12, rope_theta=10.0, rope_factor=40.0, mscale=0.7)


@dataclasses.dataclass(frozen=True)
class Case:
    config: ds.Config
    masked_labels: bool = False  # some labels are -100
    random_bias: bool = False  # expert biases change the selection instead of being zeros
    idle_expert: bool = False  # the last expert's bias is so low that it gets no token
    why: str = ""


CASES = {
    "dense": Case(
        ds.Config(n_layers=2, n_dense_layers=2, inter_dim=40),
        why="no MoE layer, plain query projection, causal",
    ),
    "q_lora_yarn": Case(
        ds.Config(n_dense_layers=2, q_lora_rank=20, seq_len=24, **YARN),
        masked_labels=True,
        why="low-rank queries, YaRN frequencies and softmax scale, ignored labels",
    ),
    "block_causal": Case(
        ds.Config(attn_mask_type="block_causal", eos_id=2, seq_len=24, num_shared_experts=1, **YARN),
        why="document mask and positions with EOS at chunk edges and in a row, YaRN, softmax MoE",
    ),
    "moe_softmax": Case(
        ds.Config(n_layers=3),
        why="two MoE layers, softmax scores, two shared experts",
    ),
    "moe_sigmoid_groups": Case(
        ds.Config(
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.5,
            n_expert_groups=4,
            n_limited_groups=2,
            num_shared_experts=1,
            q_lora_rank=20,
        ),
        random_bias=True,
        why="the 671B router: sigmoid, normalised weights, groups, biases that change the choice",
    ),
    "moe_softmax_groups": Case(
        ds.Config(route_scale=16.0, n_expert_groups=4, n_limited_groups=3, q_lora_rank=20),
        why="the 236B router: softmax, groups, scale 16",
    ),
    "force_balance": Case(
        ds.Config(score_func="sigmoid", route_norm=True, route_scale=2.5, moe_force_load_balance=True),
        why="experts by position, weights by score",
    ),
    "balance_loss": Case(
        ds.Config(score_func="sigmoid", route_norm=True, seq_balance_loss_coeff=0.05),
        random_bias=True,
        idle_expert=True,
        why="sequence-wise balance loss, whose top-k is of the unbiased scores; an expert without tokens",
    ),
    "mtp": Case(
        ds.Config(num_mtp_modules=2, attn_mask_type="block_causal", eos_id=3, num_shared_experts=1),
        masked_labels=True,
        why="two MTP modules with MoE blocks, document mask, ignored labels",
    ),
    "odd_sizes": Case(
        ds.Config(
            vocab_size=37,
            dim=36,
            inter_dim=44,
            moe_inter_dim=20,
            n_heads=3,
            num_experts=6,
            num_shared_experts=1,
            top_k=2,
            q_lora_rank=18,
            kv_lora_rank=22,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=14,
            seq_len=19,
            local_batch_size=1,
        ),
        why="no size is a multiple of 16",
    ),
}

TRAIN_CONFIG = ds.Config(
    n_layers=2,
    score_func="sigmoid",
    route_norm=True,
    route_scale=2.5,
    n_expert_groups=4,
    n_limited_groups=2,
    num_shared_experts=1,
    q_lora_rank=20,
    num_mtp_modules=1,
    attn_mask_type="block_causal",
    eos_id=1,
    seq_balance_loss_coeff=0.01,
    seq_len=16,
)
TRAIN = ds.TrainConfig(lr=2e-3)


# ---------------------------------------------------------------------------------------------- random inputs


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_params(config: ds.Config, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns float64 tensors that hold float32 numbers. Their scales make every gradient large enough to matter."""
    params = {}
    for name, shape in ds.param_shapes(config).items():
        if len(shape) == 1:
            values = 1 + 0.4 * (torch.rand(shape, generator=rng) - 0.5)
        else:
            scale = 1.0 if name == "tok_embeddings.weight" else 2.5 if ".gate." in name else 1.2
            fan_in = 1 if name == "tok_embeddings.weight" else shape[-1]
            values = torch.randn(shape, generator=rng) * scale / math.sqrt(fan_in)
        params[name] = values.float().double()
    return params


def random_buffers(
    config: ds.Config, rng: torch.Generator, nonzero: bool, idle_last: bool = False
) -> dict[str, Tensor]:
    buffers = {}
    for name, shape in ds.buffer_shapes(config).items():
        buffers[name] = (0.2 * torch.randn(shape, generator=rng) * nonzero).double()
        if idle_last:
            buffers[name][-1] = -2.0  # lower than any sum of a score in (0, 1) and another bias
    return buffers


def random_tokens(config: ds.Config, rng: torch.Generator, *leading: int) -> Tensor:
    """Returns tokens [*leading, S+1]. Under a document mask, EOS appears at places that exercise the edges."""
    tokens = torch.randint(config.vocab_size, (*leading, config.seq_len + 1), generator=rng)
    if config.attn_mask_type == "block_causal":
        tokens[tokens == config.eos_id] = config.vocab_size - 1
        flat = tokens.view(-1, config.seq_len + 1)
        for row in range(flat.shape[0]):
            # Even rows have an EOS inside, two in a row, and one at the last input. Odd rows have one at the first
            # token and a late one.
            ends = (4, 9, 10, config.seq_len - 1) if row % 2 == 0 else (0, config.seq_len - 4)
            flat[row, list(ends)] = config.eos_id
    return tokens


def labels_of(tokens: Tensor, rng: torch.Generator, masked: bool) -> Tensor:
    labels = tokens[..., 1:].clone()
    if masked:
        labels[torch.rand(labels.shape, generator=rng) < 0.25] = ds.IGNORED
        labels[..., -1, -1] = ds.IGNORED
    return labels


# --------------------------------------------------------------------------------------------------- one step


def compute_case(name: str, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, np.ndarray]:
    config, rng = case.config, generator(name)
    params = random_params(config, rng)
    buffers = random_buffers(config, rng, case.random_bias, case.idle_expert)
    leaves = {key: p.to(dtype).requires_grad_() for key, p in params.items()}
    typed_buffers = {key: b.to(dtype) for key, b in buffers.items()}
    for _ in range(200):
        tokens = random_tokens(config, rng, config.local_batch_size)
        labels = labels_of(tokens, rng, case.masked_labels)
        losses, grads, counts, (output,) = ds.gradients(
            config, leaves, typed_buffers, tokens.unsqueeze(0), labels.unsqueeze(0)
        )
        gap = min((r.min_gap for r in output.routing.values()), default=math.inf)
        if gap > MIN_GAP:
            break
    assert gap > MIN_GAP, f"{name}: no batch without a near-tie"

    tensors = {f"param.{key}": as_f32(p) for key, p in params.items()}
    tensors |= {f"buffer.{key}": as_f32(b) for key, b in buffers.items()}
    tensors |= {"tokens": as_i32(tokens), "labels": as_i32(labels), "logits": as_f32(output.logits_BSV)}
    tensors |= {f"mtp_logits.{k}": as_f32(logits) for k, logits in enumerate(output.mtp_logits)}
    tensors |= {f"grad.{key}": as_f32(g) for key, g in grads.items()}
    tensors |= {f"expert_counts.{prefix}": as_i32(count) for prefix, count in counts.items()}
    tensors["loss"] = losses.numpy()
    return tensors


def compute_train_steps(dtype: torch.dtype = torch.float64) -> dict[str, np.ndarray]:
    config, train, rng = TRAIN_CONFIG, TRAIN, generator("train_steps")
    params = random_params(config, rng)
    buffers = random_buffers(config, rng, nonzero=False)
    state = ds.TrainState.start(
        {key: p.to(dtype) for key, p in params.items()}, {key: b.to(dtype) for key, b in buffers.items()}
    )
    num_micro = train.global_batch_size // config.local_batch_size
    all_tokens, all_labels, results = [], [], []
    for step in range(train.steps):
        for _ in range(200):
            tokens = random_tokens(config, rng, num_micro, config.local_batch_size)
            labels = labels_of(tokens, rng, masked=True)
            _, _, _, outputs = ds.gradients(config, state.params, state.buffers, tokens, labels)
            gap = min(r.min_gap for o in outputs for r in o.routing.values())
            if gap > MIN_GAP_TRAIN:
                break
        assert gap > MIN_GAP_TRAIN, f"train_steps: no batch without a near-tie at step {step}"
        results.append(ds.train_step(config, train, state, tokens, labels))
        all_tokens.append(tokens)
        all_labels.append(labels)

    tensors = {f"param.{key}": as_f32(p) for key, p in params.items()}
    tensors |= {f"buffer.{key}": as_f32(b) for key, b in buffers.items()}
    tensors |= {"tokens": as_i32(torch.stack(all_tokens)), "labels": as_i32(torch.stack(all_labels))}
    tensors["losses"] = torch.stack([r.losses for r in results]).numpy()
    tensors["grad_norms"] = np.array([r.grad_norm for r in results], np.float64)
    tensors["lrs"] = np.array([r.lr for r in results], np.float64)
    tensors |= {f"param_after.{key}": as_f32(p) for key, p in state.params.items()}
    tensors |= {f"buffer_after.{key}": as_f32(b) for key, b in state.buffers.items()}
    return tensors


def as_f32(x: Tensor) -> np.ndarray:
    return x.detach().to(torch.float32).numpy()


def as_i32(x: Tensor) -> np.ndarray:
    return x.to(torch.int32).numpy()


# ------------------------------------------------------------------------------------------------ self-checks


def check_gradients(name: str, case: Case, tensors: dict[str, np.ndarray]) -> None:
    """Checks gradients with central differences in float64, along random directions of whole tensors and at single
    elements."""
    config, rng = case.config, generator(f"{name} differences")
    params = {key: torch.from_numpy(tensors[f"param.{key}"]).double() for key in ds.param_shapes(config)}
    buffers = {key: torch.from_numpy(tensors[f"buffer.{key}"]).double() for key in ds.buffer_shapes(config)}
    tokens, labels = (torch.from_numpy(tensors[key]).long() for key in ("tokens", "labels"))
    num_valid = int((labels != ds.IGNORED).sum())

    def total(changed: dict[str, Tensor]) -> float:
        with torch.no_grad():
            output = ds.forward(config, params | changed, buffers, tokens)
            return ds.loss(config, output, labels, num_valid, labels.shape[0]).total.item()

    keys = list(params)
    picked = [keys[i] for i in torch.randperm(len(keys), generator=rng)[:6].tolist()]
    picked += [key for key in keys if ".gate." in key or ".eh_proj." in key or ".wkv_a." in key]
    for key in picked:
        grad = torch.from_numpy(tensors[f"grad.{key}"]).double()
        direction = torch.randn(grad.shape, generator=rng, dtype=torch.float64)
        single = torch.zeros_like(direction).view(-1)
        single[grad.abs().argmax()] = 1.0
        for d in (direction, single.view_as(direction)):
            h = 1e-6
            measured = (total({key: params[key] + h * d}) - total({key: params[key] - h * d})) / (2 * h)
            expected = (grad * d).sum().item()
            scale = grad.norm().item() * d.norm().item()
            # 1e-6 of the scale allows for the float32 rounding of the stored gradient.
            assert abs(measured - expected) <= 1e-6 * scale + 1e-8, f"{name} {key}: {measured} != {expected}"


def check_routing() -> None:
    """Checks properties of the router that hold whatever the scores are."""
    rng = generator("routing")
    for case in (CASES["moe_sigmoid_groups"], CASES["moe_softmax_groups"], CASES["force_balance"]):
        config = case.config
        E, K = config.num_experts, config.top_k
        gate = torch.randn((E, config.dim), generator=rng, dtype=torch.float64) / math.sqrt(config.dim)
        x = torch.randn((3, 50, config.dim), generator=rng, dtype=torch.float64)
        bias = 0.3 * torch.randn((E,), generator=rng, dtype=torch.float64)
        routing = ds.route(config, gate, bias, x)
        assert routing.expert_TK.shape == (150, K)
        assert all(len(set(row)) == K for row in routing.expert_TK.tolist()), "an expert was chosen twice"
        assert routing.count_E.sum() == 150 * K
        if config.route_norm:
            assert torch.allclose(routing.weight_TK.sum(-1), torch.full((150,), config.route_scale).double())
        elif config.score_func == "softmax":
            assert (routing.weight_TK.sum(-1) < config.route_scale).all()
        if config.moe_force_load_balance:
            assert routing.count_E.max() - routing.count_E.min() <= 1
        elif config.n_expert_groups > 0:
            groups = routing.expert_TK // (E // config.n_expert_groups)
            assert max(len(set(row)) for row in groups.tolist()) <= config.n_limited_groups
        # With a huge bias every token chooses an expert, and the expert's weight still depends on the scores only.
        if not config.moe_force_load_balance:
            biased = ds.route(config, gate, torch.eye(E, dtype=torch.float64)[5] * 100, x)
            assert biased.count_E[5] == 150 and biased.weight_TK.max() <= config.route_scale

    # If scores are equal, the lower index wins, and the experts are those of the first groups.
    config = CASES["moe_sigmoid_groups"].config
    zeros = torch.zeros(config.num_experts, config.dim, dtype=torch.float64)
    tied = ds.route(config, zeros, torch.zeros(config.num_experts, dtype=torch.float64), x)
    assert (tied.expert_TK == torch.arange(config.top_k)).all()

    # The balance loss is 1 per sequence if all scores are equal, because then P_i = 1/E and sum_i f_i = E.
    balance, _ = ds.sequence_balance(config, torch.full((3, 7, config.num_experts), 0.5, dtype=torch.float64))
    assert math.isclose(balance.item(), 3.0)

    bias = torch.tensor([0.5, -0.25, 0.0, 0.0], dtype=torch.float64)
    updated = ds.updated_bias(ds.Config(load_balance_coeff=0.01), bias, torch.tensor([9, 5, 5, 1]))
    assert torch.allclose(updated, bias + torch.tensor([-0.01, 0.0, 0.0, 0.01], dtype=torch.float64))
    updated = ds.updated_bias(ds.Config(load_balance_coeff=0.01), bias, torch.tensor([9, 0, 0, 0]))
    assert torch.allclose(updated, bias + torch.tensor([-0.015, 0.005, 0.005, 0.005], dtype=torch.float64))


def check_documents() -> None:
    config = ds.Config(attn_mask_type="block_causal", eos_id=1)
    positions, mask = ds.documents(config, torch.tensor([[5, 1, 1, 6, 7, 1]]))
    assert positions.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert mask[0, 4].tolist() == [False, False, False, True, True, False]

    # A document's logits do not depend on what precedes it. Move it, change its neighbour, and compare.
    config = replace(config, seq_len=12)
    params = random_params(config, generator("documents"))
    buffers = random_buffers(config, generator("documents"), nonzero=False)
    first = torch.tensor([[7, 8, 9, 1, 20, 21, 22, 23, 1, 30, 31, 32, 33]])
    second = torch.tensor([[40, 1, 20, 21, 22, 23, 1, 41, 42, 43, 44, 45, 46]])
    a = ds.forward(config, params, buffers, first).logits_BSV[0, 4:8]
    b = ds.forward(config, params, buffers, second).logits_BSV[0, 2:6]
    assert torch.allclose(a, b, atol=1e-12)


def check_mtp_targets() -> None:
    labels = torch.tensor([[11, ds.IGNORED, 13, 14]])
    assert ds.mtp_labels(labels, 0).tolist() == [[ds.IGNORED, 13, 14, ds.IGNORED]]
    assert ds.mtp_labels(labels, 1).tolist() == [[13, 14, ds.IGNORED, ds.IGNORED]]


def check_yarn() -> None:
    """Checks that fast pairs keep their frequency, slow ones are divided by the factor, and the ramp lies between."""
    config = ds.Config(seq_len=24, **YARN)
    plain = ds.rope_frequencies(replace(config, seq_len=config.original_seq_len))
    ratio = ds.rope_frequencies(config) / plain
    half = 0.5 + 0.5 / config.rope_factor
    expected = [1.0, half] + [1 / config.rope_factor] * 4
    assert torch.allclose(ratio, torch.tensor(expected, dtype=torch.float64)), ratio
    # DeepSeek-V3 has 4096 positions and 64 rotary dims. The ramp runs over pairs 10 to 23.
    config = ds.Config(seq_len=8192, qk_nope_head_dim=128, qk_rope_head_dim=64)
    plain = ds.rope_frequencies(replace(config, seq_len=4096))
    ratio = ds.rope_frequencies(config) / plain
    assert torch.allclose(ratio[:11], torch.ones(11, dtype=torch.float64))
    assert torch.allclose(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64))
    assert (ratio[10:24].diff() < 0).all()
    assert math.isclose(ds.softmax_scale(config), 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def check_parameter_counts() -> None:
    config = ds.Config(
        vocab_size=102400,
        dim=2048,
        inter_dim=10944,
        moe_inter_dim=1408,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        num_experts=64,
        num_shared_experts=2,
        top_k=6,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    count = ds.count_params(config)
    assert count["dense"] == 858_385_920, count
    assert count["sparse"] == 14_848_098_304, count
    assert count["active"] == 2_661_150_208, count


def check_schedule_and_optimizer() -> None:
    train = ds.TrainConfig(steps=10, warmup_steps=3, decay_ratio=0.6, decay_type="linear", min_lr_factor=0.1)
    expected = [1 / 3, 2 / 3, 1, 1, 1] + [1 - 0.9 * p / 6 for p in range(1, 6)]
    assert np.allclose([ds.lr_factor(train, s) for s in range(10)], expected)
    assert math.isclose(ds.lr_factor(replace(train, steps=2, warmup_steps=9, decay_ratio=0.0), 1), 1.0)

    # Compares the hand-written clipping and AdamW with PyTorch's.
    config, rng = CASES["moe_softmax"].config, generator("optimizer")
    state = ds.TrainState.start(random_params(config, rng), random_buffers(config, rng, nonzero=False))
    peers = {name: p.detach().clone().requires_grad_() for name, p in state.params.items()}
    betas = (train.beta1, train.beta2)
    adamw = torch.optim.AdamW(peers.values(), betas=betas, eps=train.eps, weight_decay=train.weight_decay)
    for step in range(4):
        tokens = random_tokens(config, rng, 2, config.local_batch_size)
        labels = labels_of(tokens, rng, masked=True)
        _, grads, _, _ = ds.gradients(config, peers, state.buffers, tokens, labels)
        for name, peer in peers.items():
            peer.grad = grads[name]
        norm = torch.nn.utils.clip_grad_norm_(peers.values(), train.max_norm)
        adamw.param_groups[0]["lr"] = train.lr * ds.lr_factor(train, step)
        adamw.step()
        result = ds.train_step(config, train, state, tokens, labels)
        assert math.isclose(result.grad_norm, norm.item(), rel_tol=1e-10) and norm > train.max_norm
        for name, peer in peers.items():
            assert torch.allclose(peer, state.params[name], rtol=1e-9, atol=1e-12), name


def check_accumulation() -> None:
    """Checks that two micro-batches of one row give the gradients of one with two rows, also with unequal valid
    counts."""
    case = CASES["mtp"]
    config, rng = replace(case.config, seq_balance_loss_coeff=0.1), generator("accumulation")
    params = {key: p.requires_grad_() for key, p in random_params(config, rng).items()}
    buffers = random_buffers(config, rng, nonzero=True)
    tokens = random_tokens(config, rng, 1, 2)
    labels = labels_of(tokens, rng, masked=True)
    whole = ds.gradients(config, params, buffers, tokens, labels)
    parts = ds.gradients(config, params, buffers, tokens.transpose(0, 1), labels.transpose(0, 1))
    assert torch.allclose(whole[0], parts[0], rtol=1e-12)
    for name in params:
        assert torch.allclose(whole[1][name], parts[1][name], rtol=1e-9, atol=1e-12), name
    for prefix in whole[2]:
        assert (whole[2][prefix] == parts[2][prefix]).all()


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference relative to the largest magnitude of b."""
    return float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30)) if a.size else 0.0


def report_float32(name: str, single: dict[str, np.ndarray], double: dict[str, np.ndarray]) -> None:
    """Prints how far the same code in float32 is from the golden values. This is a yardstick for tolerances."""
    worst: dict[str, tuple[float, str]] = {}
    for key, value in double.items():
        error = relative_error(single[key], value)
        kind = key.split(".")[0]
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, key))
    for kind, (error, key) in worst.items():
        if kind in ("tokens", "labels", "expert_counts"):
            assert error == 0, f"{name}: {key} differs in float32"
    shown = [f"{kind} {error:.0e}" for kind, (error, _) in worst.items() if error > 0]
    print(f"  float32 run differs by at most: {', '.join(shown)}")


# ------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the existing files, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # reductions have one order, so files are the same everywhere

    for check in (
        check_routing,
        check_documents,
        check_mtp_targets,
        check_yarn,
        check_parameter_counts,
        check_schedule_and_optimizer,
        check_accumulation,
    ):
        check()
        print(f"{check.__name__}: ok")

    GOLDEN_DIR.mkdir(exist_ok=True)
    bytes_total, failures = 0, 0
    for name in [*CASES, "train_steps"]:
        if name == "train_steps":
            tensors, config_text = compute_train_steps(), ds.to_toml(TRAIN_CONFIG, TRAIN)
            single = compute_train_steps(torch.float32)
            assert ds.from_toml(config_text) == (TRAIN_CONFIG, TRAIN)
        else:
            case = CASES[name]
            tensors, config_text = compute_case(name, case), ds.to_toml(case.config)
            single = compute_case(name, case, torch.float32)
            check_gradients(name, case, tensors)
            assert ds.from_toml(config_text)[0] == case.config
        path = GOLDEN_DIR / f"{name}.safetensors"
        if args.check:
            stored, metadata = safetensors_io.load(path)
            same = stored.keys() == tensors.keys() and metadata["config"] == config_text
            error = max(relative_error(tensors[key], stored[key]) for key in stored) if same else math.inf
            print(f"{name}: {'ok' if error < 1e-6 else 'DIFFERS'}, largest difference {error:.1e}")
            failures += error >= 1e-6
        else:
            safetensors_io.save(path, tensors, {"case": name, "config": config_text})
            losses = tensors["losses"][[0, -1]] if name == "train_steps" else tensors["loss"]
            print(f"{name}: {path.stat().st_size} bytes, loss {np.array2string(losses, precision=5)}")
        report_float32(name, single, tensors)
        bytes_total += path.stat().st_size
    print(f"{bytes_total / 1e6:.2f} MB in {GOLDEN_DIR.name}/")
    assert bytes_total < 6e6
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
