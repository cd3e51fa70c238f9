#!/usr/bin/env python3
"""Records of what ran on a GPU, and the docs' figures that come from them.

    bench/record.py make build/release [--mutants] [--sanitizer]   # on a machine with a GPU
    bench/record.py docs     # writes the docs' figures anew from their records
    bench/record.py check    # fails where they differ from their records; part of make test

`make` runs the GPU's test suites, bench_generate, the tables of bench/gpu.py with PyTorch's beside (--python: one that
has it), and the laboratory's courses, if `make -C lab` has built them. It writes bench/records/DATE-GPU.json.gz with
machine, libraries, commit, hashes of the sources' code, logs and every measured line. --mutants [KIND,...] also runs
tests/gpu_mutants.py. With --made FOLDER it tests the programs there, which `gpu_mutants.py --make` built from the same
sources. --sanitizer [FILTER] also runs tests/compute_sanitizer.sh. --faults MESH,... also runs tests/gpu_faults.py on
all GPUs, --backends tests/gpu_backends.py, --guards bench/guards.py on one, --gpus PART,... these parts of
bench/gpus.py, and --forecast FILE the steps of that forecast. --compare 'SIDE SIDE...' also runs `tessera compare`,
whose runs must be those of this program.

A page has figures between `<!-- record NAME PART -->` and `<!-- end -->`, where `docs` writes them. They say "Old" once
the sources of PART differ from those that were measured. A section that names an H100 or H200 must have such figures,
or say "**Old**", or lie in a section that does.
"""

import argparse
import ast
import contextlib
import datetime
import gzip
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time

from gpu import BF16, STEPS, Measurements, json_lines, median_step
from training_run import AS_ROOT

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = "bench/records"
SUITES = ("ops", "step", "ep", "comm", "generate")

# The figures of a part depend on these sources, without those behind "!".
TABLE_SOURCES = ["bench/gpu.py", "bench/peers/*", "src/app/bench/gpu_bench.*", "src/app/bench/gpu_tables*"]
KERNELS = ["src/mx/*.h", "src/mx/*.cc", "src/ops/*/*_cuda.cu", "src/ops/*/*.cuh",
           "src/ops/attention/attention_kernels.*", "src/ops/gemm/*.h", "src/ops/gemm/*gemm.cc", "src/ops/gemm/sm*/*",
           "src/ops/quantize/pack_scales.*", "src/ops/runtime/*"]
TRAINING_KERNELS = [*KERNELS, "!src/ops/*/mla_decode*", "!src/ops/*/moe_decode*", "!src/ops/*/cache_places.cuh"]
MODEL = ["src/params/*.*", "src/model/*.*", "src/step/*.*"]
DECODING = ["src/ops/attention/mla_decode.*", "src/ops/routing/moe_decode.*"]
COMMUNICATION = ["src/comm/gpu_*", "src/comm/counted_exchange.*", "src/comm/registered_memory.*", "src/ep/*.h",
                 "src/ep/*.c*", "src/ep/backends/*", "src/ep/direct/*"]
GPUS_STEPS = [*TRAINING_KERNELS, *MODEL, *COMMUNICATION, "bench/gpus.py", "bench/gpu.py"]
SOURCES = {
    "suites": [*KERNELS, *MODEL, *COMMUNICATION, "src/device/cuda*", "src/generate/*",
               *DECODING, "src/ops/kit/call_stream.*", "tests/*/*cuda*", "tests/ops/*/*cuda*",
               "tests/*/gpu_*", "!tests/health/*", "tests/gpu_delay.*", "tests/ops/parity.h",
               "tests/step/mesh_gradients.h",
               "tests/step/text_gradients.h", "tests/ep/whole_calls.h", "tests/comm/gin_plugin.cc"],
    "steps": [*TRAINING_KERNELS, *MODEL, "bench/gpu.py"],
    "grouped": [*TABLE_SOURCES, "src/mx/block.h", "src/ops/gemm/grouped_gemm_cuda.cu",
                "src/ops/gemm/quantized_gemm_cuda.cu",
                "src/ops/kit/ptx.cuh", "src/ops/gemm/sm90/*"],
    "gemm": [*TABLE_SOURCES, "src/ops/gemm/gemm_cuda.cu", "src/ops/runtime/libraries.*"],
    "attention": [*TABLE_SOURCES, "src/ops/attention/mla_attention_cuda.cu", "src/ops/attention/attention_kernels.*",
                  "src/ops/runtime/attention_library.*"],
    "bytes": [*TABLE_SOURCES, *TRAINING_KERNELS],
    "gpus_cells": GPUS_STEPS,
    "gpus_scaling": GPUS_STEPS,
    "gpus_layers": GPUS_STEPS,
    "gpus_dispatch": [*COMMUNICATION, "src/ops/kit/*.cuh", "src/ops/quantize/*", "bench/ep_gpu_bench.cc"],
    "faults": ["src/launch/*.*", "src/launch/watch/*", "src/run/*.*", "src/run/state/*", "src/comm/*.*",
               "src/comm/observe/*", "tests/gpu_faults.py", "tests/lost_gpu.cc"],
    "backends": [*TRAINING_KERNELS, *MODEL, *COMMUNICATION, "tests/gpu_backends.py"],
    "guards": ["src/run/*.*", "src/run/state/*", "src/device/cuda*", "bench/guards.py"],
    "forecast": [*TRAINING_KERNELS, *MODEL, *COMMUNICATION],
    "losses": [*TRAINING_KERNELS, *MODEL],
    "decoding": [*KERNELS, *DECODING, "src/model/*.*", "src/device/cuda_graph.*", "src/generate/*",
                 "bench/generate_bench.cc"],
    "lab_grouped_gemm": ["lab/*.cuh", "lab/grouped_gemm/*", "src/ops/gemm/sm90/*", "src/ops/kit/ptx.cuh"],
    "lab_dispatch": ["lab/*.cuh", "lab/dispatch/*"],
}
COURSES = ("grouped_gemm", "dispatch")
TABLES = ("bench/gpu.py", "bench/gpus.py")  # scripts that print tables


# --- Making a record ------------------------------------------------------------------------------------------------


COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def code_of(path):
    """Returns a source without comments and layout, which change nothing that was measured."""
    text = path.read_text()
    if path.suffix in (".h", ".cc", ".cu", ".cuh", ".inc"):
        return "".join(COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else "", text).split())
    lines = text.splitlines()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                first, last = node.body[0].lineno, node.body[0].end_lineno
                lines[first - 1:last] = [""] * (last - first + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def is_of(path, globs):
    """Returns whether the globs choose a source."""
    path = pathlib.PurePath(path)
    return (any(path.match(glob) for glob in globs if glob[0] != "!")
            and not any(path.match(glob[1:]) for glob in globs if glob[0] == "!"))


def hashes(root, globs):
    """Returns the hashes of the sources' code, by path."""
    paths = {path for pattern in globs if pattern[0] != "!" for path in root.glob(pattern)
             if path.is_file() and path.suffix != ".pyc" and is_of(path.relative_to(root), globs)}
    return {str(path.relative_to(root)): hashlib.sha256(code_of(path).encode()).hexdigest()[:16]
            for path in sorted(paths)}


def run(name, command):
    """Runs the command and returns a log of it."""
    print(f"{name}: {' '.join(map(str, command))}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          env=os.environ | AS_ROOT)
    print(f"{name}: exit status {done.returncode}", file=sys.stderr, flush=True)
    return {"name": name, "status": done.returncode, "seconds": round(time.monotonic() - begin, 1), "log": done.stdout}


def run_suite(build, suite):
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        log = run(f"test_{suite}_cuda", [build / f"tests/{suite}/test_{suite}_cuda", f"--gtest_output=json:{results}"])
        with contextlib.suppress(FileNotFoundError):
            tests = [test for group in json.loads(results.read_text())["testsuites"] for test in group["testsuite"]]
            log["skipped"] = sum(test["result"] == "SKIPPED" for test in tests)
            log["failed"] = sum("failures" in test for test in tests)
            log["passed"] = len(tests) - log["skipped"] - log["failed"]
    return log


def run_course(course):
    """Runs a course of the laboratory: all of its levels are checked, then timed in turn. Returns the log and lines."""
    log = run(f"lab {course}", [ROOT / "build/lab" / course, "bench"])
    lines, shape = [], None
    for line in log["log"].splitlines():
        level = re.match(r"  (\w+) +yes +([\d.]+) +([\d.]+) ", line)
        if level:
            lines.append({"side": "ours", "table": f"lab {course}", "name": level[1], "shape": shape,
                          "ms": float(level[2]), "rate": float(level[3])})
        elif not line.startswith(" "):
            shape = line.split(":")[0]
    return log, lines


def run_decoding(build):
    """Times the next token of several texts. Returns the log and lines."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        log = run("bench_generate", [build / "bench/bench_generate", "--benchmark_filter=on_gpu",
                                     f"--benchmark_out={results}", "--benchmark_out_format=json"])
        timed = json.loads(results.read_text())["benchmarks"] if results.exists() else []
    return log, [{"side": "ours", "table": "decoding", "name": "on_gpu", "shape": one["name"].split("/")[2],
                  "ms": one["real_time"] / 1000, "bytes_per_second": one.get("bytes_per_second")} for one in timed]


def run_comparison(tessera, version, arguments):
    """Compares runs with `tessera compare`. Returns the log and lines: the report without the folders of its runs."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "report.html"
        log = run("tessera compare", [tessera, "compare", *shlex.split(arguments), "--out", out])
        report = json.loads(out.with_suffix(".json").read_text()) if log["status"] == 0 else {"runs": [], "sides": []}
    others = {made["program"] for made in report["runs"]} - {version}
    if others:
        log |= {"status": 1, "log": f"{log['log']}\nrecord: runs of another program: {', '.join(sorted(others))}\n"}
    runs = [{key: value for key, value in made.items() if key != "folder"} for made in report["runs"]]
    return log, [{"side": "ours", "table": "losses", "name": side["label"], "shape": "",
                  "runs": [made for made in runs if made["side"] == side["label"]]} | side for side in report["sides"]]


def run_table(script, *options):
    """Runs a script of TABLES. Returns the log and the script's rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder) / "rows.jsonl"
        log = run(script, [sys.executable, ROOT / script, *options, "--json", rows])
        measured = json_lines(rows.read_text() if rows.exists() else "")
    log["rows"] = len(measured)
    return log, measured


def run_gpus(build, tessera, parts, seconds):
    """Runs parts of bench/gpus.py. Returns the log and lines."""
    log, measured = run_table("bench/gpus.py", "--tessera", tessera, "--bench", build / "bench/bench_ep_gpu", "--only",
                              parts, "--seconds", str(seconds))
    return log, [{"side": "ours", "table": "gpus", "name": each["name"], "shape": ""} | row
                 for each in measured for row in each["rows"]]


def short_name(gpu):
    """Returns "h200" of "NVIDIA H200, ..."."""
    found = re.search(r"\b[A-Z]+\d+\b", gpu) or re.search(r"\w*\d\w*", gpu)
    return found.group().lower() if found else "gpu"


def make(args):
    build, tessera = args.build, args.build / "src/app/tessera"
    doctor = subprocess.run([tessera, "doctor"], check=True, capture_output=True, text=True).stdout
    machine = dict(re.split(r":\s+", line, maxsplit=1) for line in doctor.splitlines())
    if "GPU 0" not in machine:
        sys.exit(f"record: no GPU here: {machine.get('no GPU', doctor)}")
    date = datetime.date.today().isoformat()
    suites = list(filter(None, args.suites.split(",")))
    missing = [suite for suite in suites if not (build / f"tests/{suite}/test_{suite}_cuda").exists()]
    if missing:
        sys.exit(f"record: no test programs of {', '.join(missing)} in {build}")
    logs = [run_suite(build, suite) for suite in suites]
    for kind in filter(None, args.mutants.split(",")):
        made = ["--made", args.made] if args.made else []
        logs.append(run(f"gpu_mutants.py --of {kind}",
                        [sys.executable, ROOT / "tests/gpu_mutants.py", build, "--of", kind, *made]))
    if args.sanitizer:
        logs.append(run("compute_sanitizer.sh", [ROOT / "tests/compute_sanitizer.sh", build, args.sanitizer]))
    on_all = ["--tessera", tessera, "--ranks", str(sum(key.startswith("GPU ") for key in machine))]
    if args.faults:
        logs.append(run("gpu_faults.py",
                        [sys.executable, ROOT / "tests/gpu_faults.py", *on_all, "--only", args.faults]))
    if args.backends:
        logs.append(run("gpu_backends.py", [sys.executable, ROOT / "tests/gpu_backends.py", *on_all]))
    if args.guards:
        logs.append(run("guards.py", [sys.executable, ROOT / "bench/guards.py", "--gpu", "--tessera", tessera]))
    if args.forecast:
        logs.append(run("forecast_gpu.py", [sys.executable, ROOT / "bench/forecast_gpu.py", "--tessera", tessera,
                                            "--measure", args.forecast]))
    lines = []
    if args.compare:
        log, lines = run_comparison(tessera, machine["tessera"], args.compare)
        logs.append(log)
    for course in COURSES:
        if (ROOT / "build/lab" / course).exists():
            log, measured = run_course(course)
            logs.append(log)
            lines += measured
    if args.rounds > 0:
        if (build / "bench/bench_generate").exists():
            log, measured = run_decoding(build)
            logs.append(log)
            lines += measured
        log, measured = run_table("bench/gpu.py", "--tessera", tessera, "--python", args.python, "--peers", "--rounds",
                                  str(args.rounds))
        logs.append(log)
        lines += measured
    if args.gpus:
        log, measured = run_gpus(build, tessera, args.gpus, args.seconds)
        logs.append(log)
        lines += measured
    torch = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True,
                           text=True)
    record = {"date": date, "machine": machine, "torch": torch.stdout.strip(), "rounds": args.rounds,
              "sources": hashes(ROOT, {glob for globs in SOURCES.values() for glob in globs if glob[0] != "!"}),
              "logs": logs,
              "lines": lines}
    name = free = f"{date}-{short_name(machine['GPU 0'])}"
    number = 2
    while (ROOT / RECORDS / f"{free}.json.gz").exists():
        free, number = f"{name}-{number}", number + 1
    path = ROOT / RECORDS / f"{free}.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(record, indent=1).encode(), mtime=0))
    print(path)
    # A missed bound of speed is a figure, too. A failed test is not, and neither is a script without rows.
    sys.exit(any(log["rows"] == 0 if log["name"] in TABLES else log["status"] != 0 for log in logs))


# --- Figures of a record, as Markdown -------------------------------------------------------------------------------


def number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


def table(titles, rows):
    lines = ["| " + " | ".join(row) + " |" for row in [titles, *rows]]
    return [lines[0], "|" + " --- |" * len(titles), *lines[1:]]


def sides(record):
    ours, torch = Measurements(), Measurements()
    for line in record["lines"]:
        if not line["table"].startswith("step "):
            (ours if line["side"] == "ours" else torch).add(line["table"], [line])
    return ours, torch


def suites(record):
    def row(log):
        counts = ["all" if log["status"] == 0 else "not all", "", ""]
        if "passed" in log:
            counts = [str(log[key]) for key in ("passed", "failed", "skipped")]
        return [f"`{log['name']}`", *counts, f"{log['seconds']:.0f}"]

    return table(["", "passed", "failed", "skipped", "s"],
                 [row(log) for log in record["logs"] if log["name"] not in TABLES])


def course(name, unit):
    """Returns the function that makes a course's table: a row per level, and a column per shape."""
    def make_table(record):
        ours, _ = sides(record)
        shapes = list(dict.fromkeys(shape for of, _, shape in ours.lines if of == f"lab {name}"))
        levels = list(dict.fromkeys(level for of, level, _ in ours.lines if of == f"lab {name}"))

        def cell(level, shape):
            ms, rate = (ours.median(f"lab {name}", level, shape, key) for key in ("ms", "rate"))
            return f"{number(ms, 2)}, {number(rate, 1 if rate < 10 else 0)}"

        return table([f"ms, {unit}", *shapes], [[level, *(cell(level, shape) for shape in shapes)] for level in levels])
    return make_table


def steps(record):
    def step(name):
        return median_step([line for line in record["lines"] if line["table"] == f"step {name}"])

    of_bf16 = step("bf16").get("tokens_per_s")
    rows = []
    for name in STEPS:
        line = step(name)
        tokens, mfu, idle = (line.get(key) for key in ("tokens_per_s", "mfu", "gpu_idle_share"))
        ratio = tokens / of_bf16 if tokens and of_bf16 else None
        rows.append([f"`{name}`", number(line.get("step_ms"), 1), number(tokens), number(mfu and 100 * mfu, 1),
                     number(ratio, 3), number(idle and 100 * idle, 1)])
    return table(["step of 8 layers of the 16B model", "ms", "tokens/s", "MFU, %", "of bf16", "GPU idle, %"], rows)


def grouped(record):
    """Returns the table of grouped products. A cell has our rate, and its ratio to PyTorch's, or to our bfloat16's for
    weight gradients in 8 bits. Bfloat16's weight gradients also have the ratio to PyTorch's with a conversion to
    float32."""
    ours, torch = sides(record)
    columns = [*BF16, *(f"{kind} {way}" for kind in ("fp8", "mxfp8/128") for way in ("fwd", "dgrad", "wgrad =")),
               "mxfp8/256 fwd", "mxfp8/256 dgrad", "mxfp8/32 fwd"]

    def cell(name, shape):
        kind, way = name.split(" ", 1)
        rate = ours.median("grouped", name, shape, "rate")
        if kind == "bf16" or (kind != "mxfp8/32" and way in ("fwd", "dgrad")):
            beside = torch.median("grouped", name if kind == "bf16" else f"fp8 {way}", shape, "rate")
        else:
            beside = ours.median("grouped", f"bf16 {way}", shape, "rate")
        ratios = [beside]
        if name == "bf16 wgrad =":
            ratios.append(torch.median("grouped", "bf16 wgrad to float32", shape, "rate"))
        return ", ".join([number(rate), *(number(rate / each if rate and each else None, 2) for each in ratios)])

    return table(["TFLOP/s, ratio", *columns],
                 [[shape, *(cell(name, shape) for name in columns)] for shape in ours.shapes("grouped", "bf16 fwd")])


def gemm(record):
    ours, torch = sides(record)
    rows = []
    for shape in ours.shapes("gemm", BF16[0]):
        rates = [(ours.median("gemm", name, shape, "rate"), torch.median("gemm", name, shape, "rate")) for name in BF16]
        rows.append([shape, *(f"{number(a)}, {number(a / b if a and b else None, 2)}" for a, b in rates)])
    return table(["TFLOP/s, of PyTorch's", *BF16], rows)


def attention(record):
    """Returns the table of attention, beside PyTorch's from the same operands, and beside its operator alone with keys
    that were joined before."""
    ours, torch = sides(record)
    rows = []
    for shape in ours.shapes("attention", "attention fwd"):
        def both(of, name="attention"):
            parts = [of.median("attention", f"{name} {way}", shape, "microseconds") for way in ("fwd", "bwd")]
            return None if None in parts else sum(parts)

        a = both(ours)
        beside = [both(torch), both(torch, "attention core")]
        rows.append([shape, number(a), *(f"{number(b)}, {number(b / a if a and b else None, 2)}" for b in beside)])
    titles = ["forward + backward, µs, and as a multiple of ours", "ours", "cuDNN through PyTorch", "of joined keys"]
    return table(titles, rows)


def decoding(record):
    ours, _ = sides(record)
    rows = []
    for texts in dict.fromkeys(shape for of, _, shape in ours.lines if of == "decoding"):
        ms = ours.median("decoding", "on_gpu", texts, "ms")
        rate = ours.median("decoding", "on_gpu", texts, "bytes_per_second")
        rows.append([texts, number(ms, 3), number(1000 * int(texts) / ms), number(rate and rate / 1e12, 2)])
    return table(["texts at a time", "ms", "tokens/s", "TB/s of weights"], rows)


def lines_of_log(record, name):
    """Returns the lines that the command with this name printed."""
    return next(log["log"] for log in record["logs"] if log["name"] == name).splitlines()


def faults(record):
    """Returns the table of runs that a fault interrupted: all but what each run said."""
    rows = [line.split(" | ") for line in lines_of_log(record, "gpu_faults.py") if " | " in line]
    return table(["mesh", "the last rank was", "steps made again", "trained again after"],
                 [[f"`{mesh}`", fault, *result[:2]] for mesh, fault, *result in rows])


BACKEND = re.compile(r"(.+): loss (\S+) to (\S+), (\d+ of \d+) steps .* differ by (\S+) %, (\d+) later rounds")


def backends(record):
    """Returns the table of the same training over each backend."""
    rows = [found.groups() for line in lines_of_log(record, "gpu_backends.py") if (found := BACKEND.fullmatch(line))]
    return table(["run", "first loss", "last loss", "steps with the bits of `direct`", "last 20 losses, %",
                  "later rounds"], rows)


def forecast(record):
    """Returns the table of steps that were predicted before they ran."""
    return [line for line in lines_of_log(record, "forecast_gpu.py") if line.startswith("|")]


def guards(record):
    """Returns the table of what copies and saves of a large state cost."""
    titles, *rows = [line.strip("| ").split(" | ")
                     for line in lines_of_log(record, "guards.py") if line.startswith("|")]
    return table(titles, rows)


def losses(record):
    """Returns the table of runs that were compared: the first side is the baseline."""
    rows = []
    for line in (line for line in record["lines"] if line["table"] == "losses"):
        verdict = line.get("verdict", {})
        losses_of = [(line.get(key) or {}).get("mean") for key in ("final_loss", "validation_loss")]
        rows.append([f"`{line['name']}`", verdict.get("text", ""),
                     ", ".join(f"{100 * one:+.3f}" for one in verdict.get("difference_per_seed", [])),
                     *(number(loss, 4) for loss in losses_of),
                     number(line["tokens_per_second"]), f"{number(line['peak_memory_bytes'] / 2**30, 1)} GiB"])
    return table(["recipe", "verdict", "per seed, %", "loss at the end", "validation loss", "tokens/s per GPU",
                  "memory of a GPU"], rows)


def gpus(record, part):
    """Returns the lines of a part of bench/gpus.py."""
    return [line for line in record["lines"] if line["table"] == "gpus" and line["name"].startswith(part)]


def gpus_cells(record):
    lines = gpus(record, "cells ")
    forced = [line for line in lines if "bf16 standard forced" in line["name"]]
    base = max((line["tokens_per_s_per_rank"] for line in forced), default=None)
    rows = []
    for line in lines:
        _, precision, backend, router, setting = line["name"].split(" ", 4)
        tokens = line["tokens_per_s_per_rank"]
        rows.append([f"`{precision}`, `{backend}`, {router}", setting, number(tokens), number(line["step_ms"], 1),
                     number(100 * line["mfu"], 1), number(tokens / base if base and router == "forced" else None, 3),
                     f"{line['loss_first']:.3f}, {line['loss_last']:.3f}"])
    return table(["16B, router", "setting", "tokens/s per GPU", "ms", "MFU, %", "of bf16 over standard",
                  "first and last loss"], rows)


def gpus_scaling(record):
    """Returns the table of the same step per GPU on more and more GPUs."""
    return table(["GPUs", "tokens/s per GPU", "ms", "MFU, %"],
                 [[line["name"].split()[1], number(line["tokens_per_s_per_rank"]), number(line["step_ms"], 1),
                   number(100 * line["mfu"], 1)] for line in gpus(record, "scaling ")])


def gpus_layers(record):
    """Returns the table of a layer of the 671B model: the difference of steps with more and with fewer layers, over the
    number of layers that they differ by. A run without the other one has no row."""
    lines = {}
    for line in gpus(record, "layers "):
        precision, backend, router, depth = line["name"].removeprefix("layers ").split(" batch=")[0].rsplit(" ", 3)
        lines.setdefault((router, precision, backend), {})[int(depth)] = line

    def cell(few, many, part):
        return number((many[1][part] - few[1][part]) / (many[0] - few[0]), 1)

    return table(["router", "recipe", "backend", "forward, ms", "backward, ms", "step, ms"],
                 [[router, f"`{precision}`", f"`{backend}`",
                   *(cell(*sorted(depths.items()), part) for part in ("forward_ms", "backward_ms", "step_ms"))]
                  for (router, precision, backend), depths in lines.items() if len(depths) == 2])


def gpus_dispatch(record):
    """Returns the table of dispatch and combine: µs, GB/s of all copies, and in brackets of those to other GPUs."""
    lines = gpus(record, "dispatch ")
    calls = list(dict.fromkeys(line["call"] for line in lines))
    rows = {}
    for line in lines:
        of = (line["name"].removeprefix("dispatch "), line["payload"], str(line["sms"]))
        rows.setdefault(of, {})[line["call"]] = (f"{number(line['microseconds'])}, {number(line['gb_per_s'])} "
                                                 f"({number(line['gb_per_s_to_others'])})")
    return table(["shape", "payload", "SMs", *calls],
                 [[*of, *(cells.get(call, "") for call in calls)] for of, cells in rows.items()])


def of_bytes(record):
    ours, _ = sides(record)
    shapes = {}
    for of, name, shape in ours.lines:
        if of in ("quantize", "operators") and (of, name) != ("quantize", "copy"):
            shapes.setdefault((of, name), []).append(shape)
    rows = []
    for (of, name), all_of in shapes.items():
        shares = [ours.median(of, name, shape, "share") for shape in all_of]
        rows.append([name, "; ".join(all_of), " / ".join(number(100 * share) for share in shares)])
    return table(["operator", "of", "% of a copy's rate"], rows)


PARTS = {"suites": suites, "steps": steps, "grouped": grouped, "gemm": gemm, "attention": attention, "bytes": of_bytes,
         "decoding": decoding, "faults": faults, "backends": backends, "guards": guards, "forecast": forecast,
         "losses": losses, "gpus_cells": gpus_cells, "gpus_scaling": gpus_scaling, "gpus_layers": gpus_layers,
         "gpus_dispatch": gpus_dispatch, "lab_grouped_gemm": course("grouped_gemm", "TFLOP/s"),
         "lab_dispatch": course("dispatch", "GB/s")}


# --- Pages ----------------------------------------------------------------------------------------------------------

BEGIN = re.compile(r"<!-- record (\S+) (\S+) -->")
END = "<!-- end -->"
OLD = "**Old**"


class Pages:
    """The pages of a source tree, and their problems."""

    def __init__(self, root):
        self.root, self.problems, self.records = root, [], {}

    def paths(self):
        return [*sorted(self.root.glob("docs/*.md")), *sorted(self.root.glob("lab/*.md"))]

    def record(self, name):
        if name not in self.records:
            path = self.root / RECORDS / f"{name}.json.gz"
            self.records[name] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None
        return self.records[name]

    def is_old(self, record, part):
        measured = {path: one for path, one in record["sources"].items() if is_of(path, SOURCES[part])}
        return hashes(self.root, SOURCES[part]) != measured

    def block(self, path, name, part):
        """Returns the lines between the comments, or None if there is no such record or part."""
        record = self.record(name)
        if record is None or part not in PARTS:
            return None
        machine = record["machine"]
        file = os.path.relpath(self.root / RECORDS / f"{name}.json.gz", path.parent)
        old = f" {OLD}: the sources have changed since." if self.is_old(record, part) else ""
        gpu, driver = (machine[key].split(",")[0] for key in ("GPU 0", "driver"))
        source = (f"Record [{name}]({file}): {gpu}, driver {driver}, "
                  f"cuBLASLt {machine.get('cuBLASLt')}, cuDNN {machine.get('cuDNN')}, PyTorch {record['torch']}; "
                  f"Tessera {machine['tessera']}.{old}")
        return [*textwrap.wrap(source, 120, break_long_words=False, break_on_hyphens=False), "", *PARTS[part](record)]

    def renewed(self, path):
        """Returns the page's lines as they should be."""
        lines, made = path.read_text().splitlines(), []
        at = 0
        while at < len(lines):
            made.append(lines[at])
            begin = BEGIN.fullmatch(lines[at])
            at += 1
            if not begin:
                continue
            where = f"{path.relative_to(self.root)}:{at}"
            if END not in lines[at:]:
                self.problems.append(f"{where}: no '{END}' below '{begin.group()}'")
                continue
            end = lines.index(END, at)
            block = self.block(path, *begin.groups())
            if block is None:
                self.problems.append(f"{where}: no record '{begin[1]}' in {RECORDS}, or no part '{begin[2]}' "
                                     f"(parts: {', '.join(PARTS)})")
            made += lines[at:end] if block is None else block
            made.append(END)
            at = end + 1
        return made

    def check_sections(self, path):
        """Checks that a section that names a GPU has figures of a record, or that it or a section around it says
        "Old"."""
        sections = []  # level, line, old, has a record, names a GPU
        around = []
        in_code = False

        def close(level):
            while around and around[-1]["level"] >= level:
                around.pop()

        for idx, line in enumerate(path.read_text().splitlines(), 1):
            in_code ^= line.startswith("```")
            heading = None if in_code else re.match(r"(#+) ", line)
            if heading:
                close(len(heading[1]))
            if heading or not around:
                around.append({"level": len(heading[1]) if heading else 0, "line": idx, "old": False, "record": False,
                               "names": False, "in": list(around)})
                sections.append(around[-1])
            around[-1]["old"] |= OLD in line
            around[-1]["record"] |= BEGIN.fullmatch(line) is not None
            around[-1]["names"] |= re.search(r"\bH[12]00", line) is not None
        for section in sections:
            said = section["old"] or any(outer["old"] for outer in section["in"])
            if section["names"] and not section["record"] and not said:
                self.problems.append(f"{path.relative_to(self.root)}:{section['line']}: the section names a GPU, but "
                                     f"has no figures of a record; make a record, or say '{OLD}: no record.'")


def check(root):
    """Returns the problems of the pages."""
    pages = Pages(root)
    for path in pages.paths():
        renewed, lines = pages.renewed(path), path.read_text().splitlines()
        if renewed != lines:
            pairs = enumerate(zip(renewed, lines), 1)
            first = next((number for number, (a, b) in pairs if a != b), min(len(renewed), len(lines)))
            pages.problems.append(f"{path.relative_to(root)}:{first}: figures differ from their record; "
                                  f"bench/record.py docs writes them")
        pages.check_sections(path)
    return pages.problems


def write_docs(root):
    pages = Pages(root)
    for path in pages.paths():
        renewed = pages.renewed(path)
        if renewed != path.read_text().splitlines():
            path.write_text("\n".join(renewed) + "\n")
    return pages.problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the source tree whose pages are meant")
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="runs everything on this machine's GPU, and writes a record")
    maker.add_argument("build", type=pathlib.Path, help="the build folder, with the tests")
    maker.add_argument("--python", default=sys.executable, help="one that has PyTorch")
    maker.add_argument("--rounds", type=int, default=2, help="of the tables; 0 leaves tables, steps and decoding out")
    maker.add_argument("--suites", default=",".join(SUITES), help="which to run, in this order; GTEST_FILTER applies")
    maker.add_argument("--mutants", nargs="?", const="gradients,operators", default="", metavar="KIND,...",
                       help="with tests/gpu_mutants.py, by default of what one GPU runs")
    maker.add_argument("--made", metavar="FOLDER", help="the mutants' programs are already here")
    maker.add_argument("--sanitizer", nargs="?", const="*", metavar="FILTER", help="with tests/compute_sanitizer.sh")
    maker.add_argument("--faults", metavar="MESH,...", help="with tests/gpu_faults.py")
    maker.add_argument("--backends", action="store_true", help="with tests/gpu_backends.py")
    maker.add_argument("--guards", action="store_true", help="with bench/guards.py --gpu")
    maker.add_argument("--forecast", type=pathlib.Path, metavar="FILE", help="with bench/forecast_gpu.py --measure")
    maker.add_argument("--compare", metavar="SIDES", help="with tessera compare; its arguments without --out")
    maker.add_argument("--gpus", default="", metavar="PART,...", help="with these parts of bench/gpus.py")
    maker.add_argument("--seconds", type=int, default=0, help="that bench/gpus.py may take; 0: as long as it takes")
    commands.add_parser("docs", help="writes the docs' figures anew from their records")
    commands.add_parser("check", help="fails where they differ from their records")
    args = parser.parse_args()

    if args.command == "make":
        make(args)
    problems = (check if args.command == "check" else write_docs)(args.root.resolve())
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
