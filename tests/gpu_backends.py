#!/usr/bin/env python3
"""Trains one model over `direct` and over `standard` on the GPUs of this machine, and compares the losses.

    tests/gpu_backends.py --tessera build/release/src/app/tessera [--ranks 4] [--steps 60]

The model is the 16B one cut to 8 layers. It trains in bfloat16 on the text of the docs, with the model's own router, at
a learning rate of 2.2e-4 and with debug.deterministic. Both backends sum in the same order, so the losses and gradient
norms of all steps must be the same bits. A third run has a capacity factor of 1, so that loads take rounds. Its sums
have another order, and a single step's loss may drift. The mean loss of its last 20 steps must be within 0.5 %. Prints
a line per run, and exits with status 1 otherwise.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from training_run import train  # noqa: E402

MODEL = ["--model.flavor=16B", "--model.args.n_layers=8", "--training.device=cuda", "--training.seq_len=2048",
         "--training.local_batch_size=2", "--optimizer.lr=2.2e-4", "--lr_scheduler.warmup_steps=20",
         "--debug.deterministic=true", "--checkpoint.enable=false", "--comm.init_timeout_seconds=90"]
# Without a bound on rows, every rank would need room for all tokens.
RUNS = {"direct": ("direct", 3.0), "standard": ("standard", 3.0), "direct, in rounds": ("direct", 1.0)}
LAST, MARGIN = 20, 0.005


def run(args, backend, factor):
    options = [*MODEL, f"--training.steps={args.steps}", f"--parallelism.expert_parallel_degree={args.ranks}",
               f"--parallelism.expert_parallel_comm_backend={backend}",
               f"--parallelism.expert_parallel_capacity_factor={factor}"]
    _, lines = train(args, args.ranks, options)
    return [line for line in lines if line.get("loss") is not None and line.get("grad_norm") is not None]


def mean_of_last(lines):
    return sum(line["loss"] for line in lines[-LAST:]) / LAST


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        args.scratch, args.dataset = folder, f"{folder}/dataset"
        text = pathlib.Path(folder, "docs.txt")
        text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
        subprocess.run([args.tessera, "data", "prepare", "--input", text, "--tokenizer", "bytes", "--output",
                        args.dataset], check=True, stdout=subprocess.DEVNULL)
        reference = None
        for name, (backend, factor) in RUNS.items():
            made = run(args, backend, factor)
            reference = reference or made
            differs = mean_of_last(made) / mean_of_last(reference) - 1.0
            same = sum((a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"]) for a, b in zip(made, reference))
            rounds = sum(line.get("dispatch_later_rounds", 0) for line in made)
            print(f"{name}: loss {made[0]['loss']:.4f} to {made[-1]['loss']:.4f}, {same} of {len(made)} steps have the "
                  f"bits of direct, the last {LAST} losses differ by {100 * differs:+.3f} %, {rounds:.0f} later rounds",
                  flush=True)
            failed |= len(made) != args.steps or made[-1]["loss"] > 0.9 * made[0]["loss"]
            failed |= abs(differs) > MARGIN if factor == 1.0 else same != args.steps
            failed |= (rounds > 0) != (factor == 1.0)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
