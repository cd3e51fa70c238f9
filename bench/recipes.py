#!/usr/bin/env python3
"""The training step of every low-precision recipe against bfloat16, in turns on the CPU of one machine.

    bench/recipes.py --tessera build/release/src/app/tessera [--rounds 3] [--steps 5]

Prints a table and fails if a step with mxfp8 takes more than 1.5 times as long as one with bfloat16.
"""

import argparse
import statistics
import sys

from training_run import measure_steps

LIMIT = 1.5
SHAPE = ["--training.device=cpu", "--training.seq_len=512", "--training.local_batch_size=4"]
CONVERTERS = "--model.converters=quantize.linear.mx,quantize.grouped_mm.mx"
RECIPES = ["mxfp8", "mxfp8_wgrad_with_hp", "mxfp8_emulated", "fp8_blockwise"]


def variants():
    yield "bfloat16", []
    for recipe in RECIPES:
        yield recipe, [CONVERTERS] + [f"--quantize.{kind}.mx.recipe_name={recipe}" for kind in ("linear", "grouped_mm")]
    for shape in ("32x32", "128x128", "256x256"):
        yield f"mxfp8, {shape}", [CONVERTERS] + [
            f"--quantize.{kind}.mx.block_shape={shape}" for kind in ("linear", "grouped_mm")
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    times = {}
    for _ in range(args.rounds):
        for name, overrides in variants():
            line = measure_steps(args.tessera, ["--steps", args.steps, "--warmup", 2, *SHAPE, *overrides])
            times.setdefault(name, []).append(line)
    print(f"{'recipe':24}{'ms per step':>14}{'tokens/s':>12}{'of bfloat16':>14}")
    base = statistics.median(run["step_ms"] for run in times["bfloat16"])
    ratios = {}
    for name, runs in times.items():
        step = statistics.median(run["step_ms"] for run in runs)
        tokens = statistics.median(run["tokens_per_s"] for run in runs)
        ratios[name] = step / base
        print(f"{name:24}{step:14.0f}{tokens:12.0f}{ratios[name]:14.2f}")
    if ratios["mxfp8"] > LIMIT:
        sys.exit(f"a step with mxfp8 takes {ratios['mxfp8']:.2f} times a bfloat16 step; expected at most {LIMIT}")


if __name__ == "__main__":
    main()
