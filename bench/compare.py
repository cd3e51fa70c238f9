"""Tokens/s of the training step: Tessera against PyTorch, on the same CPU, in turns.

The peer is bench/reference/torch_train.py with PyTorch's own kernels (scaled_dot_product_attention, fused AdamW). Its
best setting is found first: attention kind, how bfloat16 is kept, and threads. Then both run in turns, so that a drift
of the machine's speed affects both. The medians of the rounds are compared. A second peer is shown beside it. It is
tuned by hand beyond PyTorch's own kernels: chunked attention written for this model, and MKL with AVX-512 on AMD.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

PEER = Path(__file__).parent / "reference" / "torch_train.py"


def run(command: list[str]) -> float:
    """Returns tokens/s of a command whose last line is JSON."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed:\n{result.stderr}")
    return json.loads(result.stdout.strip().splitlines()[-1])["tokens_per_s"]


def processor() -> str:
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown")
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    args = parser.parse_args()

    def tessera(dtype: str) -> list[str]:
        return [args.tessera, "bench", "step", "--steps=8", "--warmup=2", "--training.device=cpu",
                f"--training.seq_len={args.seq_len}", f"--training.local_batch_size={args.batch_size}",
                f"--training.mixed_precision_param={dtype}"]

    def torch(dtype: str, steps: int, extra: tuple[str, ...]) -> list[str]:
        return [args.python, str(PEER), f"--dtype={dtype}", f"--seq-len={args.seq_len}",
                f"--batch-size={args.batch_size}", f"--steps={steps}", "--warmup=2", *extra]

    print(f"\n{processor()}; debug model, {args.batch_size} sequences of {args.seq_len} tokens, causal")
    rows = []
    for dtype in args.dtypes:
        keeps = ("--bf16=master", "--bf16=autocast") if dtype == "bfloat16" else ("--bf16=master",)
        threads = sorted({1, os.cpu_count() or 1})
        candidates = [("--stock-mkl", attention, keep, f"--threads={n}")
                      for attention, keep, n in itertools.product(("--attention=flash", "--attention=math"), keeps, threads)]
        best = max(candidates, key=lambda extra: run(torch(dtype, 3, extra)))
        tuned = ("--attention=chunked", f"--threads={os.cpu_count()}")
        speeds: dict[str, list[float]] = {"tessera": [], "torch": [], "tuned": []}
        for _ in range(args.rounds):
            speeds["tessera"].append(run(tessera(dtype)))
            speeds["torch"].append(run(torch(dtype, 6, best)))
            speeds["tuned"].append(run(torch(dtype, 6, tuned)))
        median = {name: statistics.median(values) for name, values in speeds.items()}
        rows.append((dtype, median, " ".join(best[1:])))

    print("\n| | Tessera, tokens/s | PyTorch | ratio | hand-tuned PyTorch | ratio | PyTorch's best setting |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dtype, median, setting in rows:
        print(f"| {dtype} | {median['tessera']:.0f} | {median['torch']:.0f} | "
              f"**{median['tessera'] / median['torch']:.2f}** | {median['tuned']:.0f} | "
              f"{median['tessera'] / median['tuned']:.2f} | `{setting}` |")


if __name__ == "__main__":
    main()
