#!/usr/bin/env python3
"""Measures a GPU's operators and training steps, and compares them with PyTorch and with their bounds.

    bench/gpu.py --tessera build/release/src/app/tessera [--peers] [--rounds 3] [--json FILE]

Runs every table of `tessera bench` and, with --peers, the same operators in PyTorch (bench/peers/), each in its own
process. They take turns in several rounds, because clocks fall under load. The medians of the rounds are compared. Then
the training steps run. Prints a row per comparison, and on stderr which program runs and for how long. Exits with
status 1 if a row misses its bound, or if something could not be run. FILE gets every measured line, with "side" and
"table", and bench/record.py keeps it.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from recipes import CONVERTERS
from training_run import AS_ROOT

PEERS = pathlib.Path(__file__).parent / "peers"
TABLES = {"grouped": "grouped_mm.py", "attention": "attention.py", "gemm": "matmul.py", "quantize": None,
          "operators": None}
# This is the 16B model with as many layers as fit one GPU with room to spare.
STEP = ["--model.flavor=16B", "--model.args.n_layers=8", "--training.device=cuda", "--training.local_batch_size=2",
        "--training.seq_len=8192", "--debug.moe_force_load_balance=true", "--steps=8", "--warmup=4", "--kernels"]
KINDS = ("linear", "grouped_mm")
FP8_BLOCKWISE = [CONVERTERS, *(f"--quantize.{kind}.mx.recipe_name=fp8_blockwise" for kind in KINDS)]
MXFP8 = [CONVERTERS, *(f"--quantize.{kind}.mx.recipe_name=mxfp8" for kind in KINDS),
         *(f"--quantize.{kind}.mx.block_shape=128x128" for kind in KINDS)]
MXFP8_256 = [*MXFP8, *(f"--quantize.{kind}.mx.block_shape=256x256" for kind in KINDS)]
OUTPUT = "--quantize.linear.mx.convert_output"
STEPS = {"bf16": [], "fp8_blockwise": FP8_BLOCKWISE, "fp8_blockwise, output": [*FP8_BLOCKWISE, OUTPUT], "mxfp8": MXFP8,
         "mxfp8, output": [*MXFP8, OUTPUT], "mxfp8 256x256, output": [*MXFP8_256, OUTPUT]}


# Both sides have these products. The weight gradient is assigned, by Tessera in float32 and by PyTorch in bfloat16.
BF16 = ("bf16 fwd", "bf16 dgrad", "bf16 wgrad =")


class Measurements:
    """Keeps the lines of JSON of all rounds by table, name and shape."""

    def __init__(self):
        self.lines = collections.defaultdict(list)

    def add(self, table, lines):
        for line in lines:
            self.lines[table, line["name"], line["shape"]].append(line)

    def median(self, table, name, shape, key):
        """Returns the median of `key`, or None if it was not measured."""
        values = [line[key] for line in self.lines.get((table, name, shape), [])]
        return statistics.median(values) if values else None

    def shapes(self, table, name):
        return [shape for of, named, shape in self.lines if (of, named) == (table, name)]


def ended(process):
    """Ends the process and returns its stdout and stderr."""
    process.terminate()  # mpirun ends its ranks
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


class Runner:
    """Runs programs that print or write lines of JSON. Continues if one of them fails."""

    def __init__(self, timeout):
        self.timeout = timeout
        self.failed = False
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def attempt(self, command):
        """Returns stdout, stderr, and how the program failed. The last one is empty if it did not fail."""
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=os.environ | AS_ROOT)
        printed, said = "", ""
        try:
            printed, said = process.communicate(timeout=self.timeout)
            problem = f"exit status {process.returncode}" if process.returncode != 0 else ""
        except subprocess.TimeoutExpired:
            problem = f"more than {self.timeout} s"
            printed, said = ended(process)
        finally:  # also after SIGTERM
            if process.poll() is None:
                ended(process)
        seconds = time.monotonic() - begin
        print(f"{seconds:.1f} s: {' '.join(map(str, command))} {problem}", file=sys.stderr, flush=True)
        return printed, said, problem

    def run(self, command, tell=False):
        """Returns stdout, or an empty text if the program failed. Passes stderr on in that case, and always with
        `tell`."""
        printed, said, problem = self.attempt(command)
        if problem or tell:
            print(said, file=sys.stderr, end="", flush=True)
        self.failed |= bool(problem)
        return "" if problem else printed


def json_lines(text):
    """Parses the lines that are whole. mpirun may lose the end of the last one."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


class Programs(Runner):
    """Runs Tessera's benchmarks, and PyTorch's to compare with."""

    def __init__(self, args):
        super().__init__(args.timeout)
        self.args = args
        self.lines = []  # all measured lines

    def keep(self, side, table, text):
        lines = json_lines(text)
        self.lines += [{"side": side, "table": table, **line} for line in lines]
        return lines

    def table(self, table):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.jsonl"
            self.run([self.args.tessera, "bench", table, "--json", path])
            return self.keep("ours", table, path.read_text() if path.exists() else "")

    def peer(self, table, script):
        # The peer reports on stderr what it cannot run.
        return self.keep("torch", table, self.run([self.args.python, PEERS / script], tell=True))

    def step(self, name, options):
        printed = self.run([self.args.tessera, "bench", "step", *STEP, *options])
        return self.keep("ours", f"step {name}", printed)


def measure_tables(runner, args):
    ours, peers = Measurements(), Measurements()
    for _ in range(args.rounds):
        for table, script in TABLES.items():
            ours.add(table, runner.table(table))
            if args.peers and script:
                peers.add(table, runner.peer(table, script))
    return ours, peers


class Report:
    """Prints rows. `all_hold` becomes false with the first row that misses its bound."""

    def __init__(self):
        self.all_hold = True
        print(f"{'row / beside':64} {'ours':>9} {'beside':>9} {'':9} {'ratio':>6} {'must':>8}")

    def row(self, label, ours, beside, unit, at_least=None, at_most=None, or_why=None):
        """Prints a row. Numbers are None where they were not measured. Such a row misses its bound, unless `or_why`
        gives a reason. A row without a bound cannot miss it."""
        ratio = ours / beside if ours is not None and beside else None
        must = f">= {at_least:g}" if at_least else f"<= {at_most:g}" if at_most else ""
        holds = None
        if must and (ratio is not None or or_why is None):
            holds = ratio is not None and (ratio >= at_least if at_least else ratio <= at_most)
            self.all_hold &= holds
        number = lambda value, digits: "-" if value is None else f"{value:.{digits}f}"
        verdict = {None: or_why or "" if ratio is None else "", True: "ok", False: "MISSED"}[holds]
        numbers = f"{number(ours, 2):>9} {number(beside, 2):>9} {unit:9} {number(ratio, 3):>6}"
        print(f"{label:64} {numbers} {must:>8} {verdict}".rstrip(), flush=True)


def report_grouped(report, ours, peers, with_peers):
    for shape in ours.shapes("grouped", "bf16 fwd") or ["(not measured)"]:
        def rate(name, of=ours):
            return of.median("grouped", name, shape, "rate")

        def compare(name, beside, value, at_least=None):
            report.row(f"grouped {name} {shape} / {beside}", rate(name), value, "TFLOP/s", at_least)

        if with_peers:
            for name in BF16:
                compare(name, "torch", rate(name, peers), 1.05)
            compare("bf16 wgrad =", "torch, to float32", rate("bf16 wgrad to float32", peers), 1.0)
            for precision in ("fp8", "mxfp8/128", "mxfp8/256"):
                for way in ("fwd", "dgrad"):
                    compare(f"{precision} {way}", "torch", rate(f"fp8 {way}", peers), 1.2)
                    compare(f"{precision} {way}", "fast", rate(f"fp8 {way} fast", peers))
        for precision in ("fp8", "mxfp8/128"):
            for write in ("=", "+="):
                compare(f"{precision} wgrad {write}", "bf16", rate(f"bf16 wgrad {write}"), 1.2)
        compare("mxfp8/32 fwd", "bf16", rate("bf16 fwd"), 0.95)
        compare("mxfp8/32 dgrad", "bf16", rate("bf16 dgrad"))


def report_attention(report, ours, peers):
    def both(of, shape, name="attention"):
        parts = [of.median("attention", f"{name} {way}", shape, "microseconds") for way in ("fwd", "bwd")]
        return 1e6 / sum(parts) if None not in parts else None

    for shape in ours.shapes("attention", "attention fwd") or ["(not measured)"]:
        for way in ("fwd", "bwd"):
            name = f"attention {way}"
            report.row(f"{name} {shape} / cuDNN", ours.median("attention", name, shape, "rate"),
                       peers.median("attention", name, shape, "rate"), "TFLOP/s")
        report.row(f"attention fwd + bwd {shape} / cuDNN", both(ours, shape), both(peers, shape), "1/s", 1.0)
        report.row(f"attention fwd + bwd {shape} / cuDNN's of joined keys", both(ours, shape),
                   both(peers, shape, "attention core"), "1/s")


def report_gemm(report, ours, peers):
    for shape in ours.shapes("gemm", "bf16 fwd"):
        for name in BF16:
            report.row(f"gemm {name} {shape} / torch", ours.median("gemm", name, shape, "rate"),
                       peers.median("gemm", name, shape, "rate"), "TFLOP/s")


def report_bytes(report, ours):
    both = "quantize 1x32"  # to MXFP8, in both orientations
    for table in ("quantize", "operators"):
        for of, name, shape in list(ours.lines):
            if of == table and name != "copy":
                rate, share = (ours.median(table, name, shape, key) for key in ("rate", "share"))
                report.row(f"{name} {shape} / copy", rate, rate / share, "TB/s", 0.75 if name == both else None)
    if not ours.shapes("quantize", both):
        report.row(f"{both} (not measured)", None, None, "TB/s", 0.75)


def median_step(lines):
    """Returns the median of the runs of a step by its time, or an empty dict if there are none."""
    return sorted(lines, key=lambda line: line["step_ms"])[(len(lines) - 1) // 2] if lines else {}


def report_steps(report, runner, rounds):
    """Runs the steps in turn, so that all meet the same clocks."""
    runs = collections.defaultdict(list)
    for _ in range(rounds):
        for name, options in STEPS.items():
            runs[name] += runner.step(name, options)
    bf16 = median_step(runs["bf16"]).get("tokens_per_s")
    for name in STEPS:
        line = median_step(runs[name])
        tokens, mfu, tflops = (line.get(key) for key in ("tokens_per_s", "mfu", "tflops"))
        if name == "bf16":
            report.row("step bf16 / the GPU's peak", tflops, tflops / mfu if mfu else None, "TFLOP/s", 0.45)
        else:
            report.row(f"step {name} / bf16", tokens, bf16, "tokens/s", 1.2)
        idle, ms = line.get("gpu_idle_share"), line.get("step_ms")
        report.row(f"step {name}, GPU idle / step", idle * ms if idle is not None else None, ms, "ms", at_most=0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--peers", action="store_true", help="compare with PyTorch")
    parser.add_argument("--python", default=sys.executable, help="one that has PyTorch")
    parser.add_argument("--rounds", type=int, default=3, help="of the tables and steps")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a program may run")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all lines that were measured")
    args = parser.parse_args()

    runner = Programs(args)
    ours, peers = measure_tables(runner, args)
    report = Report()
    report_grouped(report, ours, peers, args.peers)
    if args.peers:
        report_attention(report, ours, peers)
        report_gemm(report, ours, peers)
    else:
        print("not compared without --peers: grouped products (bfloat16, 8-bit forward and dgrad), attention, dense ones")
    report_bytes(report, ours)
    report_steps(report, runner, args.rounds)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in runner.lines))
    sys.exit(0 if report.all_hold and not runner.failed else 1)


if __name__ == "__main__":
    main()
