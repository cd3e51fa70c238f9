#!/usr/bin/env python3
"""Injects faults into runs on this machine's GPUs under `tessera launch`, and prints how each run recovered.

    tests/gpu_faults.py --tessera build/release/src/app/tessera [--ranks 4] [--only NAME,...] [--steps 60]

A run is one mesh (sharded weights only, experts over `direct`, experts over `standard`) with one fault of one rank. A
rank that is killed or stopped, or loses its GPU, must be replaced. The run must then train on from a copy in memory. A
GPU is lost when a kernel traps: each later call of CUDA in that process fails (tests/lost_gpu.cc). A step in which a
gradient is NaN once must be made again. Every run must end with the losses and gradient norms of an undisturbed one, to
the last bit, also in steps that were made twice. The script prints a line per run: the mesh, the fault, how many steps
were made again, the seconds until the run trained again, and what the run said.
Exits with status 1 if a run does not recover.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cluster"))
from lab import Follower, losses, make_dataset, train_arguments  # noqa: E402

MODEL = {
    "training.device": "cuda", "training.seq_len": 512, "training.local_batch_size": 4,
    "training.global_batch_size": 16, "training.num_threads": 4, "model.args.dim": 512, "model.args.n_layers": 6,
    "model.args.n_heads": 4, "debug.deterministic": "true", "checkpoint.enable": "true", "checkpoint.interval": 60,
    "checkpoint.memory_interval": 10,
}
MESHES = {
    "fsdp": {},
    "direct": {"parallelism.expert_parallel_degree": "RANKS", "parallelism.expert_parallel_comm_backend": "direct"},
    "standard": {"parallelism.expert_parallel_degree": "RANKS", "parallelism.expert_parallel_comm_backend": "standard"},
}
FAULTS = ("killed", "stopped", "gpu lost", "nan")
TIMEOUT = 120  # seconds after which a run is given up


class Missed(Exception):
    """Raised when a run has not done what it should have done."""


def ranks_of(dump):
    """Returns {rank: pid} of a run's ranks that run now."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            words = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            environment = pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:  # no process, or one that has ended
            continue
        if f"--job.dump_folder={dump}".encode() not in words or b"train" not in words[1:2]:
            continue
        # A run of one rank has no mpirun, and no such variable.
        rank = next((word.split(b"=")[1] for word in environment if word.startswith(b"OMPI_COMM_WORLD_RANK=")), 0)
        found[int(rank)] = int(entry)
    return found


class Run:
    """One `tessera launch` on this machine. It ends with its context."""

    def __init__(self, args, dataset, folder, mesh, more_keys=None):
        self.dump, self.log = os.path.join(folder, "run"), os.path.join(folder, "run.log")
        os.makedirs(self.dump)
        keys = {**MODEL, **{key: args.ranks if value == "RANKS" else value for key, value in MESHES[mesh].items()},
                "checkpoint.folder": os.path.join(folder, "checkpoint"), **(more_keys or {})}
        words = {word.split("=")[0]: word for word in train_arguments(dataset, self.dump, args.steps)[1:]}
        words.update({f"--{key}": f"--{key}={value}" for key, value in keys.items()})
        command = [args.tessera, "launch", "--ranks-per-node", str(args.ranks), "--", "train", *words.values()]
        self.follower = Follower(self.dump)
        self.follower.start()
        self.lost_gpus = os.path.join(folder, "lost_gpus")
        os.makedirs(self.lost_gpus)
        library = pathlib.Path(args.tessera).resolve().parents[2] / "tests/liblost_gpu.so"
        environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                                    "CUDA_INJECTION64_PATH": str(library), "TESSERA_LOST_GPU": self.lost_gpus}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                            env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()  # the launcher then ends the ranks
            self.process.wait()
        self.follower.end()

    def wait(self):
        try:
            status = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Missed(f"no end within {TIMEOUT} s, the last step is {self.follower.last_step()}") from None
        if status != 0:
            raise Missed(f"status {status}: ...{self.said()}")
        self.follower.end()

    def inject(self, fault, pid):
        if fault == "gpu lost":
            pathlib.Path(self.lost_gpus, str(pid)).touch()
        else:
            os.kill(pid, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])

    def said(self):
        return pathlib.Path(self.log).read_text()[-800:]

    def incident(self):
        path = pathlib.Path(self.dump, "incidents", "1.json")
        return json.loads(path.read_text())["text"] if path.exists() else "no incident"


def undisturbed(args, dataset, mesh):
    with tempfile.TemporaryDirectory() as folder, Run(args, dataset, folder, mesh) as run:
        run.wait()
        return losses(run.dump)


def recovered(args, dataset, mesh, fault, expected):
    """Returns a line about a run that has recovered from a fault. Raises Missed otherwise."""
    with tempfile.TemporaryDirectory() as folder, Run(args, dataset, folder, mesh) as run:
        try:
            run.follower.wait_for(lambda made: made[2] >= args.steps // 3, TIMEOUT, "step for the fault")
        except TimeoutError:
            raise Missed(f"no step for the fault: ...{run.said()}") from None
        victim = args.ranks - 1
        pid = ranks_of(run.dump).get(victim)
        if pid is None:
            raise Missed(f"rank {victim} is not running")
        when = time.time()
        run.inject(fault, pid)
        try:
            again = run.follower.wait_for(lambda made: made[1] == 2, TIMEOUT, "second attempt")
        except TimeoutError:
            again = None
        run.wait()
        if again is None:
            raise Missed(f"no second attempt: {run.incident()}")
        for _, attempt, number, *values in run.follower.steps:
            if tuple(values) != expected[number]:
                raise Missed(f"step {number} (attempt {attempt}): {values}, undisturbed {expected[number]}")
        if losses(run.dump) != expected:
            raise Missed("metrics.jsonl differs from that of the undisturbed run")
        twice = len(run.follower.steps) - args.steps
        return f"{twice} | {again[0] - when:.1f} s | {run.incident()}"


def replayed(args, dataset, mesh, expected):
    """Returns a line about a run that has made a step again, because a gradient was NaN. Raises Missed otherwise."""
    step = args.steps // 3
    keys = {"debug.nan_at_step": step, "debug.nan_on_rank": args.ranks - 1}
    with tempfile.TemporaryDirectory() as folder, Run(args, dataset, folder, mesh, keys) as run:
        run.wait()
        lines = [json.loads(line) for line in pathlib.Path(run.dump, "metrics.jsonl").read_text().splitlines()]
        said = {line["step"]: line["repeated_for"] for line in lines if line.get("repeated_for")}
        if list(said) != [step]:
            raise Missed(f"steps that were made again: {said}, expected: {step}")
        if losses(run.dump) != expected or run.follower.attempt != 1:
            raise Missed(f"attempt {run.follower.attempt}, or other losses than those of the undisturbed run")
        return f"1 | - | {said[step]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default=",".join(MESHES), help="meshes")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = os.path.join(folder, "dataset")
        make_dataset(args.tessera, dataset)
        for mesh in args.only.split(","):
            try:
                expected = undisturbed(args, dataset, mesh)
                for fault in FAULTS:
                    # When all ranks are stopped, the launcher takes it for a suspended run, and waits.
                    if fault == "stopped" and args.ranks == 1:
                        continue
                    try:
                        text = (replayed(args, dataset, mesh, expected) if fault == "nan"
                                else recovered(args, dataset, mesh, fault, expected))
                    except Missed as missed:
                        failed, text = 1, f"MISSED: {missed}"
                    print(f"{mesh} | {fault} | {text}", flush=True)
            except Missed as missed:
                failed = 1
                print(f"{mesh} | undisturbed | MISSED: {missed}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
