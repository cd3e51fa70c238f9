#!/usr/bin/env python3
"""Measures dispatch, training steps, layers and scaling on several GPUs of one machine. Compares them with bounds.

    bench/gpus.py --tessera build/release/src/app/tessera --bench build/release/bench/bench_ep_gpu [--ranks 8]
        [--only PART,...] [--timeout 180] [--seconds 0] [--json rows.jsonl]

Parts: `dispatch` (DeepEP's shape, the 16B model's), `cells` (the 16B model: precisions x backends x routers), `layers`
(of the 671B model) and `scaling` (the 16B model cut to 8 layers on 1, 2, 4, ... GPUs). --only also takes beginnings of
runs' names: "cells bf16 direct". Runs follow one another, each with a timeout. A row is printed as soon as it is known.
With --json it goes into that file, too. Runs whose rows are in the file, or that had no room, are not run again, so
take a new file for a new build. With --seconds the script ends by then, with the tables. Another call with the same
file continues.

A step's figures count if its loss is finite, ends below the first step's and, in a cell, within 1 % of bfloat16's over
`standard`. At the end there is a table of all bounds, which hold for 8 GPUs. Exits with status 1 if a measured bound is
missed, or if something could not be run. A setting without room is no failure if another setting of its cell has a
figure.
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import time
from collections import namedtuple

from gpu import STEPS, Report, Runner, json_lines
from training_run import mpirun

# A setting has the sequences per micro-batch, activation_checkpoint.mode, expert_parallel_capacity_factor, and the
# precision in which tokens and gradients cross to the experts.
Setting = namedtuple("Setting", "batch recompute room payload", defaults=["default"])

FORCED, REAL = 1.05, 2.5
# `tessera plan memory --ranks 8 --device cuda` tells what fits into 8 H200s. With fewer GPUs each has a larger part of
# the model, so batches are smaller (batch_of).
NONE, KEPT = Setting(4, "none", FORCED), Setting(4, "selective", FORCED)
IN_MXFP8 = [setting._replace(payload="mxfp8") for setting in (NONE, KEPT)]
ROUTED = [Setting(3, "selective", REAL), Setting(3, "full", REAL)]
# Maps precision, backend and router to lists of settings. Of each list the first setting that fits into memory runs. Of
# those the fastest counts. Losses are compared with those of bfloat16 over `standard`, which runs first.
CELLS = {
    ("bf16", "standard", "forced"): [[NONE, KEPT]],
    ("bf16", "direct", "forced"): [[NONE, KEPT]],
    ("mxfp8", "direct", "forced"): [[NONE, KEPT], IN_MXFP8],
    ("fp8_blockwise", "direct", "forced"): [[NONE, KEPT]],
    ("mxfp8", "standard", "forced"): [[NONE, KEPT]],
    ("fp8_blockwise", "standard", "forced"): [[NONE, KEPT]],
    ("bf16", "standard", "real"): [ROUTED],
    ("bf16", "direct", "real"): [ROUTED],
    ("mxfp8", "direct", "real"): [ROUTED],
    ("fp8_blockwise", "direct", "real"): [ROUTED],
    ("mxfp8", "standard", "real"): [ROUTED],
    ("fp8_blockwise", "standard", "real"): [ROUTED],
}
# These few steps reach their learning rate without a warm-up. With forced balance the rate is DeepSeek-V3's. At that
# rate the real router would soon send some rank two to three times a balanced load. At 2e-5 the loss of 27 layers is
# higher after 20 steps than before them. With LAYER_RATES the loss of layers as wide as the 671B model's falls. At
# larger rates the loss of three layers rises, and at smaller rates that of a single layer.
RATES = {"forced": "--optimizer.lr=2.2e-4", "real": "--optimizer.lr=5e-5"}
LAYER_RATES = {"forced": "--optimizer.lr=2e-5", "real": "--optimizer.lr=5e-6"}
CELL_SHAPE = ["--model.flavor=16B", "--training.seq_len=8192"]
LOSS_MARGIN = 0.01
# These layers of the 671B model all have experts. A GPU has as many experts as one of eight GPUs would. depths_of
# returns how many layers a run has.
LAYERS = {
    "forced": Setting(2, "none", FORCED),
    "real": Setting(2, "none", 2.0),
}
LAYER_SHAPE = ["--model.flavor=671B", "--model.args.n_dense_layers=0", "--training.seq_len=4096"]
LAYER_EXPERTS = 256
# This setting fits into a single GPU.
SCALING = Setting(2, "none", FORCED)
SCALING_SHAPE = ["--model.flavor=16B", "--model.args.n_layers=8", "--training.seq_len=8192", RATES["forced"]]

# With this timeout, a rank that others wait for is named before the time of a run is over.
STEP = ["--training.device=cuda", "--steps=16", "--warmup=4", "--comm.init_timeout_seconds=90"]
DISPATCH_SHAPES = {"4096x7168": "4096,7168,256,8", "16B": "16384,2048,64,6"}
SMS = (16, 24)

# The bounds hold for this number of GPUs.
BOUND_RANKS = 8
# These are DeepEP v1's figures. Its dispatch is timed without the layout and the payload's quantization, with which
# Tessera's dispatch begins. So there is also a row that is timed like DeepEP's.
MICROSECONDS = (("bf16", "dispatch", 937), ("bf16", "as DeepEP", 937), ("mxfp8", "dispatch", 495),
                ("mxfp8", "as DeepEP", 495), ("bf16", "combine", 967))
TOKENS = (("bf16", "standard", 14500), ("bf16", "direct", 18500), ("best 8-bit", "direct", 22000))
GAIN = 1.41
SCALES = 0.90
FIRST_STEP_SECONDS = 20

NO_ROOM, NO_TIME = "no room", "no time left"
TOLD_OF_NO_ROOM = ("cannot allocate", "out of memory", "unhandled cuda error",
                   "Make parallelism.expert_parallel_capacity_factor")
# No run starts if less time is left, because a program needs some time to begin.
LEAST_SECONDS = 45

# A run is one process. `cell` names what its settings have in common. `key` identifies it in other calls of this
# script. `instead_of` is the run without room that this one replaces.
Run = namedtuple("Run", "cell setting command key instead_of", defaults=[None])


def name_of(run):
    return " ".join(filter(None, (run.cell, run.setting)))


def batch_of(setting, ranks):
    return max(1, setting.batch * ranks // BOUND_RANKS)


def depths_of(ranks):
    """Returns two numbers of layers to run. A layer's time is the difference of the runs' times over that of the
    numbers. A layer takes 24 to 27 GiB of each GPU (weights, gradients, moments, copies), so four leave no room for
    activations. A single GPU also has the whole head."""
    return 1, 3 if ranks > 1 else 2


def step_run(args, cell, ranks, setting, precision, backend, router, shape):
    """Returns the run of a training step. Without another rank to send tokens to, the backend has nothing to do and is
    left out."""
    options = [*STEP, *shape, *STEPS[precision], f"--training.local_batch_size={setting.batch}",
               f"--activation_checkpoint.mode={setting.recompute}",
               f"--debug.moe_force_load_balance={'true' if router == 'forced' else 'false'}"]
    if ranks > 1:
        options += [f"--parallelism.expert_parallel_degree={ranks}",
                    f"--parallelism.expert_parallel_comm_backend={backend}",
                    f"--parallelism.expert_parallel_capacity_factor={setting.room}",
                    f"--parallelism.expert_parallel_a2a_dispatch_fwd_precision={setting.payload}",
                    f"--parallelism.expert_parallel_a2a_combine_bwd_precision={setting.payload}"]
    words = f"batch={setting.batch} recompute={setting.recompute} room={setting.room}"
    words += f" payload={setting.payload}" if setting.payload != "default" else ""
    command = ["bench", "step", *options]
    return Run(cell, words, [*mpirun(ranks), args.tessera, *command], [ranks, *command])


def powers_of_two(most):
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def plan_cells(args, router):
    for (precision, backend, its_router), alternatives in CELLS.items():
        for settings in alternatives if its_router == router else ():
            before = None
            for setting in settings:
                cell = f"cells {precision} {backend} {router}"
                here = setting._replace(batch=batch_of(setting, args.ranks))
                shape = [*CELL_SHAPE, RATES[router]]
                run = step_run(args, cell, args.ranks, here, precision, backend, router, shape)
                yield run._replace(instead_of=before)
                before = run


def plan(args):
    """Yields all runs. Those with a bound come first."""
    for name, shape in DISPATCH_SHAPES.items():
        options = ["--gpus", str(args.ranks), "--shape", shape, "--sms", ",".join(map(str, SMS))]
        yield Run(f"dispatch {name}", "", [args.bench, *options], options)
    yield from plan_cells(args, "forced")
    for ranks in powers_of_two(args.ranks):
        yield step_run(args, f"scaling {ranks}", ranks, SCALING, "bf16", "direct", "forced", SCALING_SHAPE)
    for router, setting in LAYERS.items():
        for backend in ("direct", "standard"):
            for precision in STEPS:
                for depth in depths_of(args.ranks):
                    shape = [*LAYER_SHAPE, LAYER_RATES[router], f"--model.args.n_layers={depth}",
                             f"--model.args.num_experts={LAYER_EXPERTS * args.ranks // BOUND_RANKS}"]
                    cell = f"layers {precision} {backend} {router} {depth}"
                    yield step_run(args, cell, args.ranks, setting, precision, backend, router, shape)
    yield from plan_cells(args, "real")


def dispatch_rows(printed):
    """Parses lines such as ` 24 SMs bf16   dispatch 937 us 332 (249) GB/s  again 900 us ...`."""
    rows = []
    for line in printed.splitlines():
        if head := re.match(r"\s*(\d+) SMs (\w+)", line):
            calls = re.findall(r"  ([A-Za-z][A-Za-z ]*) ([\d.]+) us ([\d.]+) \(([\d.]+)\) GB/s", line)
            rows += [{"sms": int(head[1]), "payload": head[2], "call": call, "microseconds": float(us),
                      "gb_per_s": float(rate), "gb_per_s_to_others": float(others)} for call, us, rate, others in calls]
    return rows


def loss_problem(line):
    first, last = line.get("loss_first"), line.get("loss_last")
    if not all(isinstance(loss, (int, float)) and math.isfinite(loss) for loss in (first, last)):
        return f"no figure: the loss is {first} in the first step, {last} in the last one"
    return "" if last < first else f"no figure: the loss goes from {first:.4f} to {last:.4f}"


def tells_of_no_room(told, ranks):
    """Returns whether a run failed because it had no room. NCCL calls that an unhandled CUDA error. If all rows go to
    one rank, however, the tokens are not finite, which is another failure."""
    load = re.search(r"([0-9.]+) times the balanced load", told)
    return any(text in told for text in TOLD_OF_NO_ROOM) and not (load and float(load[1]) > 0.9 * ranks)


class Results:
    """Rows and problems by cell. Rows of earlier calls are read from the file."""

    def __init__(self, path):
        self.path = path
        self.done = {}
        self.rows, self.problems, self.without_room = {}, {}, []
        if path and path.exists():
            text = path.read_text()
            whole = text[:text.rfind("\n") + 1]
            if whole != text:  # an earlier call ended while it wrote
                path.write_text(whole)
            for row in json_lines(whole):
                self.done[json.dumps(row["key"])] = row["rows"]
        elif path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, run, rows, is_new=True):
        self.rows.setdefault(run.cell, []).extend(row | {"setting": run.setting} for row in rows)
        if is_new and self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"name": name_of(run), "key": run.key, "rows": rows}) + "\n")

    def add_problem(self, run, problem, is_new=True):
        self.problems.setdefault(run.cell, []).append(problem)
        if problem == NO_ROOM:
            self.without_room.append(run)
            if is_new and self.path:  # it is of no use to try it again
                self.add(run, [])

    def is_called_for(self, run):
        return run.instead_of is None or any(run.instead_of.key == one.key for one in self.without_room)

    def hold_losses(self):
        """Removes the figures of cells whose loss is not that of bfloat16 over `standard`."""
        for (precision, backend, router) in CELLS:
            cell, base = f"cells {precision} {backend} {router}", self.best(f"cells bf16 standard {router}")
            for row in self.rows.get(cell, []) if base else []:
                if abs(row["loss_last"] / base["loss_last"] - 1.0) > LOSS_MARGIN:
                    self.problems.setdefault(cell, []).append(
                        f"no figure: the loss ends at {row['loss_last']:.4f}, bfloat16's over standard at "
                        f"{base['loss_last']:.4f}")
                    self.rows[cell] = [other for other in self.rows[cell] if other is not row]

    def failed(self):
        """Returns the cells that could not be run, and those without a setting that fits."""
        def is_bad(cell, problem):
            no_figure = problem in (NO_ROOM, NO_TIME) and not self.rows.get(cell)
            return no_figure or problem.startswith(("failed", "no figure"))

        return [cell for cell, problems in self.problems.items() if any(is_bad(cell, one) for one in problems)]

    def why_not(self, cell):
        return (self.problems.get(cell) or ["not measured"])[0]

    def best(self, cell):
        return max(self.rows.get(cell, []), key=lambda row: row["tokens_per_s_per_rank"], default=None)


def measure(run, runner, results, timeout, deadline):
    """Returns a run's rows and its problem, to be printed. `deadline`, by time.monotonic(), is the end of this script's
    time."""
    known = results.done.get(json.dumps(run.key))
    if known:
        results.add(run, known, is_new=False)
        return known, ""
    if known is not None:
        results.add_problem(run, NO_ROOM, is_new=False)
        return [], NO_ROOM
    for _ in range(2):  # mpirun may lose the last line of a program that ends at once
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            results.add_problem(run, NO_TIME)
            return [], NO_TIME
        runner.timeout = min(timeout, left)
        printed, said, problem = runner.attempt(run.command)
        rows = dispatch_rows(printed) if run.cell.startswith("dispatch") else json_lines(printed)
        if problem or rows:
            break
    if problem:
        told = printed + said
        if problem.startswith("more than") and runner.timeout < timeout:
            problem = NO_TIME
        else:
            problem = NO_ROOM if tells_of_no_room(told, run.key[0]) else f"failed: {problem}"
        print(told, file=sys.stderr, end="", flush=True)
    elif not rows:
        problem = "failed: it printed no figures"
    elif not run.cell.startswith("dispatch"):
        problem = loss_problem(rows[0])
    if problem:
        results.add_problem(run, problem)
        return [], problem
    results.add(run, rows)
    return rows, ""


def print_rows(run, rows, problem):
    if problem:
        print(f"{name_of(run):78} {problem}", flush=True)
    for row in rows:
        if "call" in row:
            what = f"{run.cell} {row['payload']} {row['call']} {row['sms']} SMs"
            print(f"{what:78} {row['microseconds']:8.0f} us  {row['gb_per_s']:.0f} GB/s, "
                  f"{row['gb_per_s_to_others']:.0f} to others", flush=True)
        else:
            mfu = f"MFU {100 * row['mfu']:.1f} %" if row.get("mfu") else ""
            print(f"{name_of(run):78} {row['tokens_per_s_per_rank']:8.0f} tokens/s per GPU  {row['step_ms']:.1f} ms  "
                  f"{row['tflops']:.0f} TFLOP/s {mfu}  loss {row['loss_first']:.4f} -> {row['loss_last']:.4f}",
                  flush=True)


def report_layers(results, ranks):
    """Prints milliseconds per layer. Those of a step include the optimizer."""
    parts = ("forward_ms", "backward_ms", "step_ms")
    if not any(cell.startswith("layers") for cell in results.rows | results.problems):
        return
    few, many = depths = depths_of(ranks)
    print(f"\n{'a layer of the 671B model, ms':42}" + "".join(f"{part.removesuffix('_ms'):>10}" for part in parts))
    for router in LAYERS:
        for backend in ("direct", "standard"):
            for precision in STEPS:
                name = f"layers {precision} {backend} {router}"
                of = [results.best(f"{name} {depth}") for depth in depths]
                if None in of:
                    why = next(results.why_not(f"{name} {depth}") for depth, row in zip(depths, of) if row is None)
                    print(f"{name:42}{why:>10}")
                    continue
                each = [f"{(of[1][part] - of[0][part]) / (many - few):10.2f}" if part in of[0] and part in of[1] else
                        f"{'-':>10}" for part in parts]
                print(f"{name:42}{''.join(each)}")


def report_bounds(results, ranks):
    """Prints all bounds. Returns whether all measured ones hold."""
    print()
    report = Report()

    def row(label, value, bound, unit, why, least=True):
        if ranks != BOUND_RANKS:
            report.row(label, value, bound, unit, or_why=why)
        else:
            report.row(label, value, bound, unit, or_why=why, **{"at_least" if least else "at_most": 1.0})

    for payload, call, bound in MICROSECONDS:
        cell = "dispatch 4096x7168"
        times = [row["microseconds"] for row in results.rows.get(cell, [])
                 if row["payload"] == payload and row["call"] == call and row["sms"] <= max(SMS)]
        name = f"dispatch {payload} as DeepEP times it" if call == "as DeepEP" else f"{call} {payload}"
        row(f"{name}, at most {max(SMS)} SMs / DeepEP", min(times, default=None), bound, "us",
            results.why_not(cell), least=False)

    def tokens(precision, backend):
        best = results.best(f"cells {precision} {backend} forced")
        return best["tokens_per_s_per_rank"] if best else None

    def largest(values):
        return max((value for value in values if value is not None), default=None)

    low = [precision for precision in STEPS if precision != "bf16"]
    for precision, backend, bound in TOKENS:
        value = largest(tokens(each, backend) for each in (low if precision == "best 8-bit" else [precision]))
        why = results.why_not(f"cells {low[0] if precision == 'best 8-bit' else precision} {backend} forced")
        row(f"16B {precision} {backend} / bound", value, bound, "tokens/s", why)
    # The best cell counts only if all cells were measured, because a missing one may be the best.
    forced = {f"cells {precision} {backend} {router}": tokens(precision, backend)
              for precision, backend, router in CELLS if router == "forced"}
    missing = next((cell for cell, value in forced.items() if value is None), None)
    row(f"16B best cell / {GAIN} of bf16 standard", None if missing else max(forced.values()),
        None if missing else tokens("bf16", "standard") * GAIN, "tokens/s", f"{missing}: {results.why_not(missing)}")

    first = results.best("cells bf16 direct forced")
    row("16B bf16 direct, from the start to the first step", first and first.get("first_step_s"), FIRST_STEP_SECONDS, "s",
        results.why_not("cells bf16 direct forced"), least=False)

    one, all_ranks = (results.best(f"scaling {n}") for n in (1, ranks))
    per_gpu = [line["tokens_per_s_per_rank"] if line else None for line in (one, all_ranks)]
    row(f"weak scaling, 1 to {ranks} GPUs / 90 %", None if None in per_gpu else 100 * per_gpu[1] / per_gpu[0],
        100 * SCALES, "%", results.why_not("scaling 1" if one is None else f"scaling {ranks}"))
    if ranks != BOUND_RANKS:
        print(f"bounds are of {BOUND_RANKS} GPUs, these are {ranks}: no verdicts")
    return report.all_hold


def num_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("nvidia-smi lists no GPUs; say how many with --ranks")
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--bench", required=True, help="bench_ep_gpu")
    parser.add_argument("--ranks", type=int, help="GPUs; without it, all there are")
    parser.add_argument("--only", default="", help="runs whose names begin with one of these, with commas")
    parser.add_argument("--timeout", type=int, default=180, help="seconds that a program may run")
    parser.add_argument("--seconds", type=int, default=0, help="that this call may take; 0: as long as it takes")
    parser.add_argument("--json", type=pathlib.Path, help="file of rows, to go on from")
    args = parser.parse_args()
    args.ranks = args.ranks or num_gpus()
    deadline = time.monotonic() + args.seconds if args.seconds else math.inf

    runs = list(plan(args))
    wanted = [part.strip() for part in args.only.split(",") if part.strip()]
    for part in wanted:
        if not any(name_of(run).startswith(part) for run in runs):
            parser.error(f"--only {part}: no run's name begins with that; e.g. {name_of(runs[0])}")
    runner, results = Runner(args.timeout), Results(args.json)
    for number, run in enumerate(runs, 1):
        is_wanted = not wanted or any(name_of(run).startswith(part) for part in wanted)
        # The table also has what earlier calls measured.
        if not results.is_called_for(run) or not is_wanted and json.dumps(run.key) not in results.done:
            continue
        if is_wanted:
            print(f"{number} of {len(runs)}: {name_of(run)}", file=sys.stderr, flush=True)
        print_rows(run, *measure(run, runner, results, args.timeout, deadline))
    results.hold_losses()
    report_layers(results, args.ranks)
    all_hold = report_bounds(results, args.ranks)
    failed = results.failed()
    if failed:
        print(f"could not be measured: {'; '.join(failed)}")
    sys.exit(0 if all_hold and not failed else 1)


if __name__ == "__main__":
    main()
