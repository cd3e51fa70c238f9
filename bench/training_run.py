"""Starts programs on several ranks, and runs `tessera train` on CPUs with one or several, for benchmarks."""

import json
import os
import pathlib
import subprocess
import tempfile

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(num_ranks):
    """Returns the words before a command. Ranks are not bound to cores: each has its part of them as threads, and runs
    where there is room."""
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(num_ranks)]


def train(args, num_ranks, options, launch=False):
    """Returns the output of a run, and the lines of its metrics.jsonl. `args` has tessera, dataset and scratch. With
    `launch` the run starts by `tessera launch` and not by mpirun."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        command = [args.tessera, "train"]
        if launch:
            command = [args.tessera, "launch", "--ranks-per-node", str(num_ranks), "--", "train"]
        elif num_ranks > 1:
            command = mpirun(num_ranks) + command
        command += ["--training.device=cpu", f"--training.dataset_path={args.dataset}", f"--job.dump_folder={folder}"]
        done = subprocess.run(command + ["--metrics.log_freq=1"] + options, check=True, capture_output=True, text=True,
                              env=os.environ | AS_ROOT)
        lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").open()]
    return done.stdout + done.stderr, lines
