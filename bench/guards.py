#!/usr/bin/env python3
"""What the guards of a run cost: two ranks with and without `tessera launch` (its monitor and launcher), and with and
without copies in memory and the check of replicas, in turns on one machine. Step i of one run is compared with step i of
another one, which computes the same.

    bench/guards.py --tessera build/release/src/app/tessera [--dataset data/gcide]

Copies and checks are made after every step, so that their cost stands out; the share is that of every 20 and every 50
steps. Prints a table with 95 % intervals. Fails if `tessera launch` slows 200 steps down for certain, or if copies and
checks take more than 1 % of long steps.
"""

import argparse
import math
import statistics
import sys

from training_run import train

SHAPE = ["--training.seq_len=256", "--training.local_batch_size=2", "--checkpoint.enable=true",
         "--checkpoint.interval=100000"]
REPLICAS = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
COPY_INTERVAL, CHECK_INTERVAL = 20, 50
LIMIT = 0.01


def step_seconds(args, steps, options, launch=False):
    _, lines = train(args, 2, [f"--training.steps={steps + 2}", *SHAPE, *options], launch)
    # The first two steps also touch the memory for the first time, so they do not count.
    return [line["step_seconds"] for line in lines if "loss" in line and line["step"] > 2]


def difference(without, with_guard):
    """Returns (seconds per step, half of its 95 % interval). Each round gives one value, because what disturbs a step
    also disturbs the next one."""
    rounds = [statistics.median(b - a for a, b in zip(*pair)) for pair in zip(without, with_guard)]
    deviation = statistics.stdev(rounds) / math.sqrt(len(rounds))
    return statistics.mean(rounds), STUDENT[len(rounds) - 1] * deviation


STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}  # 97.5 %, by degrees of freedom


def compare_launch(args, missed):
    short = ["--training.global_batch_size=4"]
    alone, launched = [], []
    for _ in range(args.rounds):
        alone.append(step_seconds(args, 40, short))
        launched.append(step_seconds(args, 40, short, launch=True))
    step = statistics.median(sum(alone, []))
    mean, half = difference(alone, launched)
    print(f"{sum(map(len, alone))} pairs of steps of {1e3 * step:.0f} ms: with tessera launch {1e6 * mean:+.0f} us "
          f"+- {1e6 * half:.0f} us ({100 * mean / step:+.3f} % +- {100 * half / step:.3f} %)", flush=True)
    if mean - half > 0.001 * step:
        missed.append("tessera launch slows steps down")


def compare_guards(args, missed):
    long = [f"--training.global_batch_size={args.long_batch}", *REPLICAS]
    modes = {"none": [], "copies in memory": ["--checkpoint.memory_interval=1"],
             "check of replicas": ["--checkpoint.verify_interval=1"]}
    runs = {mode: [] for mode in modes}
    for _ in range(args.long_rounds):
        for mode, keys in modes.items():
            runs[mode].append(step_seconds(args, 6, long + keys, launch=True))
    step = statistics.median(sum(runs["none"], []))
    share = 0.0
    for mode, interval in (("copies in memory", COPY_INTERVAL), ("check of replicas", CHECK_INTERVAL)):
        mean, half = difference(runs["none"], runs[mode])
        share += max(mean, 0.0) / interval / step
        print(f"steps of {step:.2f} s: a {mode.replace('copies', 'copy')} takes {1e3 * mean:.1f} ms +- {1e3 * half:.1f} ms; "
              f"every {interval} steps: {100 * mean / interval / step:.3f} %", flush=True)
    print(f"both: {100 * share:.3f} % (limit {100 * LIMIT:.0f} %)")
    if share > LIMIT:
        missed.append("copies and checks")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--dataset", default="data/gcide")
    parser.add_argument("--scratch", help="where the runs' folders are for the time of the run")
    parser.add_argument("--rounds", type=int, default=5, choices=range(2, 11))
    parser.add_argument("--long-rounds", type=int, default=3, choices=range(2, 11))
    parser.add_argument("--long-batch", type=int, default=32, help="sequences per step, for steps of 2 s and more")
    args = parser.parse_args()
    missed = []
    compare_launch(args, missed)
    compare_guards(args, missed)
    if missed:
        sys.exit(f"more than it may take: {', '.join(missed)}")


if __name__ == "__main__":
    main()
