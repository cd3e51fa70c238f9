#!/usr/bin/env python3
"""What the guards of a run cost: two ranks with and without `tessera launch` (its monitor and launcher), and with and
without copies in memory and the check of replicas, in turns on one machine. Step i of one run is compared with step i of
another one, which computes the same.

    bench/guards.py --tessera build/release/src/app/tessera [--dataset data/gcide]
    bench/guards.py --tessera build/release/src/app/tessera --gpu    # one GPU and a large state

Copies and checks are made after every step, so that their cost stands out; the share is that of every 20 and every 50
steps. Prints a table with 95 % intervals. Fails if `tessera launch` slows 200 steps down for certain, or if copies and
checks take more than 1 % of long steps.

On a GPU, copies in memory are made every 20 steps, and saves every 120, of 3 layers of the 16B model (18.7 GiB of
state). The first half of the steps after one is compared with the second half, in which there is nothing left to do. So
the difference has all that training waited for, and not how the GPU's clock changes from minute to minute.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/cluster"))

from lab import Follower, make_dataset  # noqa: E402
from training_run import output_of, train  # noqa: E402

SHAPE = ["--training.seq_len=256", "--training.local_batch_size=2", "--checkpoint.enable=true",
         "--checkpoint.interval=100000"]
REPLICAS = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
COPY_INTERVAL, CHECK_INTERVAL = 20, 50
LIMIT = 0.01
ON_GPU = ["--training.device=cuda", "--training.seq_len=4096", "--training.local_batch_size=4",
          "--training.global_batch_size=16", "--model.flavor=16B", "--model.args.n_layers=3",
          "--debug.moe_force_load_balance=true", "--activation_checkpoint.mode=selective", "--metrics.log_freq=1",
          "--checkpoint.enable=true", "--checkpoint.async_mode=async", "--checkpoint.keep_latest_k=1"]
# Each mode has the steps between two copies or saves, how many of them are measured, and keys. A save writes files for
# some 20 s, and the checksum of a copy takes 3.5 s.
GPU_MODES = {"copies in memory": (20, 10, ["--checkpoint.memory_interval=20", "--checkpoint.interval=100000"]),
             "saves": (120, 3, ["--checkpoint.interval=120"])}


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


def half_seconds(args, interval, count, keys):
    """Returns how long the halves of each `interval` steps took, [(first, second), ...], without the first steps."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        follower = Follower(folder)
        follower.start()
        output_of([args.tessera, "launch", "--ranks-per-node", "1", "--", "train", *ON_GPU, *keys,
                   f"--training.steps={(count + 1) * interval}", f"--training.dataset_path={args.dataset}",
                   f"--job.dump_folder={folder}"])
        follower.end()
    at = {step: time for time, _, step, _, _ in follower.steps}
    half = interval // 2
    return [(at[begin + half] - at[begin], at[begin + interval] - at[begin + half])
            for begin in range(interval, (count + 1) * interval, interval)]


def compare_on_gpu(args):
    print("| guard | every so many steps | a step, s | one takes, s | of these steps, % |")
    for mode, (interval, count, keys) in GPU_MODES.items():
        halves = half_seconds(args, interval, count, keys)
        without = 2 * statistics.mean(second for _, second in halves)
        mean, half = difference([[second] for _, second in halves], [[first] for first, _ in halves])
        print(f"| {mode} | {interval} | {without / interval:.3f} | {mean:.3f} ± {half:.3f} | {100 * mean / without:.2f} |",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--dataset", default="data/gcide")
    parser.add_argument("--scratch", help="where the runs' folders are for the time of the run")
    parser.add_argument("--gpu", action="store_true", help="measure copies and saves of a GPU's large state instead")
    parser.add_argument("--rounds", type=int, default=5, choices=range(2, 11))
    parser.add_argument("--long-rounds", type=int, default=3, choices=range(2, 11))
    parser.add_argument("--long-batch", type=int, default=32, help="sequences per step, for steps of 2 s and more")
    args = parser.parse_args()
    missed = []
    if args.gpu:
        with tempfile.TemporaryDirectory() as folder:
            args.dataset = os.path.join(folder, "dataset")
            make_dataset(args.tessera, args.dataset)
            compare_on_gpu(args)
    else:
        compare_launch(args, missed)
        compare_guards(args, missed)
    if missed:
        sys.exit(f"more than it may take: {', '.join(missed)}")


if __name__ == "__main__":
    main()
