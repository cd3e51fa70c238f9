#!/usr/bin/env python3
"""What cutting a run over ranks costs: the time of a step on two ranks of one thread against one rank of two threads with
the same batch, and the memory of a rank of four that shard the model.

    bench/parallel.py --tessera build/release/src/app/tessera [--dataset data/gcide] [--rounds 3]

Prints two tables. Fails if a step of two data-parallel ranks takes more than 15 % longer than one rank's, or a rank of
four has more than 10 % above (weights + gradients + moments) / 4 + activations.
"""

import argparse
import re
import statistics
import sys

from training_run import train

TIME_LIMIT = 1.15
MEMORY_LIMIT = 1.10
SEQUENCES = 4
STEPS = 6
SHAPE = ["--training.seq_len=512", f"--training.global_batch_size={SEQUENCES}"]
# Each mesh has a number of ranks, sequences per micro-batch, and its keys. The number of tokens per rank and pass
# follows from the memory that one rank's pass takes.
MESHES = {
    "one rank": (1, 4, []),
    "shard 2": (2, 2, []),
    "replicate 2": (2, 2, ["--parallelism.data_parallel_replicate_degree=2"]),
    "expert 2, direct": (2, 2, ["--parallelism.expert_parallel_degree=2",
                                "--parallelism.expert_parallel_comm_backend=direct"]),
    "expert 2, standard": (2, 2, ["--parallelism.expert_parallel_degree=2",
                                  "--parallelism.expert_parallel_comm_backend=standard"]),
    "tensor 2": (2, 4, ["--parallelism.tensor_parallel_degree=2"]),
    "context 2": (2, 4, ["--parallelism.context_parallel_degree=2"]),
    "pipeline 2, 1F1B": (2, 1, ["--parallelism.pipeline_parallel_degree=2",
                               "--parallelism.pipeline_parallel_microbatch_size=1"]),
    "pipeline 2, ZBV": (2, 1, ["--parallelism.pipeline_parallel_degree=2",
                               "--parallelism.pipeline_parallel_microbatch_size=1",
                               "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]),
}
LIMITED = ("shard 2", "replicate 2")
# The model has as many layers as the 16B model, so that each has as small a part of the memory.
DEEP = ["--model.args.n_layers=27", "--training.seq_len=256", "--training.local_batch_size=1", "--training.steps=2"]


def run(args, num_ranks, options):
    printed, lines = train(args, num_ranks, ["--checkpoint.enable=false"] + options)
    uses = dict(re.findall(r"(weights|gradients|moments|activations|program|peak) ([0-9.]+)GiB", printed))
    return {
        "step": statistics.median(line["step_seconds"] for line in lines if line.get("step", 0) > 1),
        "uses": {use: float(gib) for use, gib in uses.items()},
        "resident": max(line["memory_bytes"] for line in lines if "memory_bytes" in line) / 2**30,
    }


def times(args):
    runs = {name: [] for name in MESHES}
    for _ in range(args.rounds):
        for name, (num_ranks, batch, options) in MESHES.items():
            shape = SHAPE + [f"--training.steps={STEPS}", f"--training.local_batch_size={batch}"]
            runs[name].append(run(args, num_ranks, shape + options)["step"])
    print(f"{'mesh':22}{'ms per step':>12}{'of one rank':>14}")
    missed = []
    for name in MESHES:
        # In each round the runs are close in time, so the ratio of neighbours counts.
        ratio = statistics.median(one / base for one, base in zip(runs[name], runs["one rank"]))
        print(f"{name:22}{1e3 * statistics.median(runs[name]):12.0f}{100 * ratio:12.1f} %")
        if name in LIMITED and ratio > TIME_LIMIT:
            missed.append(f"a step on the mesh '{name}' takes {100 * ratio:.1f} % of one rank's")
    return missed


def memory(args):
    one, four = run(args, 1, DEEP), run(args, 4, DEEP)
    sharded = sum(one["uses"][use] for use in ("weights", "gradients", "moments"))
    expected = sharded / 4 + one["uses"]["activations"]
    planned = four["uses"]["peak"] - four["uses"]["program"]
    measured = four["resident"] - four["uses"]["program"]
    print(f"\nmemory per rank of four, GiB: {expected:.3f} by the formula, {planned:.3f} planned "
          f"({100 * planned / expected:.1f} %), {measured:.3f} measured ({100 * measured / expected:.1f} %)")
    worst = max(planned, measured) / expected
    return [f"a rank of four has {100 * worst:.1f} % of the formula's memory"] if worst > MEMORY_LIMIT else []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--dataset", default="data/gcide")
    parser.add_argument("--scratch", help="for the runs' files")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    missed = times(args) + memory(args)
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
