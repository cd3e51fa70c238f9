#!/usr/bin/env python3
"""How long saving keeps training waiting: runs that save every 20 steps, at once or while training goes on, and one
that does not save, in turns on one machine.

    bench/checkpoint.py --tessera build/release/src/app/tessera [--dataset data/gcide] [--rounds 2]

Prints a table and fails if asynchronous saves keep training waiting for more than 2 % of the time between them. The
first save of a run is shown apart and has no limit: its copy takes new pages of memory, which later saves use again.
"""

import argparse
import statistics
import sys

from training_run import train

LIMIT = 0.02
INTERVAL = 20
STEPS = 2 * INTERVAL + 10  # no steps follow the last save, so it is left out
SHAPE = ["--training.seq_len=256", "--training.local_batch_size=2", "--training.global_batch_size=4"]
MODES = {
    "no saves": ["--checkpoint.enable=false"],
    "disabled": ["--checkpoint.enable=true", "--checkpoint.async_mode=disabled"],
    "async": ["--checkpoint.enable=true", "--checkpoint.async_mode=async"],
}


def measure(args, num_ranks, mode):
    steps = [f"--training.steps={STEPS}", f"--checkpoint.interval={INTERVAL}"]
    _, lines = train(args, num_ranks, steps + SHAPE + MODES[mode])
    saves = [line for line in lines if "checkpoint_seconds" in line and line["step"] < STEPS]
    steps = [line["step_seconds"] for line in lines if "loss" in line and 1 < line["step"] <= STEPS]
    stalls = [save["checkpoint_stall_seconds"] for save in saves] or [0.0, 0.0]
    return {
        "step": statistics.mean(steps),
        "first": stalls[0],
        "stall": statistics.mean(stalls[1:]),
        "save": statistics.mean(save["checkpoint_seconds"] for save in saves) if saves else 0.0,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--dataset", default="data/gcide")
    parser.add_argument("--scratch", help="where the checkpoints are written for the time of the run")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(f"{'ranks':>6} {'async_mode':12}{'ms per step':>14}{'ms per save':>14}{'first stall':>13}"
          f"{'stall, ms':>12}{'of 20 steps':>14}")
    missed = []
    for num_ranks in (1, 2):
        runs = {mode: [] for mode in MODES}
        for _ in range(args.rounds):
            for mode in MODES:
                runs[mode].append(measure(args, num_ranks, mode))
        for mode in MODES:
            step, first, stall, save = (statistics.median(run[key] for run in runs[mode])
                                        for key in ("step", "first", "stall", "save"))
            share = stall / (INTERVAL * step)
            print(f"{num_ranks:6} {mode:12}{1e3 * step:14.0f}{1e3 * save:14.0f}{1e3 * first:13.1f}{1e3 * stall:12.1f}"
                  f"{100 * share:12.2f} %")
            if mode == "async" and share > LIMIT:
                missed.append(f"{num_ranks} ranks: {100 * share:.2f} %")
    if missed:
        sys.exit(f"asynchronous saves keep training waiting for more than {100 * LIMIT:.0f} %: {', '.join(missed)}")


if __name__ == "__main__":
    main()
