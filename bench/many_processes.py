#!/usr/bin/env python3
"""Trains a tiny model on many MPI processes of this machine, which starts the real trainer on all of them, saves
a checkpoint, and resumes from it. `tessera bench world` counts what such ranks send; this shows that they run.

    bench/many_processes.py --tessera build/release/src/app/tessera [--ranks 256]

The ranks are 2 stages of a pipeline, 4 ranks per group of experts, and shards of the data. Prints a table of times and
memory. Fails if a step's loss is not that of one rank with the same batch, or if the second run does not resume.
"""

import argparse
import pathlib
import sys
import tempfile
import threading
import time

from training_run import output_of, train

LOSS_LIMIT = 1e-5
SEQ_LEN = 8
MODEL = {"vocab_size": 258, "dim": 32, "inter_dim": 32, "moe_inter_dim": 16, "n_layers": 2, "n_dense_layers": 1,
         "n_heads": 2, "num_experts": 8, "num_shared_experts": 1, "top_k": 2, "kv_lora_rank": 16,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MESH = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=4"]
# A rank starts when it gets its share of a core, so the ranks wait for each other for minutes.
PATIENCE = ["--comm.init_timeout_seconds=3600", "--comm.train_timeout_seconds=3600"]


def available_bytes():
    words = pathlib.Path("/proc/meminfo").read_text().split()
    return int(words[words.index("MemAvailable:") + 1]) * 1024


class MemoryUse:
    """Measures by how much the machine's available memory falls while a block runs."""

    def __enter__(self):
        self.before = self.least = available_bytes()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()

    def watch(self):
        while not self.end.wait(0.2):
            self.least = min(self.least, available_bytes())

    def gib(self):
        return (self.before - self.least) / 2**30


def run(args, num_ranks, steps, checkpoints, more):
    options = [f"--model.args.{key}={value}" for key, value in MODEL.items()]
    options += [f"--training.steps={steps}", f"--training.seq_len={SEQ_LEN}",
                f"--training.global_batch_size={args.ranks}", "--training.num_threads=1",
                "--lr_scheduler.warmup_steps=1", "--metrics.enable_tensorboard=false",
                "--checkpoint.enable=true", f"--checkpoint.folder={checkpoints}", *PATIENCE, *more]
    begin = time.monotonic()
    with MemoryUse() as memory:
        _, lines = train(args, num_ranks, options)
    return {"losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
            "step": max(line["step_seconds"] for line in lines if "step_seconds" in line),
            "gib": memory.gib(),
            "all": time.monotonic() - begin}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--ranks", type=int, default=256, help="a multiple of 8")
    parser.add_argument("--scratch", help="for the runs' files")
    args = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        text = pathlib.Path(folder) / "text.txt"
        text.write_text("".join(chr(97 + i * i % 26) for i in range(8 * SEQ_LEN * args.ranks)))
        args.dataset = f"{folder}/dataset"
        output_of([args.tessera, "data", "prepare", "--input", text, "--tokenizer", "bytes", "--output", args.dataset,
                   "--val-fraction", "0"])
        one = run(args, 1, 2, f"{folder}/one", [f"--training.local_batch_size={args.ranks}"])
        print(f"{'ranks':>6} {'run':>8} {'s in all':>9} {'s in the step':>14} {'GiB in all':>11} {'loss':>9}")
        many = MESH + ["--training.local_batch_size=2"]
        for step, name in ((1, "start"), (2, "resume")):
            found = run(args, args.ranks, step, f"{folder}/many", many)
            loss, expected = found["losses"][step], one["losses"][step]
            print(f"{args.ranks:6} {name:>8} {found['all']:9.1f} {found['step']:14.2f} {found['gib']:11.1f} "
                  f"{loss:9.5f}", flush=True)
            if set(found["losses"]) != {step}:
                missed.append(f"the run to step {step} took the steps {sorted(found['losses'])}")
            if abs(loss - expected) > LOSS_LIMIT:
                missed.append(f"step {step} has loss {loss}, and {expected} on one rank")
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
