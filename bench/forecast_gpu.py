#!/usr/bin/env python3
"""Compares steps on GPUs that were measured with what the planner predicts for them. Needs no GPU, but to measure.

    bench/forecast_gpu.py --tessera PROGRAM [--clusters clusters] [--out VALIDATION]    # plan --validation shows it
    bench/forecast_gpu.py --tessera PROGRAM --predict 2xh200 --out FORECAST    # without a GPU; or settings-2xh200
    bench/forecast_gpu.py --tessera PROGRAM --measure FORECAST                 # makes them, on such GPUs

PROGRAM must be built with CUDA. Rows are steps that have a record or a command in docs/. Rows that had a part in the
rates of clusters/, or that older kernels ran, do not count. Prints a table. Fails if the mean error of the others is
above 3 %, or the largest above 8 %. A FORECAST has the rows of so many GPUs, or for 8xh200 the steps of bench/gpus.py.
It is committed before the runs that check it, whose record goes into RECORDS.
"""

import argparse
import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import types

import gpus
from gpu import FP8_BLOCKWISE, MXFP8, OUTPUT, json_lines
from record import ROOT, lines_of_log
from training_run import AS_ROOT

FORCED = ["--debug.moe_force_load_balance=true", "--parallelism.expert_parallel_capacity_factor=1.05"]
CUT = ["--model.flavor=16B", "--model.args.n_layers=8", "--training.seq_len=8192", "--training.local_batch_size=2",
       *FORCED]
WHOLE = ["--model.flavor=16B", "--training.seq_len=8192", "--training.local_batch_size=2", *FORCED]
ON_TWO = ["configs/16b-2gpu.toml", *FORCED]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=1",
            "--training.global_batch_size=16", "--parallelism.pipeline_parallel_microbatch_size=1"]
MXFP8_ROWS = ["--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8"]
LAYER = ["--model.flavor=671B", "--model.args.n_dense_layers=0", "--training.seq_len=4096",
         "--training.local_batch_size=2", "--model.args.num_experts=64", *FORCED]


def experts(ranks, backend, domain=None):
    return [f"--parallelism.expert_parallel_degree={ranks}", f"--parallelism.expert_parallel_comm_backend={backend}",
            *([f"--parallelism.expert_parallel_ranks_per_domain={domain}"] if domain else [])]


def mode(name, batch):
    return [f"--activation_checkpoint.mode={name}", f"--training.local_batch_size={batch}"]


FIVE = [one.replace("n_layers=8", "n_layers=5") for one in CUT]
# What a row is that does not count: it had a part in the rates of clusters/, or older kernels ran it.
CALIBRATES, OLDER = "calibrates", "older kernels"
# Name, cluster, GPUs, arguments, measured tokens/s per GPU, and why the row does not count. Those of two H100s are from
# `--measure bench/forecasts/2026-11-26-2xh100.json`.
ROWS = [
    ("8 layers, bf16", "h200", 1, CUT, 71005, ""),
    ("8 layers, fp8_blockwise", "h200", 1, CUT + FP8_BLOCKWISE, 77498, ""),
    ("8 layers, fp8_blockwise, output", "h200", 1, CUT + FP8_BLOCKWISE + [OUTPUT], 81568, ""),
    ("8 layers, mxfp8", "h200", 1, CUT + MXFP8, 79243, ""),
    ("8 layers, mxfp8, output", "h200", 1, CUT + MXFP8 + [OUTPUT], 83513, ""),
    ("8 layers, FSDP only", "h200", 4, CUT, 59430, OLDER),
    ("8 layers, direct", "h200", 4, CUT + experts(4, "direct"), 71823, OLDER),
    ("16B, standard", "h200", 4, WHOLE + experts(4, "standard"), 22335, ""),
    ("16B, direct", "h200", 4, WHOLE + experts(4, "direct"), 24498, ""),
    ("16B, direct, mxfp8", "h200", 4, WHOLE + experts(4, "direct") + MXFP8, 28746, ""),
    ("5 layers, bf16", "h100", 1, FIVE, 95453, ""),
    ("5 layers, mxfp8", "h100", 1, FIVE + MXFP8, 101173, ""),
    ("5 layers, full, fp8_blockwise, output", "h100", 1, FIVE + mode("full", 2) + FP8_BLOCKWISE + [OUTPUT], 97329,
     ""),
    ("8 layers, FSDP only", "h100", 2, CUT, 58472, ""),
    ("8 layers, direct", "h100", 2, CUT + experts(2, "direct"), 66396, CALIBRATES),
    ("8 layers, standard", "h100", 2, CUT + experts(2, "standard"), 61161, CALIBRATES),
    ("8 layers, direct, mxfp8", "h100", 2, CUT + experts(2, "direct") + MXFP8, 72948, ""),
    ("8 layers, 1F1B", "h100", 2, CUT + PIPELINE, 63426, ""),
]
# With the real router, the planner takes the load to be balanced.
REAL = ["--debug.moe_force_load_balance=false", "--parallelism.expert_parallel_capacity_factor=1.8"]
# A batch as one micro-batch, as two, and as two whose passes run in turns.
HALVES = ["--training.local_batch_size=1", "--training.global_batch_size=4"]
IN_TURNS = [*HALVES, "--parallelism.expert_parallel_overlap=true"]
HALVED = (("whole", []), ("halves", HALVES), ("halves in turns", IN_TURNS))
# Name and arguments of steps on two H200s, by the kind of their FORECAST. Arguments such as NCCL_MAX_CTAS=4 are set in
# the environment. The planner does not know them, so such steps have no forecast.
ON_TWO_H200 = {
    "2xh200": [
        ("8 layers, FSDP only", CUT),
        ("8 layers, direct", CUT + experts(2, "direct")),
        ("8 layers, direct, mxfp8", CUT + experts(2, "direct") + MXFP8),
        ("8 layers, 1F1B", CUT + PIPELINE),
        ("16B, standard, none", ON_TWO + mode("none", 1) + experts(2, "standard")),
        ("16B, direct, none", ON_TWO + mode("none", 1)),
        ("16B, standard, mxfp8, full", ON_TWO + mode("full", 2) + experts(2, "standard") + MXFP8),
        ("16B, direct, mxfp8, full", ON_TWO + mode("full", 2) + MXFP8 + MXFP8_ROWS),
        *((f"671B layer, {backend}, {name}, {depth} layers",
           LAYER + experts(2, backend) + recipe + [f"--model.args.n_layers={depth}"])
          for name, recipe in (("bf16", []), ("fp8_blockwise", FP8_BLOCKWISE), ("mxfp8", MXFP8))
          for backend in ("standard", "direct") for depth in (3, 1)),
    ],
    "settings-2xh200": [
        *((f"8 layers, {schedule}", CUT + PIPELINE + [f"--parallelism.pipeline_parallel_schedule={schedule}"])
          for schedule in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
        *((f"8 layers, direct, {sms} SMs",
           CUT + experts(2, "direct") + [f"--parallelism.expert_parallel_num_sms={sms}"]) for sms in (8, 16, 32)),
        *((f"16B, {backend}, real, {name}", ON_TWO + REAL + experts(2, backend) + how)
          for name, how in (("bf16", []), ("mxfp8, full", mode("full", 1) + MXFP8))
          for backend in ("standard", "direct")),
    ],
    "overlap-2xh200": [
        *((f"8 layers, FSDP only{name}", CUT + channels)
          for name, channels in (("", []), *((f", NCCL_MAX_CTAS={n}", [f"NCCL_MAX_CTAS={n}"]) for n in (4, 8, 16)))),
        *((f"8 layers, {name}, {batch}", CUT + experts(2, backend) + how + more)
          for name, backend, how in (
              ("direct", "direct", []), ("direct, mxfp8", "direct", MXFP8), ("standard", "standard", []),
              ("standard, NCCL_MAX_P2P_NCHANNELS=1", "standard", ["NCCL_MAX_P2P_NCHANNELS=1"]))
          for batch, more in HALVED),
    ],
}
# The records that measured these forecasts, and the runs that had a part in clusters/h200.toml.
RECORDS = {"2026-11-29-h200-11": "2xh200", "2026-11-29-h200-15": "settings-2xh200",
           "2026-11-29-h200-17": "overlap-2xh200"}
CALIBRATED_BY = ("8 layers, FSDP only", "8 layers, direct")
MEAN, MOST = 0.03, 0.08


def predict(program, clusters, cluster, ranks, arguments):
    """Returns the planner's answer."""
    command = [program, "plan", "time", *arguments, "--cluster", clusters / f"{cluster}.toml", "--ranks", str(ranks),
               "--json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"forecast_gpu: {' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def recorded_rows():
    """Returns rows like ROWS' from RECORDS. Of runs with the same name, only the first one is a row."""
    rows = {}
    for record, kind in RECORDS.items():
        content = json.loads(gzip.decompress((ROOT / f"bench/records/{record}.json.gz").read_bytes()))
        cells = [line.split(" | ") for line in lines_of_log(content, "forecast_gpu.py")]
        measured = {line[0].removeprefix("| "): int(line[2].replace(",", "")) for line in cells[2:] if len(line) > 3}
        for name, options in ON_TWO_H200[kind]:
            if not any(map(is_variable, options)):
                rows.setdefault(name, (name, "h200", 2, options, measured[name],
                                       CALIBRATES if name in CALIBRATED_BY else ""))
    return rows.values()


def is_variable(option):
    """Returns whether an argument of a run is a variable of its environment."""
    return not option.startswith("-") and "=" in option


def blind_runs(kind):
    """Yields name, number of GPUs and options of the runs of a kind, such as 2xh200."""
    for name, options in ON_TWO_H200.get(kind, []):
        yield name, 2, options
    if kind == "8xh200":
        args = types.SimpleNamespace(ranks=gpus.BOUND_RANKS, tessera="", bench="")
        for run in gpus.plan(args):
            if "step" in run.key:
                ranks, _, _, *options = run.key
                yield (gpus.name_of(run), ranks,
                       [one for one in options if not one.startswith(("--steps", "--warmup", "--comm"))])
        return
    for name, cluster, ranks, options, _, _ in ROWS:
        if kind == f"{ranks}x{cluster}":
            yield name, ranks, options


def write_blind(path, kind, program, clusters):
    """Writes the forecasts of runs that have not been made."""
    rows = []
    runs = list(blind_runs(kind))
    if not runs:
        kinds = {"8xh200", *ON_TWO_H200, *(f"{ranks}x{cluster}" for _, cluster, ranks, *_ in ROWS)}
        sys.exit(f"forecast_gpu: no runs of '{kind}'; expected one of {', '.join(sorted(kinds))}")
    for name, ranks, options in runs:
        row = {"run": name, "ranks": ranks, "options": options}
        if any(map(is_variable, options)):
            rows.append(row)
            continue
        answer = predict(program, clusters, kind.split("x")[1], ranks, options)
        rows.append(row | {
            "tokens_per_s_per_gpu": round(answer["tokens_per_s_per_gpu"]),
            "step_ms": round(answer["step_ms"], 1), "memory_gib": round(answer["memory_bytes"] / 2**30, 1)})
    path.write_text(json.dumps({"cluster": kind, "forecasts": rows}, indent=1) + "\n")
    print(f"{path}: {len(rows)} forecasts")


def measure(path, program):
    """Makes the runs of a forecast, and compares. Returns whether all could be made."""
    is_complete = True
    forecasts = json.loads(path.read_text()).get("forecasts")
    if not forecasts:
        sys.exit(f"forecast_gpu: '{path}' has no forecasts of --predict")
    print("| run | GPUs | measured | predicted | error, % |\n| --- | --- | --- | --- | --- |")
    for row in forecasts:
        variables = dict(option.split("=", 1) for option in row["options"] if is_variable(option))
        command = [*gpus.mpirun(row["ranks"]), program, "bench", "step", "--training.device=cuda", "--steps=12",
                   "--warmup=5", *(option for option in row["options"] if not is_variable(option))]
        for _ in range(2):  # mpirun may lose the last line of a program that ends at once
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_ROOT | variables)
            lines = json_lines(done.stdout)
            if done.returncode != 0 or lines:
                break
        if done.returncode != 0 or not lines:
            print(f"| {row['run']} | {row['ranks']} | {(done.stderr or done.stdout).strip()[-300:]} | | |", flush=True)
            is_complete = False
            continue
        measured, predicted = lines[-1]["tokens_per_s_per_rank"], row.get("tokens_per_s_per_gpu")
        forecast = f"{predicted:,} | {100 * (predicted / measured - 1):+.1f}" if predicted else "- | -"
        print(f"| {row['run']} | {row['ranks']} | {measured:,.0f} | {forecast} |", flush=True)
    return is_complete


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--clusters", type=pathlib.Path, default=ROOT / "clusters")
    parser.add_argument("--predict", metavar="NxGPU", help="write forecasts for such GPUs to --out")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--measure", type=pathlib.Path, metavar="FORECAST", help="make its runs, and compare")
    args = parser.parse_args()
    if args.predict and not args.out:
        parser.error("--predict needs --out")
    if args.predict:
        return write_blind(args.out, args.predict, args.tessera, args.clusters)
    if args.measure:
        sys.exit(not measure(args.measure, args.tessera))
    rows = [*ROWS, *recorded_rows()]
    errors, runs = [], {}
    print("| run | GPUs | measured | predicted | error, % | |\n| --- | --- | --- | --- | --- | --- |")
    for name, cluster, ranks, arguments, measured, why_not in rows:
        predicted = predict(args.tessera, args.clusters, cluster, ranks, arguments)["tokens_per_s_per_gpu"]
        gpus_of_run = f"{ranks} {cluster.upper()}"
        error = predicted / measured - 1.0  # a positive one is a forecast that is too fast
        runs[f"{name}, {gpus_of_run}"] = {"measured": measured, "predicted": round(predicted, 3)}
        if not why_not:
            errors.append(abs(error))
        print(f"| {name} | {gpus_of_run} | {measured:,} | {predicted:,.0f} | {100 * error:+.1f} | {why_not} |",
              flush=True)
    if args.out:
        args.out.write_text(json.dumps({"format": "tessera validation", "version": 1, "runs": runs}, indent=1) + "\n")
    mean, most = statistics.mean(errors), max(errors)
    print(f"\nrows that validate: mean error {100 * mean:.1f} % (must {100 * MEAN:g}), largest {100 * most:.1f} % "
          f"(must {100 * MOST:g})")
    sys.exit(mean > MEAN or most > MOST)


if __name__ == "__main__":
    main()
