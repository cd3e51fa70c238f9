"""Starts programs on several ranks, and runs `tessera train` on CPUs with one or several, for benchmarks."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(num_ranks):
    """Returns the words before a command. Ranks are not bound to cores: each has its part of them as threads, and runs
    where there is room."""
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(num_ranks)]


def output_of(command, num_ranks=1):
    """Returns the standard output and the standard error of a command. If it fails, prints what it said, and exits."""
    start = mpirun(num_ranks) if num_ranks > 1 else []
    command = [*start, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_ROOT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}")
    return done.stdout, done.stderr


def measure_steps(tessera, options, num_ranks=1):
    """Returns the line of `tessera bench step`. mpirun may lose the last line of a program that ends at once, so the
    steps are made again if there is none."""
    for _ in range(2):
        printed, _ = output_of([tessera, "bench", "step", *options], num_ranks)
        for line in printed.splitlines():
            if line.startswith("{") and line.endswith("}"):
                return json.loads(line)
    sys.exit(f"tessera bench step {' '.join(map(str, options))}: it printed no figures")


def train(args, num_ranks, options, launch=False):
    """Returns the output of a run, and the lines of its metrics.jsonl. `args` has tessera, dataset and scratch. With
    `launch` the run starts by `tessera launch` and not by mpirun."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        command = [args.tessera, "train"]
        if launch:
            command = [args.tessera, "launch", "--ranks-per-node", str(num_ranks), "--", "train"]
        command += ["--training.device=cpu", f"--training.dataset_path={args.dataset}", f"--job.dump_folder={folder}"]
        printed = output_of(command + ["--metrics.log_freq=1"] + options, 1 if launch else num_ranks)
        lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").open()]
    return "".join(printed), lines
