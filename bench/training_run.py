"""A run of `tessera train` on one or several ranks, for benchmarks."""

import json
import os
import pathlib
import subprocess
import tempfile


def train(args, num_ranks, options):
    """What the run printed, and the lines of its metrics.jsonl. args: tessera, dataset, scratch."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        # Ranks are not bound to cores: each has its part of them as threads, and goes where there is room.
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(num_ranks)] if num_ranks > 1 else []
        command += [args.tessera, "train", f"--training.dataset_path={args.dataset}", f"--job.dump_folder={folder}"]
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(command + ["--metrics.log_freq=1"] + options, check=True, capture_output=True, text=True,
                              env=os.environ | as_root)
        lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").open()]
    return done.stdout + done.stderr, lines
